"""How rows are laid out for a forward pass: one row each, or those with the same prompt in one.

A group's rows begin with the same prompt. Laid out as ``[prompt, response 1, ..., response G]``,
the prompt is computed once instead of G times, and padding between responses of different lengths
disappears. The prompt then attends to itself and a response to the prompt and itself, causally, in
one of two forms. By segments, the hidden scores are never computed, and on CUDA one kernel does all
of them; compiled layers, which would be compiled anew for each step's lengths, take a dense mask.
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
    """Inputs of a forward pass over n rows, and where the hidden states to read are."""

    tokens: Tensor  # [b, S]
    positions: Tensor | None  # [b, S] for the rotary embedding; None = 0, 1, 2, ...
    # None: plain causal attention. [b, S], for a dense mask: 0 = prompt, k = the k-th response.
    attention: Segments | Tensor | None
    row: Tensor  # [K] which of the b rows predicts each of the K response tokens
    column: Tensor  # [K] at which position
    targets: Tensor  # [K] the response tokens, in the order of response_mask
    response_mask: Tensor  # [n, L] bool
    # [K] where each response token is among the mask's n * L; found here, since a GPU would be
    # waited for in each pass that looks for it.
    place: Tensor

    def attention_mask(self, dtype: torch.dtype) -> Tensor | Segments | None:
        """The model's argument ``mask``, for queries of a dtype; None = causal.

        The dense masks [b, S, S] of a whole step would be large, so each is made when needed.
        """
        if isinstance(self.attention, Tensor):
            return dense_mask(self.attention, dtype)
        return self.attention


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, of which there may be none."""

    numbers: tuple[int, ...]  # [n] rows of the trajectory
    rows: Tensor  # [n] the same on the device
    layout: Layout


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
    """Several rows with the same prompt in one; ``dense``: attend with a dense mask.

    packs: [n] the packed row that each row belongs to: 0, ..., 0, 1, ..., b - 1.
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
    """A pass over no row, of which nothing is read: for a rank that only has to take part."""
    nothing = batch.tokens.new_empty(0)
    mask = batch.response_mask[:0]
    return Layout(
        batch.tokens.new_zeros(1, 1), None, None, nothing, nothing, nothing, mask, nothing
    )


def response_inputs(batch: Trajectory) -> Tensor:
    """[n] tokens of each response that are read: those before the last one that is trained on."""
    number = torch.arange(batch.response_mask.shape[1], device=batch.tokens.device)
    return (batch.response_mask * number).amax(dim=1)


def dense_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores [b, S, S], 0 or -inf, of the packed rows' segments [b, S].

    A boolean mask would be converted, and kept, in every layer.
    """
    query, key = segments[:, :, None], segments[:, None, :]
    hidden = ((query != key) & (key != 0)) | torch.ones_like(query == key).triu(1)
    b, width = segments.shape
    mask = torch.zeros(b, width, aligned(width), dtype=dtype, device=segments.device)
    return mask[:, :, :width].masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Segments:
    """The parts of b packed rows of S tokens, where torchtune's modules take a mask.

    A dense mask takes S * S scores, of which most are hidden: with G responses of n tokens to a
    prompt of P, S is P + G * n, but only G * n * (P + n) are of use.
    """

    # The prompt, each response behind the prompt's keys, and the padding, of all packed rows.
    spans: Spans
    keys: Tensor  # [Tk] which of the rows' b * S tokens each key is

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Segments:
        """Build them once for all layers and passes.

        sizes: [b] of [P, n_1, ..., n_G], the parts of each packed row; width: S.
        """
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
    """Let the model's attention take :class:`Segments` for a mask; other masks work as before.

    ``_attention_call`` is where torchtune's attention decides between its kernels, after the heads
    were made and before they are joined. Other classes are refused: Gemma 2's sliding window, say,
    would count the positions of the packed row.
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

    Where there is a call for each response, the responses' copies of the prompt's keys and values
    are not kept for the backward pass, but made again.
    """
    if not isinstance(mask, Segments):
        return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    attend = partial(segment_attention, segments=mask, dropout=dropout_p)
    k, v = k[:, ::group], v[:, ::group]  # torchtune has copied them for each head
    if not torch.is_grad_enabled() or (dropout_p == 0 and has_varlen_kernel(q)):
        return attend(q, k, v)
    return checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=dropout_p > 0)


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, *, segments: Segments, dropout: float = 0.0
) -> Tensor:
    """Attention of the prompt to itself, and of each response to the prompt and itself.

    q is [b, heads, S, hd], and so is the result; k and v are [b, kv_heads, S, hd]. Padding at a
    row's end attends to itself, and is not read.
    """
    b, _, width, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    k, v = (x.index_select(0, segments.keys) for x in (k, v))
    out = varlen_attention(q, k, v, segments.spans, dropout=dropout)
    return out.unflatten(0, (b, width)).transpose(1, 2)
