"""Rewards -> group-relative advantages."""

from __future__ import annotations

from torch import Tensor

# Keeps the quotient finite where all rewards of a group are (nearly) equal.
STD_EPSILON = 1e-4


def group_advantages(rewards: Tensor, *, group_size: int) -> Tensor:
    """Centres each reward on its group's mean and scales it by its group's spread.

    ``A = (r - mean(group)) / (std(group, ddof=1) + 1e-4)``; equal rewards give zeros.
    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2.

    Args:
        rewards (Tensor): [N] with N = B * G, prompt-major.
        group_size (int): G, at least 2.

    Returns:
        Tensor: [N] advantages.
    """
    groups = rewards.view(-1, group_size)  # [B, G]
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + STD_EPSILON)).view(-1)
