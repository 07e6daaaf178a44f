"""Rewards -> group-relative advantages.

    group           c / (std of the group + 1e-4)       GRPO: Shao et al. 2024, arXiv:2402.03300
    batch           c / (std of all raw rewards + 1e-4) Lite PPO: Liu et al. 2025, arXiv:2508.08221
    none            c                                   Dr. GRPO: Liu et al. 2025, arXiv:2503.20783
    leave_one_out   r - mean of the others              RLOO: Ahmadian et al. 2024, arXiv:2402.14740

with c = r - mean of the group, and every std with ddof=1.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from torchtune_grpo.parallel import gather_over_ranks

Normalization = Literal["group", "batch", "none", "leave_one_out"]
Objectives = Literal["sum_then_normalize", "normalize_then_sum"]
NORMALIZATIONS: tuple[str, ...] = get_args(Normalization)
OBJECTIVES: tuple[str, ...] = get_args(Objectives)

# Keeps the quotient finite where all rewards are (nearly) equal.
STD_EPSILON = 1e-4


def group_advantages(
    rewards: Tensor, *, group_size: int, normalization: Normalization = "group"
) -> Tensor:
    """Compares each reward with the others of its group; equal rewards give zeros.

    Args:
        rewards (Tensor): [N] with N = B * G, prompt-major; all of this rank's rows of the step.
        group_size (int): G, at least 2.
        normalization (Normalization): see the module's docstring.

    Returns:
        Tensor: [N] advantages.
    """
    groups = rewards.view(-1, group_size)  # [B, G]
    # Subtracting one of the rewards first makes equal rewards exactly zero, whatever they are.
    shifted = groups - groups[:, :1]
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    if normalization == "group":
        centred = centred / (shifted.std(dim=1, keepdim=True) + STD_EPSILON)
    elif normalization == "batch":
        everyone = torch.cat(gather_over_ranks(rewards))
        centred = centred / (everyone.std() + STD_EPSILON)
    elif normalization == "leave_one_out":  # r - (sum - r) / (G - 1) = c G / (G - 1)
        centred = centred * group_size / (group_size - 1)
    return centred.reshape(-1)


def reward_advantages(
    scores: Tensor,
    weights: Tensor,
    *,
    group_size: int,
    normalization: Normalization = "group",
    objectives: Objectives = "sum_then_normalize",
    failed: Tensor | None = None,
) -> Tensor:
    """Turns several rewards into one advantage per row.

    ``sum_then_normalize`` normalizes the weighted sum (GRPO). ``normalize_then_sum`` normalizes
    each reward by itself and sums the results with the weights, so that a reward with a small
    spread is not drowned by one with a large spread (GDPO, arXiv:2601.05242).

    Args:
        scores (Tensor): [N, R], NaN where a reward does not apply; it then counts as 0 in the sum,
            and as the mean of its group when rewards are normalized one by one.
        weights (Tensor): [R].
        group_size (int): G.
        normalization (Normalization): see :func:`group_advantages`.
        objectives (Objectives): the order of normalizing and summing.
        failed (Tensor | None): [N, R] bool, True where a reward gave no score because it failed; it
            always counts as the mean of its group, so that nobody is praised or blamed for it.

    Returns:
        Tensor: [N] advantages.
    """
    columns = scores.view(-1, group_size, scores.shape[1])  # [B, G, R]
    means = columns.nanmean(dim=1, keepdim=True).nan_to_num(0.0)  # [B, 1, R]
    if objectives == "sum_then_normalize":
        if failed is not None:
            columns = columns.where(~failed.view_as(columns), means)
        total = (columns.nan_to_num(0.0).view_as(scores) * weights).sum(dim=1)
        return group_advantages(total, group_size=group_size, normalization=normalization)
    filled = columns.where(~columns.isnan(), means)
    normalized = [
        group_advantages(column.reshape(-1), group_size=group_size, normalization=normalization)
        for column in filled.unbind(dim=-1)
    ]
    return (torch.stack(normalized, dim=1) * weights).sum(dim=1)
