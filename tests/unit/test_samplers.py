"""Which prompts come next: passes without gaps, curricula, and the same ones when asked again."""

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_grpo.data import ShuffledSampler
from torchtune_grpo.data.samplers import make_sampler, prompts_of_rank

LEVELS = [3, 1, 2, 1, 2, 1, 3, 1, 3, 2]
ROWS = [
    {"index": i, "tokens": [i], "prompt": str(i), "columns": {"level": level}}
    for i, level in enumerate(LEVELS)
]


def make(name, **arguments):
    node = OmegaConf.create({"_component_": f"torchtune_grpo.data.{name}", **arguments})
    return make_sampler(node, ROWS, seed=1)


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


@pytest.mark.parametrize("name", ["ShuffledSampler", "LevelSampler"])
def test_a_step_gets_the_same_prompts_until_it_is_done_and_a_resumed_run_goes_on(name, tmp_path):
    sampler, told = make(name), lambda row: row / 10
    draw(sampler, 4, 7, told)
    assert sampler.next(4) == sampler.next(4)
    assert sampler.next(2) + sampler.next(2, skip=2) == sampler.next(4)  # as rounds of a step
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    resumed = make(name)
    assert resumed.next(4) != sampler.next(4)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.metrics == sampler.metrics
    assert draw(resumed, 4, 9, told) == draw(sampler, 4, 9, told)
    with pytest.raises(ValueError, match="lower batch_size"):
        sampler.next(11)


def test_a_weighted_step_sees_no_prompt_twice_if_it_can():
    for rows in draw(make("LevelSampler"), 4, 20):
        assert len(set(rows)) == 4
    few = make("LevelSampler").next(6)  # of four of the first level
    assert len(set(few)) == 4 and few[4:] == few[:2]


def test_levels_are_added_when_the_newest_is_solved():
    sampler = make("LevelSampler", window=8, pass_rate=0.75)
    solved = {1}

    def rate(row):
        return 1.0 if LEVELS[row] in solved else 0.7

    def levels(steps):
        return {LEVELS[row] for rows in draw(sampler, 4, steps, rate) for row in rows}

    assert levels(2) == {1} and sampler.metrics["sampler/level"] == 1
    assert levels(30) == {1, 2} and sampler.metrics["sampler/level"] == 1
    assert sampler.metrics["sampler/level_pass_rate"] == pytest.approx(0.7)
    solved.add(2)
    levels(8)
    assert sampler.metrics["sampler/level"] == 2
    solved.add(3)
    drawn = [LEVELS[row] for rows in draw(sampler, 3, 400, rate) for row in rows]
    counts = [drawn.count(level) / len(drawn) for level in (1, 2, 3)]
    assert counts == pytest.approx([1 / 3] * 3, abs=0.04)  # whatever the number of their rows


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


def test_bad_arguments_of_a_sampler_are_named():
    with pytest.raises(ValueError, match=r"sampler.column=depth: dataset has level\."):
        make("LevelSampler", column="depth")
    with pytest.raises(ValueError, match=r"sampler.pass_rate=0, window=32: give \(0, 1\]"):
        make("LevelSampler", pass_rate=0)
