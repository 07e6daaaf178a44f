"""Random trajectories for tests: real masks and lengths, no texts."""

from collections.abc import Sequence

import torch
from policies import VOCAB

from torchtune_grpo.trajectory import Trajectory, length_mask


def make_trajectory(prompts: Sequence[int], responses: Sequence[int]) -> Trajectory:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(prompts) + torch.tensor(responses)
    tokens = torch.randint(VOCAB, (len(prompts), int(lengths.max())), generator=generator)
    mask = length_mask(torch.tensor(responses), max(responses))
    return Trajectory(
        tokens=tokens.where(length_mask(lengths, tokens.shape[1]), 0),
        prompt_indices=torch.arange(len(prompts)),
        places=torch.arange(len(prompts)),
        prompt_lengths=torch.tensor(prompts),
        response_lengths=torch.tensor(responses),
        response_mask=mask,
        truncated=torch.zeros(len(prompts), dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
        behaviour_logprobs=torch.zeros(mask.shape),
        prompts=[],
        completions=[],
        columns={},
    )


def make_groups(prompts: Sequence[int], responses: Sequence[int], *, shared: int = 0) -> Trajectory:
    """Like :func:`make_trajectory`, with one prompt length per group and its rows' own prompt.

    All prompts begin with the same ``shared`` tokens.
    """
    group = len(responses) // len(prompts)
    trajectory = make_trajectory([p for p in prompts for _ in range(group)], responses)
    for row in range(len(responses)):
        first, length = row - row % group, trajectory.prompt_lengths[row]
        trajectory.tokens[row, :length] = trajectory.tokens[first, :length]
    trajectory.tokens[:, :shared] = trajectory.tokens[0, :shared]
    return trajectory
