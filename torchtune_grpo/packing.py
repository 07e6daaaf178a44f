"""How rows are laid out for a forward pass: one row each, or one row per group.

A group's rows begin with the same prompt. Laid out as ``[prompt, response 1, ..., response G]``,
with positions and a mask under which each response sees the prompt and itself, the prompt is
computed once instead of G times, and padding between responses of different lengths disappears.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune_grpo.trajectory import Trajectory


@dataclass
class Layout:
    """Inputs of a forward pass over n rows, and where the hidden states to read are.

    Attributes:
        tokens (Tensor): [b, S].
        positions (Tensor | None): [b, S] for the rotary embedding; None = 0, 1, 2, ...
        mask (Tensor | None): [b, S, S] bool, True = attend; None = causal.
        row (Tensor): [K] which of the b rows predicts each of the K response tokens.
        column (Tensor): [K] at which position.
        targets (Tensor): [K] the response tokens, in the order of ``response_mask``.
    """

    tokens: Tensor
    positions: Tensor | None
    mask: Tensor | None
    row: Tensor
    column: Tensor
    targets: Tensor


def row_layout(batch: Trajectory) -> Layout:
    """Each row by itself; with all padding on the right, plain causal attention is exact."""
    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    column = batch.prompt_lengths[row] - 1 + offset  # the token before predicts
    return Layout(batch.tokens, None, None, row, column, batch.tokens[row, column + 1])


def group_layout(batch: Trajectory, *, group_size: int) -> Layout:
    """One row per group. The last token of a response predicts nothing and is left out.

    Args:
        batch (Trajectory): n rows, whole groups, prompt-major.
        group_size (int): G.

    Returns:
        Layout: b = n / G rows.
    """
    device = batch.tokens.device
    prompts = batch.prompt_lengths.view(-1, group_size)[:, 0]  # [b]
    inputs = (batch.response_lengths - 1).clamp(min=0).view(-1, group_size)  # [b, G]
    starts = prompts[:, None] + inputs.cumsum(dim=1) - inputs  # [b, G] where each response begins
    total = int((prompts + inputs.sum(dim=1)).max())
    column = torch.arange(total, device=device).expand(len(prompts), total)  # [b, S]

    # Segment 0 is the prompt, g + 1 response g; behind the end the last response goes on, unread.
    segment = torch.searchsorted(starts, column.contiguous(), right=True)  # [b, S]
    response = (segment - 1).clamp(min=0)
    offset = column - starts.gather(1, response)  # [b, S] within the response
    in_prompt = segment == 0
    positions = torch.where(in_prompt, column, prompts[:, None] + offset)
    first = torch.arange(len(prompts), device=device)[:, None] * group_size
    source = positions.clamp(max=batch.tokens.shape[1] - 1)
    tokens = batch.tokens[first + response, source]

    causal = column[:, :, None] >= column[:, None, :]
    same = segment[:, :, None] == segment[:, None, :]
    mask = causal & (same | in_prompt[:, None, :])  # [b, S, S]

    member, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    row = member // group_size
    begin = starts.view(-1)[member]
    read = torch.where(offset == 0, prompts[row] - 1, begin + offset - 1)
    targets = batch.tokens[member, batch.prompt_lengths[member] + offset]
    return Layout(tokens, source, mask, row, read, targets)
