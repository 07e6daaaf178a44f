"""Which prompts a step works on: a pure function, so that resuming and resharding need no state."""

from __future__ import annotations

import torch


def step_indices(
    *, step: int, prompts_per_step: int, dataset_size: int, seed: int, shuffle: bool = True
) -> list[int]:
    """Rows of the data set for one step. Each pass over the data is a new seeded permutation.

    The passes follow each other without a gap, so that no row is repeated or left out at the end of
    a pass when ``prompts_per_step`` does not divide the data set.

    Args:
        step (int): from 0.
        prompts_per_step (int): over all ranks.
        dataset_size (int): rows of the data set, at least ``prompts_per_step``.
        seed (int): of the permutations.
        shuffle (bool): False keeps the data set's order.

    Returns:
        list[int]: ``prompts_per_step`` row numbers.

    Raises:
        ValueError: if the data set has fewer rows than a step needs.
    """
    if dataset_size < prompts_per_step:
        raise ValueError(
            f"batch_size * gradient_accumulation_steps = {prompts_per_step} prompts a step, but "
            f"dataset has only {dataset_size}; lower them, or give more prompts."
        )
    start = step * prompts_per_step
    rows: list[int] = []
    while len(rows) < prompts_per_step:
        epoch, offset = divmod(start + len(rows), dataset_size)
        order = torch.arange(dataset_size)
        if shuffle:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(dataset_size, generator=generator)
        rows += order[offset : offset + prompts_per_step - len(rows)].tolist()
    return rows
