"""Layouts of rows for a forward pass: one row each, or those with the same prompt packed in one.

Packed as ``[prompt, response 1, ..., response G]``, a group's prompt is computed once instead of G
times, and needs no padding between responses of different lengths. The prompt attends to itself and
a response to the prompt and itself, causally. Attention by segments never computes the hidden
scores, and on CUDA is one kernel; compiled layers, which would be compiled anew for each step's
lengths, take a dense mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchtune.modules import MultiHeadAttention, TransformerDecoder

from torchtune_grpo.machine.attention import Spans, aligned, has_varlen_kernel, varlen_attention
from torchtune_grpo.models import NormFirstAttention
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
    # [K] each response token's index in the flat mask [n * L]: finding it in a pass would make the
    # host wait for the GPU.
    place: Tensor

    def attention_mask(self, dtype: torch.dtype) -> Tensor | Segments | None:
        """The model's argument ``mask``; dense ones [b, S, S] are large and so made when needed."""
        if isinstance(self.attention, Tensor):
            return dense_mask(self.attention, dtype)
        return self.attention


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, of which there may be none."""

    numbers: tuple[int, ...]  # [n] the trajectory's rows, on the host
    rows: Tensor  # [n] and on the device
    layout: Layout


def row_layout(batch: Trajectory) -> Layout:
    """Lay out each row by itself; with all padding on the right, causal attention is exact."""
    longest = int((batch.prompt_lengths + response_inputs(batch)).max())
    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    column = batch.prompt_lengths[row] - 1 + offset  # the token before predicts
    targets = batch.tokens[row, column + 1]
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    return Layout(batch.tokens[:, :longest], None, None, row, column, targets, mask, place)


def packed_layout(batch: Trajectory, packs: Tensor, *, dense: bool = False) -> Layout:
    """Pack rows with the same prompt; ``packs`` [n] is each one's packed row: 0, ..., 0, 1, ..."""
    device = batch.tokens.device
    counts = packs.bincount()  # [b]
    first = counts.cumsum(0) - counts  # [b] each pack's first row
    prompts = batch.prompt_lengths[first]  # [b]
    inputs = response_inputs(batch)  # [n]
    before = inputs.cumsum(0) - inputs
    begin = prompts[packs] + before - before[first][packs]  # [n] where each response begins
    total = int((begin + inputs).max())  # S
    column = torch.arange(total, device=device).expand(len(first), total).contiguous()  # [b, S]

    # Segment 0 is the prompt, k the k-th response; padding counts to the last one and is not read.
    starts = torch.full((len(first), int(counts.max())), total, device=device)
    starts[packs, torch.arange(len(packs), device=device) - first[packs]] = begin
    segments = torch.searchsorted(starts, column, right=True)  # [b, S]
    member = first[:, None] + (segments - 1).clamp(min=0)  # [b, S] each token's row
    after_prompt = prompts[:, None] + column - begin[member]
    positions = torch.where(segments == 0, column, after_prompt)
    positions = positions.clamp(max=batch.tokens.shape[1] - 1)
    tokens = batch.tokens[member, positions]

    row, offset = batch.response_mask.nonzero(as_tuple=True)  # [K] each
    read = torch.where(offset == 0, prompts[packs[row]] - 1, begin[row] + offset - 1)
    targets = batch.tokens[row, batch.prompt_lengths[row] + offset]
    attention: Segments | Tensor = segments
    if not dense:
        parts = zip(prompts.tolist(), inputs.split(counts.tolist()), strict=True)
        sizes = [[prompt, *part.tolist()] for prompt, part in parts]
        attention = Segments.of(sizes, width=total, device=device)
    mask = batch.response_mask
    place = row * mask.shape[1] + offset
    return Layout(tokens, positions, attention, packs[row], read, targets, mask, place)


def empty_layout(batch: Trajectory) -> Layout:
    """A pass over one padding token, for a rank that only has to take part."""
    nothing = batch.tokens.new_empty(0)
    mask = batch.response_mask[:0]
    return Layout(
        batch.tokens.new_zeros(1, 1), None, None, nothing, nothing, nothing, mask, nothing
    )


def response_inputs(batch: Trajectory) -> Tensor:
    """[n] input tokens of each response: those before the last one that is trained on."""
    number = torch.arange(batch.response_mask.shape[1], device=batch.tokens.device)
    return (batch.response_mask * number).amax(dim=1)


def dense_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask [b, S, S] of segments [b, S], 0 or -inf: every layer would convert a bool one."""
    query, key = segments[:, :, None], segments[:, None, :]
    hidden = ((query != key) & (key != 0)) | torch.ones_like(query == key).triu(1)
    b, width = segments.shape
    mask = torch.zeros(b, width, aligned(width), dtype=dtype, device=segments.device)
    return mask[:, :, :width].masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Segments:
    """The parts of b packed rows of S tokens, passed as the mask of torchtune's modules.

    With a dense mask most of the S * S scores are hidden: with G responses of n tokens to a prompt
    of P, S is P + G * n, but only G * n * (P + n) are used.
    """

    # The prompt, each response behind the prompt's keys, and the padding, of all packed rows.
    spans: Spans
    keys: Tensor  # [Tk] which of the rows' b * S tokens each key is

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Segments:
        """Build them once for all layers and passes, from [P, n_1, ..., n_G] of each packed row."""
        parts: list[tuple[Tensor, Tensor]] = []  # the keys before the queries, and their own
        for row, (prompt, *responses) in enumerate(sizes):
            tokens = torch.arange(row * width, (row + 1) * width)
            counts = [prompt, *responses, width - prompt - sum(responses)]
            shared, *own, rest = tokens.split(counts)
            parts += [(shared[:0], shared), *((shared, part) for part in own), (rest[:0], rest)]
        parts = [(before, own) for before, own in parts if len(own)]
        queries = [len(own) for _, own in parts]
        keys = [torch.cat(part) for part in parts]
        return cls(Spans.of(queries, map(len, keys), device=device), torch.cat(keys).to(device))


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
            group=attention.num_heads // attention.num_kv_heads,
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | Segments | None,
    dropout_p: float,
    is_causal: bool,
    stock: Callable[..., Tensor],
    group: int,
) -> Tensor:
    """q, k and v [b, heads, S, hd] -> [b, heads, S, hd]; ``group`` heads share keys and values.

    Without the kernel, each response needs a copy of the prompt's keys and values; the backward
    pass makes them again.
    """
    if not isinstance(mask, Segments):
        return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    attend = partial(segment_attention, segments=mask, dropout=dropout_p)
    k, v = k[:, ::group], v[:, ::group]  # torchtune has repeated them for each head
    if not torch.is_grad_enabled() or (dropout_p == 0 and has_varlen_kernel(q)):
        return attend(q, k, v)
    return checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=dropout_p > 0)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Segments, dropout: float = 0.0
) -> Tensor:
    """Attention of the prompt to itself, and of each response to the prompt and itself.

    q and the result are [b, heads, S, hd]; k and v are [b, kv_heads, S, hd].
    """
    b, _, width, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    k, v = (x.index_select(0, segments.keys) for x in (k, v))
    out = varlen_attention(q, k, v, segments.spans, dropout=dropout)
    return out.unflatten(0, (b, width)).transpose(1, 2)
