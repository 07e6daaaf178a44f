"""Layouts of rows for a forward pass: one row each, or groups packed in one.

Packed as ``[beginning, rest of prompt 1, its responses 1 to G, rest of prompt 2, ...]``, a prompt
is computed once instead of G times, a beginning that all prompts share (a system prompt) only once,
and there is no padding. A prompt attends to the beginning and itself, a response to its whole
prompt and itself, causally. On CUDA one kernel does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from torchtune_grpo.machine.segments import Segments, shared_beginning
from torchtune_grpo.trajectory import Trajectory


@dataclass(frozen=True)
class Layout:
    """Inputs of a forward pass over n rows, and which hidden states to read."""

    tokens: Tensor  # [b, S]
    positions: Tensor | None  # [b, S] for the rotary embedding; None = 0, 1, 2, ...
    attention: Segments | None  # None: plain causal attention
    row: Tensor  # [K] which of the b rows predicts each of the K response tokens
    column: Tensor  # [K] at which position
    targets: Tensor  # [K] the response tokens, in the order of response_mask
    response_mask: Tensor  # [n, L] bool
    # [K] each response token's index in the flat mask [n * L]: finding it during a pass would make
    # the host wait for the GPU.
    index: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass; there may be none."""

    rows_on_host: tuple[int, ...]  # [n] the trajectory's rows
    rows: Tensor  # [n] the same on the device
    layout: Layout


def row_layout(batch: Trajectory) -> Layout:
    """Lay out each row by itself; with all padding on the right, causal attention is exact."""
    longest = int((batch.prompt_lengths + response_inputs(batch)).max())
    row, offset, *targets = _targets(batch)
    column = batch.prompt_lengths[row] - 1 + offset  # where the token is predicted
    return Layout(batch.tokens[:, :longest], None, None, row, column, *targets)


def _targets(batch: Trajectory) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return row and offset of each response token [K], and a layout's last three fields."""
    mask = batch.response_mask
    row, offset = mask.nonzero(as_tuple=True)  # [K] each
    targets = batch.tokens[row, batch.prompt_lengths[row] + offset]
    return row, offset, targets, mask, row * mask.shape[1] + offset


@dataclass(frozen=True)
class _Part:
    """Tokens of one row that lie side by side in the packed row."""

    row: int
    position: int  # of the first one in its own row
    sees: tuple[range, ...]  # columns of the packed row that come before it
    own: range  # its columns


def _cut(batch: Trajectory, packs: Sequence[int]) -> tuple[list[_Part], list[_Part]]:
    """Cut rows into the prompts' beginning with each pack's rest of the prompt, and responses."""
    prompts, inputs = batch.prompt_lengths.tolist(), response_inputs(batch).tolist()
    groups = [[*rows] for _, rows in groupby(range(len(packs)), key=lambda row: packs[row])]
    heads = [rows[0] for rows in groups]
    texts = zip(batch.tokens[heads].tolist(), heads, strict=True)
    end = shared = shared_beginning([tokens[: prompts[row]] for tokens, row in texts])
    beginning = range(shared)
    shown, responses = [_Part(0, 0, (), beginning)], []
    for rows in groups:
        prompt = range(end, end := end + prompts[rows[0]] - shared)
        shown.append(_Part(rows[0], shared, (beginning,), prompt))
        for row in rows:
            response = range(end, end := end + inputs[row])
            responses.append(_Part(row, prompts[row], (beginning, prompt), response))
    return shown, responses


def packed_layout(batch: Trajectory, packs: Sequence[int]) -> Layout:
    """Put rows with the same prompt after one copy of it; ``packs`` [n] is 0, ..., 0, 1, ...

    All packs lie in one row after the beginning they share. With the prompts ``a b c``, answered by
    ``t u v`` and ``x y``, and ``a b d e``, answered by ``p q``:

        column      0 1   2   3 4   5   6 7   8
        token       a b | c | t u | x | d e | p     a response's last token is not read
        position    0 1   2   3 4   3   2 3   4
        predicts         t,x  u v   y     p   q
    """
    device = batch.tokens.device
    shown, responses = _cut(batch, packs)
    parts = sorted(shown + responses, key=lambda part: part.own.start)
    own = [(p.row, p.position - p.own.start, len(p.own)) for p in parts]
    table = torch.tensor(own, device=device)  # [parts, 3]
    source, shift = table[:, :2].repeat_interleave(table[:, 2], dim=0).t()  # [S] each
    positions = torch.arange(len(source), device=device) + shift
    tokens = batch.tokens[source, positions]

    row, offset, *targets = _targets(batch)
    starts = [(p.sees[-1][-1], p.own.start) for p in responses]
    prompt_end, start = torch.tensor(starts, device=device)[row].t()  # [K] each
    column = torch.where(offset == 0, prompt_end, start + offset - 1)
    attention = Segments.from_ranges(((*p.sees, p.own) for p in parts), device=device)
    first = torch.zeros_like(row)
    return Layout(tokens[None], positions[None], attention, first, column, *targets)


def empty_layout(batch: Trajectory) -> Layout:
    """Lay out two padding tokens, for a rank without rows that has to take part in a pass."""
    nothing, tokens = batch.tokens.new_empty(0), batch.tokens.new_zeros(1, 2)
    mask = batch.response_mask[:0]
    return Layout(tokens, None, None, nothing, nothing, nothing, mask, nothing)


def response_inputs(batch: Trajectory) -> Tensor:
    """Count each response's input tokens [n]: those before the last one that is trained on."""
    number = torch.arange(batch.response_mask.shape[1], device=batch.tokens.device)
    return (batch.response_mask * number).amax(dim=1)
