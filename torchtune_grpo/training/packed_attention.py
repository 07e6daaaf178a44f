"""Attention of packed rows ``[prompt, response 1, ..., response G]``, in two forms.

In both the prompt attends to itself and a response to the prompt and itself, causally. By segments,
the hidden scores are never computed, and on CUDA one kernel does all of them; compiled layers,
which would be compiled anew for each step's lengths, take a dense mask instead.
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


def dense_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores. A boolean mask would be converted, and kept, in every layer.

    Args:
        segments (Tensor): [b, S] 0 = prompt, k = the packed row's k-th response.
        dtype (torch.dtype): of the attention's queries.

    Returns:
        Tensor: [b, S, S] 0 or -inf.
    """
    query, key = segments[:, :, None], segments[:, None, :]
    hidden = ((query != key) & (key != 0)) | torch.ones_like(query == key).triu(1)
    b, width = segments.shape
    mask = torch.zeros(b, width, aligned(width), dtype=dtype, device=segments.device)
    return mask[:, :, :width].masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Segments:
    """The parts of packed rows, where torchtune's modules take a mask.

    A dense mask takes S * S scores, of which most are hidden: with G responses of n tokens to a
    prompt of P, S is P + G * n, but only G * n * (P + n) are of use.

    Attributes:
        spans (Spans): the prompt, each response behind the prompt's keys, and what is behind a
            row's end, of all packed rows.
        keys (Tensor): [Tk] which of the rows' b * S tokens each key is.
    """

    spans: Spans
    keys: Tensor

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]], *, width: int, device: torch.device) -> Segments:
        """Makes them once for all layers and passes.

        Args:
            sizes (Sequence[Sequence[int]]): [b] of [P, n_1, ..., n_G], the parts of each packed
                row.
            width (int): S.
            device (torch.device): where the model computes.
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

    def to(self, device: torch.device) -> Segments:
        """The same segments on another device."""
        return Segments(self.spans.to(device), self.keys.to(device))


def attend_in_segments(model: TransformerDecoder) -> None:
    """Lets the model's attention take :class:`Segments` for a mask; other masks work as before.

    ``_attention_call`` is where torchtune's attention decides between its kernels, after the heads
    were made and before they are joined.

    Args:
        model (TransformerDecoder): changed in place.

    Raises:
        ValueError: if its attention is another class: Gemma 2's sliding window, say, would count
            the positions of the packed row.
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

    q is [b, heads, S, hd], and so is the result; k and v are [b, kv_heads, S, hd]. What is behind a
    row's end attends to itself, and is not read.
    """
    b, _, width, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    k, v = (x.index_select(0, segments.keys) for x in (k, v))
    out = varlen_attention(q, k, v, segments.spans, dropout=dropout)
    return out.unflatten(0, (b, width)).transpose(1, 2)
