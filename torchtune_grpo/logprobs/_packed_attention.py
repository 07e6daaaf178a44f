"""Attention of packed rows ``[prompt, response 1, ..., response G]``, in two forms.

In both the prompt attends to itself and a response to the prompt and itself, causally. By segments,
the hidden scores are never computed; compiled layers, which would be compiled anew for each step's
lengths, take a dense mask instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchtune.modules import MultiHeadAttention, TransformerDecoder

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
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class Segments:
    """The parts of packed rows, where torchtune's modules take a mask.

    A dense mask takes S * S scores, of which most are hidden: with G responses of n tokens to a
    prompt of P, S is P + G * n, but only G * n * (P + n) are of use.

    Attributes:
        sizes (Sequence[Sequence[int]]): [b] of [P, n_1, ..., n_G], the parts of each packed row.
    """

    sizes: Sequence[Sequence[int]]


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
        layer.attn._attention_call = partial(_attend, stock=layer.attn._attention_call)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | Segments | None,
    dropout_p: float,
    is_causal: bool,
    stock: Callable[..., Tensor],
) -> Tensor:
    """q, k and v [b, heads, S, hd] -> [b, heads, S, hd].

    The responses' copies of the prompt's keys and values are not kept for the backward pass, but
    made again.
    """
    if not isinstance(mask, Segments):
        return stock(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal)
    if not torch.is_grad_enabled():
        return segment_attention(q, k, v, sizes=mask.sizes, dropout=dropout_p)
    return checkpoint(
        partial(segment_attention, sizes=mask.sizes, dropout=dropout_p),
        q,
        k,
        v,
        use_reentrant=False,
        preserve_rng_state=dropout_p > 0,
    )


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, *, sizes: Sequence[Sequence[int]], dropout: float = 0.0
) -> Tensor:
    """One attention call for the prompt, and one per response over the prompt's keys and its own.

    q, k and v are [b, heads, S, hd], and so is the result, which is 0 behind a row's end;
    ``sizes`` are those of :class:`Segments`.
    """
    longest_prompt = max(row[0] for row in sizes)
    longest = max(max(row[1:]) for row in sizes)
    causal = q.new_full((longest, longest_prompt + longest), -torch.inf).triu_(longest_prompt + 1)
    rows = []
    for row, parts in enumerate(sizes):
        whole = [*parts, q.shape[2] - sum(parts)]
        (q0, *queries, rest), (k0, *keys, _), (v0, *values, _) = (
            x[row : row + 1].split(whole, dim=2) for x in (q, k, v)
        )
        out = [F.scaled_dot_product_attention(q0, k0, v0, dropout_p=dropout, is_causal=True)]
        for q_i, k_i, v_i in zip(queries, keys, values, strict=True):
            n = q_i.shape[2]
            if n:
                out.append(
                    F.scaled_dot_product_attention(
                        q_i,
                        torch.cat([k0, k_i], dim=2),
                        torch.cat([v0, v_i], dim=2),
                        attn_mask=causal[:n, longest_prompt - parts[0] : longest_prompt + n],
                        dropout_p=dropout,
                    )
                )
        rows.append(torch.cat([*out, torch.zeros_like(rest)], dim=2))
    return torch.cat(rows)
