"""Rewards -> their total -> group-relative advantages.

    group           c / (std of the group + 1e-4)       GRPO: Shao et al. 2024, arXiv:2402.03300
    batch           c / (std of all raw rewards + 1e-4) Lite PPO: Liu et al. 2025, arXiv:2508.08221
    none            c                                   Dr. GRPO: Liu et al. 2025, arXiv:2503.20783
    leave_one_out   r - mean of the others              RLOO: Ahmadian et al. 2024, arXiv:2402.14740
    max_rl          c / mean of the group, 0 if that is MaxRL: Tajwar et al. 2026, arXiv:2602.02710

with c = r - mean of the group, and every std with ddof=1. MaxRL takes no negative reward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtune_grpo.machine.parallel import gather_over_ranks

NORMALIZATIONS = ("group", "batch", "none", "leave_one_out", "max_rl")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

# Keeps the quotient finite where all rewards are (nearly) equal.
STD_EPSILON = 1e-4


def fill_with_group_means(scores: Tensor, missing: Tensor, *, group_size: int) -> Tensor:
    """Puts the mean of a group's scores [N, R] where some are ``missing`` [N, R]; 0 where all are.

    Scores that are not there are NaN. A group of equal scores is filled with exactly that score.
    """
    groups = scores.view(-1, group_size, scores.shape[1])  # [B, G, R]
    means = groups.double().nanmean(dim=1, keepdim=True).nan_to_num(nan=0.0)  # [B, 1, R]
    return groups.where(~missing.view_as(groups), means.to(groups.dtype)).view_as(scores)


def total_reward(scores: Tensor, failed: Tensor, weights: Tensor, *, group_size: int) -> Tensor:
    """The weighted sum of R rewards.

    Args:
        scores (Tensor): [N, R], NaN where a reward does not apply or failed.
        failed (Tensor): [N, R] bool; a failed reward counts as the mean of its group, so that
            nobody is praised or blamed for it. One that does not apply counts as 0.
        weights (Tensor): [R].
        group_size (int): G.

    Returns:
        Tensor: [N] float32; summed in float64, so that the rewards' order does not matter.
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
    """Compares each reward with the others of its group; equal rewards give zeros.

    Args:
        rewards (Tensor): [N] with N = B * G, prompt-major; all of this rank's rows of the step.
        group_size (int): G, at least 2.
        normalization (str): see the module's docstring.
        filled (Tensor | None): [N] bool, the rewards that are their group's mean because they were
            missing; a group's std is that of the others.

    Returns:
        Tensor: [N] advantages.

    Raises:
        ValueError: on every rank, if one has a negative reward under ``max_rl``.
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
    """Turns several rewards into one advantage per row.

    ``sum_then_normalize`` normalizes the weighted sum (GRPO). ``normalize_then_sum`` normalizes
    each reward by itself, sums the results with the weights, and divides by the sums' std over the
    batch, so that a reward with a small spread is not drowned by one with a large spread, and the
    number of rewards does not scale the step (GDPO, arXiv:2601.05242; the sums' mean, which it
    subtracts, is 0, as that of each group is).

    Args:
        total (Tensor): [N] the weighted sum.
        scores (Tensor): [N, R]; NaN, where a reward does not apply or failed, counts as the mean of
            its group when rewards are normalized one by one, and not in its std.
        weights (Tensor): [R].
        group_size (int): G.
        normalization (str): see :func:`group_advantages`.
        aggregation (str): the order of normalizing and summing.
        kept (Tensor | None): [N] bool, whole groups; those that are not are no part of the batch,
            and their advantages are 0. None = all.

    Returns:
        Tensor: [N] advantages.
    """
    if kept is not None:
        advantages = torch.zeros_like(total)
        advantages[kept] = reward_advantages(
            total[kept],
            scores[kept],
            weights,
            group_size=group_size,
            normalization=normalization,
            aggregation=aggregation,
        )
        return advantages
    if aggregation == "sum_then_normalize":
        return group_advantages(total, group_size=group_size, normalization=normalization)
    missing = scores.isnan()
    filled = fill_with_group_means(scores, missing, group_size=group_size)
    normalized = [
        group_advantages(
            column, group_size=group_size, normalization=normalization, filled=column_missing
        )
        for column, column_missing in zip(filled.unbind(1), missing.unbind(1), strict=True)
    ]
    combined = (torch.stack(normalized, dim=1) * weights).sum(dim=1)
    return combined / (_std_over_ranks(combined) + STD_EPSILON)


def _std_over_ranks(values: Tensor) -> Tensor:
    """Of all ranks' values; 0 where no group is left."""
    everyone = torch.cat(gather_over_ranks(values))
    return everyone.std() if len(everyone) else everyone.new_zeros(())
