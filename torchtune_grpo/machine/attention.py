"""Attention over parts of sequences, and float32 products: CUDA's own kernels, and the others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# A mask's rows begin at multiples of this: memory-efficient attention needs 16-byte addresses.
_MASK_ALIGNMENT = 16
_LARGEST_HEAD = 256  # of flash attention
_PART = 1024  # rows of a weight that are converted at once
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Spans:
    """The parts of sequences that are stored one after another, for :func:`varlen_attention`."""

    queries: tuple[int, ...]  # [parts] how many queries each part has; 0 is allowed
    keys: tuple[int, ...]  # [parts] how many keys, at least as many
    query_ends: Tensor  # [parts + 1] int32: 0, and where each part's queries end
    key_ends: Tensor  # [parts + 1] int32

    @classmethod
    def of(cls, queries: Iterable[int], keys: Iterable[int], *, device: torch.device) -> Spans:
        """Copy the counts and ends to the device, once for many calls."""
        queries, keys = tuple(queries), tuple(keys)
        assert all(n <= m for n, m in zip(queries, keys, strict=True)), "a query without a key"
        query_ends, key_ends = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
            for counts in (queries, keys)
        )
        return cls(queries, keys, query_ends, key_ends)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, *, dropout: float = 0.0
) -> Tensor:
    """Causal attention of each part to its own keys; a part's last query sees all of them.

    q and the result are [Tq, heads, hd]; k and v are [Tk, kv_heads, hd]. Since Ampere, CUDA has one
    kernel for all parts in bf16 or fp16. Elsewhere, and with dropout, each part is a call.
    """
    if dropout == 0 and has_varlen_kernel(q):
        call, takes_gqa = _varlen_attn()
        options: dict[str, Any] = {"enable_gqa": True} if takes_gqa else {}
        if not takes_gqa:
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
        longest = max(spans.queries), max(spans.keys)
        ends = spans.query_ends, spans.key_ends
        return call(q, k, v, *ends, *longest, window_size=(-1, 0), **options)
    return _part_by_part(q, k, v, spans, dropout=dropout)


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether torch's variable-length flash attention takes queries [..., hd] like these."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= _LARGEST_HEAD
        and q.shape[-1] % 8 == 0
        and _is_since_ampere(q.device)
    )


@cache
def _is_since_ampere(device: torch.device) -> bool:
    if torch.version.hip is not None:
        return False
    # Without a GPU it is a test's fake tensor, and the kernel is under test.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen_attn() -> tuple[Any, bool]:
    """torch's function, whose import takes a second, and whether it supports grouped queries."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _part_by_part(q: Tensor, k: Tensor, v: Tensor, spans: Spans, *, dropout: float) -> Tensor:
    out = []
    # cuDNN plans each new shape for up to a second, and here nearly all are new.
    with sdpa_kernel(_WITHOUT_CUDNN) if q.is_cuda else nullcontext():
        parts = (_split(q, spans.queries), _split(k, spans.keys), _split(v, spans.keys))
        for q_i, k_i, v_i in zip(*parts, strict=True):
            n, m = q_i.shape[2], k_i.shape[2]
            k_i, v_i = (_for_each_head(x, q.shape[1]) for x in (k_i, v_i))
            mask = None
            if m > n > 1:  # [n, m] 0 or -inf, where the last query sees all keys
                mask = q.new_full((n, aligned(m)), -torch.inf).triu_(m - n + 1)[:, :m]
            attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, is_causal=m == n)
            out.append(attend(q_i, k_i, v_i, attn_mask=mask) if n else q_i)
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def _split(x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """[T, heads, hd] -> parts [1, heads, n, hd]."""
    return x.transpose(0, 1)[None].split(list(counts), dim=2)


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [_, kv_heads, ...] for the heads that share them: [_, heads, ...]."""
    count = heads // x.shape[1]
    return x if count == 1 else x.repeat_interleave(count, dim=1)


def aligned(width: int) -> int:
    """The number of columns to allocate for a mask of this width, to be sliced off again."""
    return -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT


def float32_product(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``x weight^T`` [K, V] without gradient, of x [K, D] and weight [V, D].

    It is float32 and not rounded to bf16 first where the factors are bf16.
    """
    x, weight = x.detach(), weight.detach()
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        options = {} if out is None else {"out": out}
        return torch.mm(x, weight.t(), out_dtype=torch.float32, **options)
    if out is not None or weight.dtype == torch.float32:
        return torch.mm(x.float(), weight.float().t(), out=out)
    # Converted in parts that stay in a CPU's cache.
    wide = x.float()
    return torch.cat([torch.mm(wide, part.float().t()) for part in weight.split(_PART)], dim=1)
