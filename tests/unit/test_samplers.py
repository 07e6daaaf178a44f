"""Which prompts come next: passes without gaps, and the same ones when asked again.

Also for the docs' sampler of one's own, which checkpoints hold with its attributes.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo.checkpoint.checkpoints import check_state
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.data.samplers import make_sampler, prompts_of_rank

SHUFFLED = "torchtune_grpo.data.ShuffledSampler"
ROWS = [{"index": i, "tokens": [i], "prompt": str(i), "columns": {"n": i}} for i in range(10)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a sampler of ours, or the docs'."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (text,) = re.findall(r"```python\n(# my_sampler.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_sampler.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def made(path, **arguments):
        return make_sampler(OmegaConf.create({"_component_": path, **arguments}), ROWS, seed=1)

    return made


def draw(sampler, count, steps, rate=lambda row: 0.5):
    """Return the prompts of some steps."""
    drawn = []
    for _ in range(steps):
        rows = sampler.next(count)
        sampler.learn(rows, [rate(row) for row in rows])
        drawn.append(rows)
    return drawn


def test_passes_over_the_data_without_repeats_or_gaps():
    """7 rows, 3 a step: 7 steps are exactly 3 passes, each a permutation, each a different one."""
    flat = sum(draw(ShuffledSampler(range(7), seed=1), 3, 7), [])
    passes = [flat[0:7], flat[7:14], flat[14:21]]
    assert all(sorted(p) == list(range(7)) for p in passes)
    assert passes[0] != passes[1] != passes[2]
    assert draw(ShuffledSampler(range(7), seed=2), 3, 1)[0] != flat[:3]
    ordered = ShuffledSampler(range(5), seed=0, shuffle=False)
    assert draw(ordered, 4, 2) == [[0, 1, 2, 3], [4, 0, 1, 2]]
    with pytest.raises(ValueError, match=r"batch_size \* ranks = 8 prompts a step, but dataset ha"):
        ShuffledSampler(range(7), seed=1).next(8)


@pytest.mark.parametrize(
    ("path", "arguments"),
    [(SHUFFLED, {}), (SHUFFLED, {"rest": 2}), ("my_sampler.SeldomSolved", {})],
)
def test_a_step_gets_the_same_prompts_until_it_is_done_and_a_resumed_run_goes_on(
    path, arguments, make, tmp_path
):
    make = partial(make, path, **arguments)
    sampler, told = make(), lambda row: row % 4 / 3
    draw(sampler, 4, 7, told)
    assert sampler.next(4) == sampler.next(4)
    assert sampler.next(2) + sampler.next(2, skip=2) == sampler.next(4)  # as rounds of a step
    check_state("sampler", sampler.state_dict())
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    resumed = make()
    assert resumed.next(4) != sampler.next(4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw(resumed, 4, 9, told) == draw(sampler, 4, 9, told)


def passes(sampler, rate, *sizes):
    """Draw passes of these sizes, and check that none has a prompt twice."""
    drawn = [sum(draw(sampler, size // 2, 2, rate), []) for size in sizes]
    assert all(len({*rows}) == len(rows) for rows in drawn)
    return drawn


def test_prompts_that_are_always_or_never_solved_sit_out_some_passes(make):
    """0 to 3 are always solved, 4 and 5 never; what no reward has scored says nothing."""
    sampler = make(SHUFFLED, rest=2)
    drawn = passes(
        sampler, lambda row: (1.0, 0.0, 0.3, None)[(row > 3) + (row > 5) + (row > 7)], 10
    )
    assert sampler.metrics == {"sampler/resting": 0.6} and sampler.epoch == 1
    drawn += passes(sampler, lambda row: 0.5, 4, 4, 10, 10)
    assert [sorted(rows) for rows in drawn] == [
        [*range(10)],
        *[[6, 7, 8, 9]] * 2,
        *[[*range(10)]] * 2,
    ]
    assert sampler.metrics == {"sampler/resting": 0.0} and sampler.epoch == 5
    assert drawn[-1] == make(SHUFFLED).ahead(50)[40:]  # in the order that the pass has anyway


def test_if_all_prompts_rest_the_passes_without_any_are_over_at_once(make):
    sampler = make(SHUFFLED, rest=3)
    drawn = passes(sampler, lambda row: 1.0, 10, 10)
    assert sampler.epoch == 5 and drawn[1] == make(SHUFFLED).ahead(50)[40:]
    with pytest.raises(ValueError, match="sampler.rest=-1: give 0 or more passes"):
        make(SHUFFLED, rest=-1)
    with pytest.raises(ValueError, match=r"sampler.rest=3: the deciding reward averages -1 over"):
        passes(make(SHUFFLED, rest=3), lambda row: -1.0, 2)


def test_the_docs_sampler_takes_seldom_solved_prompts_more_often(make):
    drawn = sum(draw(make("my_sampler.SeldomSolved"), 5, 400, lambda row: float(row < 5)), [])
    assert 5 < sum(row >= 5 for row in drawn) / sum(row < 5 for row in drawn) < 15


def test_ranks_share_a_round_and_count_what_came_before():
    def shares(rows, world_size, **options):
        ranks = range(world_size)
        return [
            prompts_of_rank(ROWS, rows, rank=r, world_size=world_size, **options) for r in ranks
        ]

    first, second = shares([4, 2, 4, 4, 9, 2], 2)
    assert [batch.indices for batch, _ in (first, second)] == [[4, 2, 4], [4, 9, 2]]
    assert [batch.uses for batch, _ in (first, second)] == [[0, 0, 1], [2, 0, 1]]
    assert [batch.step_indices for batch, _ in (first, second)] == [[0, 1, 2], [3, 4, 5]]
    (spare, none), (batch, one) = shares([4], 2, before=[4, 2])
    assert (none, one) == (0, 1) and spare.indices == batch.indices == [4]
    assert batch.uses == [1] and batch.step_indices == [2]
