"""Which groups pass the filter, and what the others mean for the advantages."""

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from torchtune_grpo.advantages import reward_advantages
from torchtune_grpo.config.keys import Advantage, RewardAggregation
from torchtune_grpo.training.dynamic_sampling import passes_filter

NAN = float("nan")


@pytest.mark.parametrize(
    ("gate", "rewards", "passes"),
    [
        (None, [1.0, 0.0, 0.0], True),
        (None, [0.1, 0.1, 0.1], False),
        ("a", [1.0, 0.0, NAN], True),
        ("a", [1.0, 1.0, NAN], False),
    ],
)
def test_the_filter(gate, rewards, passes):
    """Of the sum of all rewards, or of the one that gates, whatever the sum is."""
    values, other = torch.tensor(rewards), torch.arange(len(rewards))
    scores = SimpleNamespace(of={"a": values}.get, total=other if gate else values)
    found = passes_filter(scores, group_size=len(rewards), gate=gate)
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
