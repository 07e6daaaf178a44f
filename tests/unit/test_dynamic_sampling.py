"""Which groups pass the filter, and what the others mean for the advantages."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.config.keys import Advantage, DynamicSamplingConfig, RewardAggregation
from torchtune_grpo.training.dynamic_sampling import passes_filter

NAN = float("nan")


@pytest.mark.parametrize(
    ("keys", "rewards", "passes"),
    [
        ({}, [1.0, 0.0, 0.0], True),
        ({}, [0.1, 0.1, 0.1], False),
        ({"reward": "a"}, [1.0, 0.0, NAN], True),
        ({"reward": "a"}, [1.0, 1.0, NAN], False),
        ({"gate": "a"}, [1.0, 1.0, 1.0], False),
        ({"reward": "b", "gate": "a"}, [1.0, 1.0, 1.0], True),
    ],
)
def test_the_filter(keys, rewards, passes):
    """Of the sum of all rewards, or of the one that is named or gates, whatever the sum is."""
    gate = keys.pop("gate", None)
    settings = DynamicSamplingConfig(max_resamples=1, **keys)
    values = torch.tensor(rewards)
    other = torch.arange(len(rewards))
    total = other if gate or "reward" in keys else values
    scores = SimpleNamespace(of={"a": values, "b": other}.get, total=total)
    found = passes_filter(scores, settings, group_size=len(rewards), gate=gate)
    assert found.tolist() == [passes]


# What other tests have left to the garbage collector is not theirs.
@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")
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
