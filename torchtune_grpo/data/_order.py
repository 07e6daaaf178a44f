"""Which prompts a step works on: a pure function, so that resuming and resharding need no state."""

from __future__ import annotations

import torch


def step_indices(
    *,
    step: int,
    prompts_per_step: int,
    dataset_size: int,
    seed: int,
    shuffle: bool = True,
    rank: int = 0,
    world_size: int = 1,
) -> list[int]:
    """One rank's rows of the data set for one step.

    Each pass over the data is a new seeded permutation. The ranks' rows, one rank behind the other,
    are those that one rank would take with ``world_size`` times as many prompts.

    The passes follow each other without a gap, so that no row is repeated or left out at the end of
    a pass when ``prompts_per_step`` does not divide the data set.

    Args:
        step (int): from 0.
        prompts_per_step (int): of each rank.
        dataset_size (int): rows of the data set, at least those of a step of all ranks.
        seed (int): of the permutations.
        shuffle (bool): False keeps the data set's order.
        rank (int): whose rows.
        world_size (int): number of ranks.

    Returns:
        list[int]: ``prompts_per_step`` row numbers.

    Raises:
        ValueError: if the data set has fewer rows than a step needs.
    """
    if dataset_size < prompts_per_step * world_size:
        ranks = f" * {world_size} ranks" if world_size > 1 else ""
        raise ValueError(
            f"batch_size{ranks} = {prompts_per_step * world_size} prompts a step, but dataset has "
            f"only {dataset_size}; lower batch_size, or give more prompts."
        )
    start = (step * world_size + rank) * prompts_per_step
    rows: list[int] = []
    while len(rows) < prompts_per_step:
        epoch, offset = divmod(start + len(rows), dataset_size)
        order = torch.arange(dataset_size)
        if shuffle:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(dataset_size, generator=generator)
        rows += order[offset : offset + prompts_per_step - len(rows)].tolist()
    return rows
