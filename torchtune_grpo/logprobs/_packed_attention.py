"""Attention of packed rows ``[prompt, response 1, ..., response G]``, in three forms.

In each of them the prompt attends to itself and a response to the prompt and itself, causally, and
each is something that torchtune's attention takes as its ``mask``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.checkpoint import checkpoint

PACKED_ATTENTION = ("segments", "dense", "flex")
FLEX_BLOCK = 128  # positions; the block size of flex attention's masks


def packed_width(length: int, *, flex: bool) -> int:
    """S of a packed row; flex attention compiles a kernel for every S, so it gets fewer of them."""
    return -(-length // FLEX_BLOCK) * FLEX_BLOCK if flex else length


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


def flex_mask(segments: Tensor) -> BlockMask:
    """The block mask with which torchtune calls flex attention; segments as above."""
    rows, width = segments.shape
    return create_block_mask(flex_mask_mod(segments), rows, None, width, width, segments.device)


def flex_mask_mod(segments: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask as a function of (row, head, query, key); segments as above."""

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = segments[row, key]
        return (query >= key) & ((seen == segments[row, query]) | (seen == 0))

    return attends


class SegmentMask:
    """Stands where a mask is expected, and has each response attend by itself.

    A dense mask takes S * S scores, of which most are hidden: with G responses of n tokens to a
    prompt of P, S is P + G * n, but only G * n * (P + n) are of use. This is no tensor, but
    PyTorch asks it how to compute ``scaled_dot_product_attention``
    (https://docs.pytorch.org/docs/stable/notes/extending.html#extending-torch-python-api): one call
    for the prompt, and one for each response, whose keys are the prompt's and its own. The
    responses' copies of the prompt's keys and values are not kept for the backward pass, but made
    again.

    Args:
        sizes (Sequence[Sequence[int]]): [b] of [P, n_1, ..., n_G], the parts of each packed row.
        dtype (torch.dtype): of the attention's queries.
        device (torch.device): of the rows.

    Raises:
        TypeError: when anything else is computed with it.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes = [list(row) for row in sizes]
        self._prompt = max(row[0] for row in self._sizes)
        longest = max(max(row[1:]) for row in self._sizes)
        hidden = torch.full(
            (longest, self._prompt + longest), -torch.inf, dtype=dtype, device=device
        )
        self._causal = hidden.triu_(self._prompt + 1)

    def __getitem__(self, index: Any) -> SegmentMask:
        return self  # of a mask [b, S, S], torchtune takes [:, None, :, :]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        if func is not F.scaled_dot_product_attention:
            raise TypeError(
                f"packed_attention=segments: the model's attention calls {func.__name__} on its "
                "mask, not scaled_dot_product_attention; set packed_attention to dense."
            )
        q, k, v = args
        mask, dropout = kwargs["attn_mask"], kwargs["dropout_p"]
        if not torch.is_grad_enabled():
            return mask.attend(q, k, v, dropout)
        return checkpoint(
            mask.attend, q, k, v, dropout, use_reentrant=False, preserve_rng_state=dropout > 0
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """q, k and v [b, heads, S, hd] -> [b, heads, S, hd], 0 behind a row's end."""
        rows = zip(q.split(1), k.split(1), v.split(1), self._sizes, strict=True)
        return torch.cat([self._attend_row(*row, dropout) for row in rows])

    def _attend_row(
        self, q: Tensor, k: Tensor, v: Tensor, sizes: list[int], dropout: float
    ) -> Tensor:
        """[1, heads, S, hd] of one packed row."""
        parts = [*sizes, q.shape[2] - sum(sizes)]
        (q0, *queries, rest), (k0, *keys, _), (v0, *values, _) = (
            x.split(parts, dim=2) for x in (q, k, v)
        )
        prompt = sizes[0]
        out = [F.scaled_dot_product_attention(q0, k0, v0, dropout_p=dropout, is_causal=True)]
        for q_i, k_i, v_i in zip(queries, keys, values, strict=True):
            n = q_i.shape[2]
            if n:
                seen = slice(self._prompt - prompt, self._prompt + n)
                out.append(
                    F.scaled_dot_product_attention(
                        q_i,
                        torch.cat([k0, k_i], dim=2),
                        torch.cat([v0, v_i], dim=2),
                        attn_mask=self._causal[:n, seen],
                        dropout_p=dropout,
                    )
                )
        return torch.cat([*out, torch.zeros_like(rest)], dim=2)
