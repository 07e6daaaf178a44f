"""Which prompts a step takes, in rounds, and which groups pass the filter."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import make_scores
from trajectories import make_groups

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.config.keys import Advantage, DynamicSamplingConfig, RewardAggregation
from torchtune_grpo.training.dynamic_sampling import Rounds, passes_filter

NAN = float("nan")


def by_rounds(fails: list[bool], *, batch_size: int, rounds: int) -> int:
    """As DAPO does it: as many prompts as groups of the last round failed, and again."""
    count, new = batch_size, range(batch_size)
    for _ in range(rounds):
        new = range(count, count + sum(fails[place] for place in new))
        count += len(new)
    return count


PROMPTS = [dict(index=n, tokens=[n], prompt=str(n), columns={}) for n in range(20)]


@given(
    fails=st.lists(st.booleans(), min_size=20, max_size=20),
    batch_size=st.integers(1, 5),
    rounds=st.integers(0, 3),
)
def test_as_many_prompts_come_as_groups_fail(fails, batch_size, rounds):
    settings = DynamicSamplingConfig(max_resamples=rounds)
    cfg = SimpleNamespace(batch_size=batch_size, grpo_samples=2, dynamic_sampling=settings)
    steps = Rounds(cfg, PROMPTS, lambda count, skip: [*range(skip, skip + count)])
    for batch in steps:
        failed = [rounds > 0 and fails[place] for place in batch.places]
        totals = [score for fail in failed for score in ((1.0, 1.0) if fail else (0.0, 1.0))]
        steps.add(make_groups([1] * len(failed), [2] * len(totals)), group(totals))
    rows, scores, kept = steps.result()
    expected = by_rounds(fails, batch_size=batch_size, rounds=rounds)
    assert rows.num_rows == len(scores.total) == len(kept) == 2 * expected
    wanted = [rounds == 0 or not fail for fail in fails[:expected] for _ in range(2)]
    assert kept.tolist() == wanted
    assert steps.missing == batch_size - sum(wanted) // 2


def group(total, first=None):
    total = torch.tensor(total)
    scores = torch.stack([total if first is None else torch.tensor(first), total], dim=1)
    shape = dict(scores=scores, total=total, failed=scores.isnan(), extra={})
    return replace(make_scores(), names=["a", "b"], **shape)


@pytest.mark.parametrize(
    ("keys", "total", "first", "passes"),
    [
        ({}, [1.0, 0.0, 0.0], None, True),
        ({}, [0.1, 0.1, 0.1], None, False),
        ({"reward": "a"}, [1.0, 0.0, 0.0], [1.0, 1.0, 1.0], False),
        ({"reward": "a"}, [1.0, 1.0, 1.0], [1.0, 0.0, NAN], True),
        ({"reward": "a"}, [1.0, 0.0, 0.0], [1.0, 1.0, NAN], False),
        ({"min_pass_rate": 0.25}, [1.0, 0.0, 0.0, 0.0], None, True),
        ({"min_pass_rate": 0.26}, [1.0, 0.0, 0.0, 0.0], None, False),
        ({"max_pass_rate": 0.25}, [1.0, 0.0, 0.0, 0.0], None, True),
        ({"max_pass_rate": 0.24}, [1.0, 0.0, 0.0, 0.0], None, False),
    ],
)
def test_the_filter(keys, total, first, passes):
    settings = DynamicSamplingConfig(max_resamples=1, **keys)
    size = len(total)
    assert passes_filter(group(total, first), settings, group_size=size).tolist() == [passes]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("aggregation", get_args(RewardAggregation))
@pytest.mark.parametrize("normalization", get_args(Advantage))
def test_advantages_are_those_of_the_groups_that_are_kept(normalization, aggregation):
    """The others are no part of the batch, whose spread may scale; there may be none left."""
    total = torch.tensor([0.0, 1.0, 1.0, 0.0, 5.0, 9.0, 2.0, 2.5])
    settings = {"group_size": 2, "normalization": normalization, "aggregation": aggregation}

    def advantages(rows, **kept):
        of_rewards = (total[rows], torch.stack([total, total**2], dim=1)[rows], torch.ones(2))
        return reward_advantages(*of_rewards, **settings, **kept)

    kept = torch.tensor([True, True, False, False, False, False, True, True])
    some = advantages(slice(None), kept=kept)
    assert torch.equal(some[kept], advantages(kept)) and not some[~kept].any()
    assert some[kept].all()
    nothing = advantages(slice(None), kept=torch.zeros(8, dtype=torch.bool))
    assert torch.equal(nothing, torch.zeros(8))
