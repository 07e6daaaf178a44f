"""How rows are laid out for a forward pass: one row each, or several that share a prompt in one.

A group's rows begin with the same prompt. Laid out as ``[prompt, response 1, ..., response G]``,
with positions and a mask under which each response sees the prompt and itself, the prompt is
computed once instead of G times, and padding between responses of different lengths disappears.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.training.packed_attention import Segments, dense_mask
from torchtune_grpo.trajectory import Trajectory


@dataclass(frozen=True)
class Layout:
    """Inputs of a forward pass over n rows, and where the hidden states to read are.

    Attributes:
        tokens (Tensor): [b, S].
        positions (Tensor | None): [b, S] for the rotary embedding; None = 0, 1, 2, ...
        segments (Tensor | None): [b, S] 0 = prompt, k = the packed row's k-th response; None = one
            row each, plain causal attention.
        row (Tensor): [K] which of the b rows predicts each of the K response tokens.
        column (Tensor): [K] at which position.
        targets (Tensor): [K] the response tokens, in the order of ``response_mask``.
        response_mask (Tensor): [n, L] bool.
        place (Tensor): [K] where each response token is among the mask's n * L; found here, since
            a GPU would be waited for in each pass that looks for it.
        attention (Segments | None): how packed rows attend; None = with a dense mask.
    """

    tokens: Tensor
    positions: Tensor | None
    segments: Tensor | None
    row: Tensor
    column: Tensor
    targets: Tensor
    response_mask: Tensor
    place: Tensor
    attention: Segments | None = None

    def to(self, device: torch.device) -> Layout:
        """The same layout on another device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Segments)
        }
        return replace(self, **moved)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | Segments | None:
        """What the model takes as ``mask``; None = causal.

        Made when it is needed: the dense masks [b, S, S] of a whole step would hold S * S numbers
        for every group.

        Args:
            dtype (torch.dtype): of the attention's queries.
        """
        if self.segments is None:
            return None
        return dense_mask(self.segments, dtype) if self.attention is None else self.attention


def response_inputs(batch: Trajectory) -> Tensor:
    """[n] tokens of each response that are read: those before the last one that is trained on."""
    number = torch.arange(batch.response_mask.shape[1], device=batch.tokens.device)
    return (batch.response_mask * number).amax(dim=1)


def row_layout(batch: Trajectory) -> Layout:
    """Each row by itself; with all padding on the right, plain causal attention is exact."""
    longest = int((batch.prompt_lengths + response_inputs(batch)).max())
    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    column = batch.prompt_lengths[row] - 1 + offset  # the token before predicts
    targets = batch.tokens[row, column + 1]
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    return Layout(batch.tokens[:, :longest], None, None, row, column, targets, mask, place)


def packed_layout(batch: Trajectory, packs: Tensor, *, dense: bool = False) -> Layout:
    """Several rows with the same prompt in one.

    Args:
        batch (Trajectory): n rows.
        packs (Tensor): [n] the packed row that each belongs to: 0, ..., 0, 1, ..., b - 1. The rows
            of a pack have the same prompt.
        dense (bool): attend with a dense mask.

    Returns:
        Layout: b packed rows.
    """
    device = batch.tokens.device
    counts = packs.bincount()  # [b]
    first = counts.cumsum(0) - counts  # [b] each pack's first row
    prompts = batch.prompt_lengths[first]  # [b]
    inputs = response_inputs(batch)  # [n]
    before = inputs.cumsum(0) - inputs
    begin = prompts[packs] + before - before[first][packs]  # [n] where each response begins
    total = int((begin + inputs).max())  # S
    column = torch.arange(total, device=device).expand(len(first), total).contiguous()  # [b, S]

    # Segment 0 is the prompt, k the k-th response; behind the end the last one goes on, unread.
    starts = torch.full((len(first), int(counts.max())), total, device=device)
    starts[packs, torch.arange(len(packs), device=device) - first[packs]] = begin
    segments = torch.searchsorted(starts, column, right=True)  # [b, S]
    member = first[:, None] + (segments - 1).clamp(min=0)  # [b, S] the row that a token is of
    after_prompt = prompts[:, None] + column - begin[member]
    positions = torch.where(segments == 0, column, after_prompt)
    positions = positions.clamp(max=batch.tokens.shape[1] - 1)
    tokens = batch.tokens[member, positions]

    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    read = torch.where(offset == 0, prompts[packs[row]] - 1, begin[row] + offset - 1)
    targets = batch.tokens[row, batch.prompt_lengths[row] + offset]
    attention = None
    if not dense:
        parts = zip(prompts.tolist(), inputs.split(counts.tolist()), strict=True)
        sizes = [[prompt, *part.tolist()] for prompt, part in parts]
        attention = Segments.of(sizes, width=total, device=device)
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    return Layout(tokens, positions, segments, packs[row], read, targets, mask, place, attention)


def empty_layout(batch: Trajectory) -> Layout:
    """A pass over no row, of which nothing is read: for a rank that only has to take part."""
    nothing = batch.tokens.new_empty(0)
    mask = batch.response_mask[:0]
    tokens = batch.tokens.new_zeros(1, 1)
    return Layout(tokens, None, None, nothing, nothing, nothing, mask, place=nothing)
