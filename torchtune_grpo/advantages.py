"""Rewards -> their total -> group-relative advantages, for all N = B * G rows of a rank's step.

    group           c / (std of the group + 1e-4)       GRPO: Shao et al. 2024, arXiv:2402.03300
    batch           c / (std of all raw rewards + 1e-4) Lite PPO: Liu et al. 2025, arXiv:2508.08221
    none            c                                   Dr. GRPO: Liu et al. 2025, arXiv:2503.20783
    leave_one_out   r - mean of the others              RLOO: Ahmadian et al. 2024, arXiv:2402.14740
    max_rl          c / mean of the group; 0 if it is 0 MaxRL: Tajwar et al. 2026, arXiv:2602.02710

with c = r - mean of the group, and every std with ddof=1. MaxRL accepts no negative rewards.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from torchtune_grpo.machine.parallel import gather_over_ranks

STD_EPSILON = 1e-4  # keeps the quotient finite where all rewards are (nearly) equal


def fill_with_group_means(scores: Tensor, missing: Tensor, *, group_size: int) -> Tensor:
    """Fill the ``missing`` [N, R] of the scores [N, R] with their group's mean; 0 if all are.

    A score that does not exist is NaN. A group of equal scores is filled with exactly that score.
    """
    groups = scores.view(-1, group_size, scores.shape[1])  # [B, G, R]
    means = groups.double().nanmean(dim=1, keepdim=True).nan_to_num(nan=0.0)  # [B, 1, R]
    return groups.where(~missing.view_as(groups), means.to(groups.dtype)).view_as(scores)


def total_reward(scores: Tensor, failed: Tensor, weights: Tensor, *, group_size: int) -> Tensor:
    """Return the weighted sum [N] of R rewards [N, R]; in float64, their order does not matter.

    A score is NaN where a reward does not apply, which adds nothing, or has ``failed`` [N, R],
    which counts as the mean of its group and so favours no row. The sum is NaN for a row to which
    no reward with a weight applies: it is not compared with the others.
    """
    filled = fill_with_group_means(scores, failed, group_size=group_size)
    total = (filled.nan_to_num(nan=0.0).double() * weights).sum(dim=1)
    applies = (~scores.isnan() | failed) & (weights != 0)
    return total.where(applies.any(dim=1) | (weights == 0).all(), math.nan).float()


def group_stds(rewards: Tensor, *, group_size: int) -> Tensor:
    """Return the std of each group's rewards [N]: [B], 0 if they are equal; NaN is left out."""
    groups, count = _filled_groups(rewards, group_size)
    # A row with the mean of the others adds nothing to the sum of squares, but one to its divisor.
    widened = ((group_size - 1) / (count[:, 0] - 1).clamp(min=1)).sqrt()
    return (groups - groups[:, :1]).std(dim=1) * widened


def _filled_groups(rewards: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return rewards [N] as [B, G], NaN filled with its group's mean, and counts of the others."""
    missing = rewards.isnan()
    filled = fill_with_group_means(rewards[:, None], missing[:, None], group_size=group_size)
    count = (~missing).view(-1, group_size).sum(dim=1, keepdim=True)  # [B, 1]
    return filled.view(-1, group_size), count


def group_advantages(
    rewards: Tensor,
    *,
    group_size: int,
    normalization: str = "group",
) -> Tensor:
    """Compare each reward [N] with the others of its group; equal rewards give zeros.

    A row whose reward is NaN is left out: its advantage is 0, and it is not in the group's mean and
    spread. ``max_rl`` raises on every rank if any rank has a negative reward.
    """
    groups, count = _filled_groups(rewards, group_size)
    # Subtracting one of the rewards first makes equal rewards exactly zero, whatever they are.
    shifted = groups - groups[:, :1]
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    if normalization == "group" and len(groups):
        centred = centred / (group_stds(rewards, group_size=group_size)[:, None] + STD_EPSILON)
    elif normalization == "batch":
        centred = centred / (_std_over_ranks(rewards[~rewards.isnan()]) + STD_EPSILON)
    elif normalization == "leave_one_out":  # r - (sum - r) / (n - 1) = c n / (n - 1)
        centred = centred * count / (count - 1).clamp(min=1)
    elif normalization == "max_rl":
        lowest = min(gather_over_ranks(min(groups.flatten().tolist(), default=0.0)))
        if lowest < 0:
            raise ValueError(
                f"objective.advantage=max_rl: a completion has the reward {lowest:g}, and means "
                "of negative rewards cannot scale; give rewards and weights of 0 or more, or set "
                "it to group."
            )
        mean = groups.mean(dim=1, keepdim=True)
        centred = (centred / mean).where(mean > 0, 0)
    return centred.reshape(-1).where(~rewards.isnan(), 0)


def reward_advantages(
    total: Tensor,
    scores: Tensor,
    weights: Tensor,
    *,
    group_size: int,
    normalization: str = "group",
    aggregation: str = "sum_then_normalize",
    kept: Tensor | None = None,
) -> Tensor:
    """Turn the rewards' scores [N, R], of which ``total`` [N] is the sum, into advantages [N].

    ``sum_then_normalize`` normalizes the weighted sum (GRPO). ``normalize_then_sum`` normalizes
    each reward by itself, sums the results with the weights, and divides by the sums' std over the
    batch, so that a reward with a small spread is not drowned by one with a large spread, and the
    number of rewards does not scale the step (GDPO, arXiv:2601.05242; the sums' mean, which GDPO
    subtracts, is 0, as each group's mean is). A NaN is left out of its group. Groups that are not
    ``kept`` [N] bool are not part of the batch, and their advantages are 0; None keeps all.
    """
    advantages = torch.zeros_like(total)
    rows = torch.ones_like(total, dtype=torch.bool) if kept is None else kept
    normalize = partial(group_advantages, group_size=group_size, normalization=normalization)
    if aggregation == "sum_then_normalize":
        advantages[rows] = normalize(total[rows])
        return advantages
    # A reward of weight 0 is only logged: it may be one that cannot be normalized.
    normalized = [
        normalize(column) if weight else torch.zeros_like(column)
        for column, weight in zip(scores[rows].unbind(1), weights.tolist(), strict=True)
    ]
    combined = (torch.stack(normalized, dim=1) * weights).sum(dim=1)
    counted = combined[~total[rows].isnan()]
    advantages[rows] = combined / (_std_over_ranks(counted) + STD_EPSILON)
    return advantages


class OutcomeGate:
    """Lets other rewards train a group only if the deciding one differs within it.

    Where all answers are wrong, a length penalty would train alone, and shorten the answers until
    none is right any more. All groups train only until the deciding reward has first told two
    answers apart in this run, so that a format that right answers need can be learned.
    """

    def __init__(self, reward: str) -> None:
        self.reward = reward  # name of the deciding reward
        self.is_shut = False  # saved with the run

    def __call__(self, outcomes: Tensor, *, group_size: int) -> Tensor:
        """Mark the rows that may train: [N] outcomes, NaN where there is none -> [N] bool.

        A group without any outcome is left to the other rewards.
        """
        groups = outcomes.view(-1, group_size)  # [B, G]
        low = groups.nan_to_num(nan=math.inf).amin(dim=1)  # [B]
        high = groups.nan_to_num(nan=-math.inf).amax(dim=1)
        self.is_shut |= any(gather_over_ranks(bool((low < high).any())))
        passes = (low != high) if self.is_shut else torch.ones_like(low, dtype=torch.bool)
        return passes.repeat_interleave(group_size)


def _std_over_ranks(values: Tensor) -> Tensor:
    """Return the std of all ranks' values; 0 if no group, or only one value, is left."""
    everyone = torch.cat(gather_over_ranks(values))
    return everyone.std() if len(everyone) > 1 else everyone.new_zeros(())
