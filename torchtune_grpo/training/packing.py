"""Layouts of rows for a forward pass: one row each, or groups packed in one.

Packed as ``[beginning, rest of prompt 1, its responses 1 to G, rest of prompt 2, ...]``, a prompt
is computed once instead of G times, a beginning that all prompts share (a system prompt) only once,
and there is no padding. A prompt attends to the beginning and itself, a response to its whole
prompt and itself, causally. On CUDA one kernel does this. Compiled layers would be recompiled for
each step's lengths, so they take each group as a padded row, with a dense mask.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_grpo.machine.attention import (
    Segments,
    aligned,
    has_varlen_kernel,
    shared_beginning,
    varlen_attention,
)
from torchtune_grpo.models.layers import NormFirstAttention
from torchtune_grpo.trajectory import Trajectory


@dataclass(frozen=True)
class Layout:
    """Inputs of a forward pass over n rows, and the places of the hidden states to read."""

    tokens: Tensor  # [b, S]
    positions: Tensor | None  # [b, S] for the rotary embedding; None = 0, 1, 2, ...
    # None: plain causal attention. [b, S], for a dense mask: 0 = prompt, k = the k-th response.
    attention: Segments | Tensor | None
    row: Tensor  # [K] which of the b rows predicts each of the K response tokens
    column: Tensor  # [K] at which position
    targets: Tensor  # [K] the response tokens, in the order of response_mask
    response_mask: Tensor  # [n, L] bool
    # [K] each response token's index in the flat mask [n * L]: finding it during a pass would make
    # the host wait for the GPU.
    place: Tensor


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass; there may be none."""

    numbers: tuple[int, ...]  # [n] the trajectory's rows, on the host
    rows: Tensor  # [n] the same on the device
    layout: Layout


def row_layout(batch: Trajectory) -> Layout:
    """Lay out each row by itself; with all padding on the right, causal attention is exact."""
    longest = int((batch.prompt_lengths + response_inputs(batch)).max())
    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    column = batch.prompt_lengths[row] - 1 + offset  # where the token is predicted
    targets = batch.tokens[row, column + 1]
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    return Layout(batch.tokens[:, :longest], None, None, row, column, targets, mask, place)


def packed_layout(batch: Trajectory, packs: Tensor, *, dense: bool = False) -> Layout:
    """Put rows with the same prompt after one copy of it; ``packs`` [n] is 0, ..., 0, 1, ...

    All packs lie in one row after the beginning they share; with ``dense`` each has its own row.
    """
    device = batch.tokens.device
    prompts, inputs = batch.prompt_lengths.tolist(), response_inputs(batch).tolist()
    groups = torch.arange(len(packs)).split(packs.bincount().tolist())
    heads = [int(rows[0]) for rows in groups]  # [b] each pack's first row
    shared = 0
    if not dense:
        tokens_of = zip(heads, batch.tokens[heads].tolist(), strict=True)
        shared = shared_beginning([tokens[: prompts[row]] for row, tokens in tokens_of])

    beginning = range(shared)
    # Each part's row, position in that row, segment number and the ranges that it sees.
    parts: list[tuple[int, int, int, tuple[range, ...]]] = [(heads[0], 0, 0, (beginning,))]
    starts: list[int] = []  # [b] start of each pack in the row
    predicts: list[int] = []  # [n] place of the token that predicts each response's first one
    begins: list[int] = []  # [n] start of each response
    end = shared
    for head, rows in zip(heads, groups, strict=True):
        starts.append(end)
        prompt = range(end, end := end + prompts[head] - shared)
        parts.append((head, shared, 0, (beginning, prompt)))
        for number, row in enumerate(rows.tolist(), 1):
            begins.append(end)
            predicts.append(prompt[-1])
            response = range(end, end := end + inputs[row])
            parts.append((row, prompts[row], number, (beginning, prompt, response)))
    own = [(row, first - seen[-1].start, part, len(seen[-1])) for row, first, part, seen in parts]
    table = torch.tensor(own, device=device)  # [parts, 4]
    member, shift, segments = table[:, :3].repeat_interleave(table[:, 3], dim=0).t()  # [S] each
    place_in_row = torch.arange(end, device=device)
    positions = place_in_row + shift
    tokens = batch.tokens[member, positions]

    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    begin, before = torch.tensor([begins, predicts], device=device)
    read = torch.where(offset == 0, before[row], begin[row] + offset - 1)
    targets = batch.tokens[row, batch.prompt_lengths[row] + offset]
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    if not dense:
        attention = Segments.of((seen for *_, seen in parts), device=device)
        where = torch.zeros_like(row), read
        return Layout(tokens[None], positions[None], attention, *where, targets, mask, place)

    start = torch.tensor(starts, device=device)
    pack = torch.searchsorted(start, place_in_row, right=True) - 1  # [S]
    column = place_in_row - start[pack]

    def padded(x: Tensor, padding: int) -> Tensor:  # [b, most columns]
        rows = x.new_full((len(starts), int(column.max()) + 1), padding)
        return rows.index_put((pack, column), x)

    inputs_of_model = padded(tokens, 0), padded(positions, 0), padded(segments, -1)
    return Layout(*inputs_of_model, packs[row], read - start[packs[row]], targets, mask, place)


def empty_layout(batch: Trajectory, *, dense: bool) -> Layout:
    """Lay out two padding tokens, for a rank without rows that has to take part in a pass."""
    nothing = batch.tokens.new_empty(0)
    tokens = batch.tokens.new_zeros(1, 2)  # one token would make compiled layers compile again
    segments = tokens if dense else None
    mask = batch.response_mask[:0]
    return Layout(tokens, segments, segments, nothing, nothing, nothing, mask, nothing)


def response_inputs(batch: Trajectory) -> Tensor:
    """Count each response's input tokens [n]: those before the last one that is trained on."""
    number = torch.arange(batch.response_mask.shape[1], device=batch.tokens.device)
    return (batch.response_mask * number).amax(dim=1)


def dense_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Make the mask [b, S, S] of segments [b, S], 0 or -inf; layers would convert a bool one."""
    query, key = segments[:, :, None], segments[:, None, :]
    hidden = ((query != key) & (key != 0)) | torch.ones_like(query == key).triu(1)
    b, width = segments.shape
    columns = aligned(width + 1)  # never the width: an equal stride is another graph
    mask = torch.zeros(b, width, columns, dtype=dtype, device=segments.device)
    return mask[:, :, :width].masked_fill_(hidden, -torch.inf)


def attend_in_segments(model: TransformerDecoder) -> None:
    """Let the model's attention take :class:`Segments` as a mask; other masks work as before.

    ``_attention_call`` is where torchtune's attention picks its kernel, between splitting and
    joining the heads. Other classes are refused: a sliding window, say, would count packed
    positions.
    """
    known = (MultiHeadAttention, NormFirstAttention)
    kinds = {type(layer.attn).__name__ for layer in model.layers if type(layer.attn) not in known}
    if kinds:
        raise ValueError(
            "pack_groups=True: works with torchtune's MultiHeadAttention, but the model has "
            f"{', '.join(sorted(kinds))}. Set pack_groups to false."
        )
    for layer in model.layers:
        attention = layer.attn
        attention._attention_call = partial(
            _attend,
            stock=attention._attention_call,
            kv_heads=attention.num_kv_heads,
        )


def compile_layers(model: TransformerDecoder) -> None:
    """Compile each layer in place, once for all lengths and once more for passes of one row."""
    backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # as torchtune chooses it
    for layer in model.layers:
        layer.compile(backend=backend, dynamic=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | Segments | None,
    dropout_p: float,
    is_causal: bool,
    stock: Callable[..., Tensor],
    kv_heads: int,
) -> Tensor:
    """q, k and v [b, heads, S, hd] -> [b, heads, S, hd]; heads may share keys and values.

    Without the kernel, each response needs a copy of the prompt's keys and values; the backward
    pass makes these copies again.
    """
    if not isinstance(mask, Segments):
        return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    attend = partial(segment_attention, segments=mask, dropout=dropout_p)
    k, v = (x[:, :: x.shape[1] // kv_heads] for x in (k, v))  # torchtune's attention repeats them
    if not torch.is_grad_enabled() or (dropout_p == 0 and has_varlen_kernel(q)):
        return attend(q, k, v)
    return checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=dropout_p > 0)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Segments, dropout: float = 0.0
) -> Tensor:
    """Run :func:`varlen_attention` on q [1, heads, S, hd], k and v [1, kv_heads, S, hd]."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    return varlen_attention(q, k, v, segments, dropout=dropout).transpose(0, 1)[None]
