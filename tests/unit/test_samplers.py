"""Which prompts come next: passes without gaps, and the same ones when asked again.

Also for the docs' sampler of one's own, which checkpoints hold with its attributes.
"""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo.checkpoint.checkpoints import check_state
from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.data.samplers import make_sampler, prompts_of_rank

ROWS = [{"index": i, "tokens": [i], "prompt": str(i), "columns": {"n": i}} for i in range(10)]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a sampler of ours, or the docs'."""
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    (text,) = re.findall(r"```python\n(# my_sampler.py.*?)```", page, re.DOTALL)
    (tmp_path / "my_sampler.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def made(path):
        return make_sampler(OmegaConf.create({"_component_": path}), ROWS, seed=1)

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


@pytest.mark.parametrize("path", ["torchtune_grpo.data.ShuffledSampler", "my_sampler.SeldomSolved"])
def test_a_step_gets_the_same_prompts_until_it_is_done_and_a_resumed_run_goes_on(
    path, make, tmp_path
):
    sampler, told = make(path), lambda row: row / 10
    draw(sampler, 4, 7, told)
    assert sampler.next(4) == sampler.next(4)
    assert sampler.next(2) + sampler.next(2, skip=2) == sampler.next(4)  # as rounds of a step
    check_state("sampler", sampler.state_dict())
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    resumed = make(path)
    assert resumed.next(4) != sampler.next(4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw(resumed, 4, 9, told) == draw(sampler, 4, 9, told)


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
