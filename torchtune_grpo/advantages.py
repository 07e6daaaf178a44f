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

    A score is NaN where a reward does not apply, which counts as 0, or has ``failed`` [N, R], which
    counts as the mean of its group and so favours no row.
    """
    filled = fill_with_group_means(scores, failed, group_size=group_size)
    return (filled.nan_to_num(nan=0.0).double() * weights).sum(dim=1).float()


def group_advantages(
    rewards: Tensor,
    *,
    group_size: int,
    normalization: str = "group",
    filled: Tensor | None = None,
) -> Tensor:
    """Compare each reward [N] with the others of its group; equal rewards give zeros.

    ``filled`` [N] bool marks rewards that were missing and are their group's mean; the group's std
    leaves them out. ``max_rl`` raises on every rank if any rank has a negative reward.
    """
    groups = rewards.view(-1, group_size)  # [B, G]
    # Subtracting one of the rewards first makes equal rewards exactly zero, whatever they are.
    shifted = groups - groups[:, :1]
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    if normalization == "group" and len(groups):
        std = shifted.std(dim=1, keepdim=True)
        if filled is not None:
            others = group_size - filled.view_as(groups).sum(dim=1, keepdim=True)
            std = std * ((group_size - 1) / (others - 1).clamp(min=1)).sqrt()
        centred = centred / (std + STD_EPSILON)
    elif normalization == "batch":
        centred = centred / (_std_over_ranks(rewards) + STD_EPSILON)
    elif normalization == "leave_one_out":  # r - (sum - r) / (G - 1) = c G / (G - 1)
        centred = centred * group_size / (group_size - 1)
    elif normalization == "max_rl":
        lowest = min(gather_over_ranks(min(rewards.tolist(), default=0.0)))
        if lowest < 0:
            raise ValueError(
                f"objective.advantage=max_rl: a completion has the reward {lowest:g}, and means "
                "of negative rewards cannot scale; give rewards and weights of 0 or more, or set "
                "it to group."
            )
        mean = groups.mean(dim=1, keepdim=True)
        centred = (centred / mean).where(mean > 0, 0)
    return centred.reshape(-1)


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
    subtracts, is 0, as each group's mean is). A NaN then counts as the mean of its group, and is
    left out of the group's std. Groups that are not ``kept`` [N] bool are not part of the batch,
    and their advantages are 0; None keeps all.
    """
    advantages = torch.zeros_like(total)
    rows = torch.ones_like(total, dtype=torch.bool) if kept is None else kept
    normalize = partial(group_advantages, group_size=group_size, normalization=normalization)
    if aggregation == "sum_then_normalize":
        advantages[rows] = normalize(total[rows])
        return advantages
    missing = scores[rows].isnan()
    filled = fill_with_group_means(scores[rows], missing, group_size=group_size)
    columns = zip(filled.unbind(1), missing.unbind(1), strict=True)
    normalized = [normalize(column, filled=gaps) for column, gaps in columns]
    combined = (torch.stack(normalized, dim=1) * weights).sum(dim=1)
    advantages[rows] = combined / (_std_over_ranks(combined) + STD_EPSILON)
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
    """Return the std of all ranks' values; 0 if no group is left."""
    everyone = torch.cat(gather_over_ranks(values))
    return everyone.std() if len(everyone) else everyone.new_zeros(())
