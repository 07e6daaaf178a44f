"""Random trajectories for tests: real masks and lengths, no texts."""

from collections.abc import Sequence

import torch
from common import rows_of
from policies import VOCAB

from torchtune_grpo.trajectory import Trajectory


def make_trajectory(prompts: Sequence[int], responses: Sequence[int]) -> Trajectory:
    """Make rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([prompts, responses])
    shape = len(prompts), int(lengths.sum(dim=0).max())
    return rows_of(torch.randint(VOCAB, shape, generator=generator), *lengths)


def make_groups(prompts: Sequence[int], responses: Sequence[int], *, shared: int = 0) -> Trajectory:
    """Make groups of random rows, each with a prompt of its own, of the given length.

    All prompts begin with the same ``shared`` tokens.
    """
    group = len(responses) // len(prompts)
    trajectory = make_trajectory([p for p in prompts for _ in range(group)], responses)
    for row in range(len(responses)):
        first, length = row - row % group, trajectory.prompt_lengths[row]
        trajectory.tokens[row, :length] = trajectory.tokens[first, :length]
    trajectory.tokens[:, :shared] = trajectory.tokens[0, :shared]
    return trajectory
