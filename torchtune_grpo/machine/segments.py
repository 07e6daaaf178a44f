"""Attention over parts of sequences, and float32 products, with CUDA's own kernels or without."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune_grpo.machine.device import multiplies_bf16

T = TypeVar("T")
# A mask's rows begin at multiples of this: memory-efficient attention needs 16-byte addresses.
_MASK_ALIGNMENT = 16
_LARGEST_HEAD = 256  # largest head size that flash attention takes
_PART = 1024  # rows of a weight that are multiplied at once, to stay in a CPU's cache
_SCORES = 1 << 16  # at most so many per head, in parts that attend together


@dataclass(frozen=True)
class Batch:
    """Parts of similar size that attend together, padded at their beginnings to the longest."""

    parts: list[int]  # [B] indices
    width: int  # n queries of each part, with padding
    key_width: int  # m keys of each part, with padding
    counts: Tensor  # [B, 1, 1] how many of the keys, the last ones, are the part's


@dataclass(frozen=True)
class Segments:
    """Parts of a row of tokens, each of which sees itself, causally, and other parts.

    They form a tree: the beginning that prompts share, the rest of each prompt, and its responses.
    With a dense mask most scores would be hidden: G responses of n tokens to a prompt of P tokens
    would take (P + G * n)^2 instead of G * n * (P + n).
    """

    queries: tuple[int, ...]  # [parts] how many tokens each part has
    keys: tuple[int, ...]  # [parts] how many it sees
    query_ends: Tensor  # [parts + 1] int32: 0, and where each part's queries end
    key_ends: Tensor  # [parts + 1] int32
    seen: Tensor  # [sum of keys] which token of the row each key is

    @classmethod
    def from_ranges(cls, parts: Iterable[Sequence[range]], *, device: torch.device) -> Segments:
        """Build segments, once for all layers and passes, from the ranges that each part sees.

        A part's own range is its last one. The parts' queries lie one after another, and a part
        may be empty.
        """
        parts = [part for part in parts if part[-1]]
        queries = tuple(len(part[-1]) for part in parts)
        keys = tuple(sum(map(len, part)) for part in parts)
        query_ends, key_ends = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
            for counts in (queries, keys)
        )
        seen = torch.cat([torch.arange(x.start, x.stop) for part in parts for x in part])
        return cls(queries, keys, query_ends, key_ends, seen.to(device))

    @cached_property
    def batches(self) -> list[Batch]:
        """All parts: many small ones together, and each large one by itself."""
        groups: list[list[int]] = []
        longest = 0  # of the last group's parts, in keys
        for part in sorted(range(len(self.queries)), key=lambda i: (self.queries[i], self.keys[i])):
            longest = max(longest, self.keys[part])
            if not groups or (len(groups[-1]) + 1) * self.queries[part] * longest > _SCORES:
                groups.append([])
                longest = self.keys[part]
            groups[-1].append(part)
        counts = self.key_ends.diff()
        return [
            Batch(
                group,
                width=max(self.queries[part] for part in group),
                key_width=max(self.keys[part] for part in group),
                counts=counts[group, None, None],
            )
            for group in groups
        ]

    @cached_property
    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of all batches' queries, of their keys, and of each query's result, [S].

        One gather takes all of them, as the gradient of every gather is as long as the whole row.
        """
        query_ends, key_ends = ([*accumulate(counts)] for counts in (self.queries, self.keys))
        queries, keys, results = [], [], {}
        end = 0
        for batch in self.batches:
            for part in batch.parts:
                queries.append(torch.arange(query_ends[part] - batch.width, query_ends[part]))
                keys.append(torch.arange(key_ends[part] - batch.key_width, key_ends[part]))
                end += batch.width
                results[part] = torch.arange(end - self.queries[part], end)
        in_order = [results[part] for part in range(len(results))]
        # Padding repeats some token, since it has to be finite; nothing sees it.
        of_queries, of_keys, of_results = (
            torch.cat(ranges).clamp_(min=0).to(self.seen.device)
            for ranges in (queries, keys, in_order)
        )
        return of_queries, self.seen[of_keys], of_results


def shared_beginning(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the prompts' common beginning, short of any prompt's last token."""
    if len(prompts) < 2:
        return 0
    return len(os.path.commonprefix([list(prompt[:-1]) for prompt in prompts]))


def fill_parts(items: Iterable[T], *, size: Callable[[T], int], room: int) -> list[list[T]]:
    """Split items, in order, into parts whose sizes add up to at most ``room``, or of one item."""
    parts: list[list[T]] = []
    left = 0
    for item in items:
        if size(item) > left:
            parts.append([])
            left = room
        parts[-1].append(item)
        left -= size(item)
    return parts


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend causally in each segment; its last query sees all of its keys.

    With a ``window`` a query sees only that many keys: its own, and those right before it.
    q and the result are [S, heads, hd]; k and v are [S, kv_heads, hd]. On GPUs since Ampere one
    kernel takes all segments in bf16 or fp16. Elsewhere, and with dropout, small ones are padded
    and share a few calls, and each large one takes a call of its own.
    """
    if dropout == 0 and has_varlen_kernel(q):
        k, v = (x.index_select(0, segments.seen) for x in (k, v))
        call, takes_gqa = _varlen_attn()
        options: dict[str, object] = {"enable_gqa": True} if takes_gqa else {}
        if not takes_gqa:
            k, v = (_for_each_head(x, q.shape[1]) for x in (k, v))
        longest = max(segments.queries), max(segments.keys)
        ends = segments.query_ends, segments.key_ends
        before = -1 if window is None else window - 1  # keys before a query's own; -1: all
        return call(q, k, v, *ends, *longest, window_size=(before, 0), **options)
    queries, keys, results = segments.padded
    sizes = [len(batch.parts) * batch.width for batch in segments.batches]
    key_sizes = [len(batch.parts) * batch.key_width for batch in segments.batches]
    parts = (
        q.index_select(0, queries).split(sizes),
        *(x.index_select(0, keys).split(key_sizes) for x in (k, v)),
    )
    out = []
    for batch, q_i, k_i, v_i in zip(segments.batches, *parts, strict=True):
        attend = _attend_alone if len(batch.parts) == 1 else _attend_together
        out.append(attend(q_i, k_i, v_i, batch, window=window, dropout=dropout))
    return torch.cat(out).index_select(0, results)


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether torch's variable-length flash attention takes queries [..., hd] like these."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= _LARGEST_HEAD
        and q.shape[-1] % 8 == 0
        and is_since_ampere(q.device)
    )


@cache
def is_since_ampere(device: torch.device) -> bool:
    """Whether a CUDA device is an NVIDIA GPU of the Ampere generation or a later one."""
    if torch.version.hip is not None:
        return False
    # Without a GPU the tensor is a test's fake one, and the kernel is under test.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _varlen_attn() -> tuple[Any, bool]:
    """Import torch's function, which takes a second, and check if it supports grouped queries."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def _attend_alone(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, window: int | None, dropout: float
) -> Tensor:
    """Compute one part's attention: [n, heads, hd]."""
    n, m = batch.width, batch.key_width
    if window is not None and m >= n + window:
        m = n + window - 1  # that some query sees
    k, v = (_for_each_head(x[-m:], q.shape[1]) for x in (k, v))
    is_causal, mask = m == n and (window is None or m <= window), None
    if n > 1 and not is_causal:  # [n, m] 0 or -inf, where the last query is at the last key
        mask = q.new_full((n, aligned(m)), -torch.inf).triu_(m - n + 1)[:, :m]
        if window is not None:
            mask += torch.full_like(mask, -torch.inf).tril_(m - n - window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, hd]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal
    )
    return out[0].transpose(0, 1)


def _attend_together(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, *, window: int | None, dropout: float
) -> Tensor:
    """Compute the attention of parts: [B * n, heads, hd]. Fused kernels are slow for few tokens."""
    count, n, m = len(batch.parts), batch.width, batch.key_width
    kv, size = k.shape[1:]
    q = q.view(count, n, kv, -1, size).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    k, v = (x.view(count, m, kv, size).transpose(1, 2).flatten(0, 1) for x in (k, v))
    # q is [B * kv, n * r, hd] now, k and v are [B * kv, m, hd]
    key = torch.arange(m, device=q.device)
    query = torch.arange(m - n, m, device=q.device)[:, None]  # the last one is at the last key
    hidden = (key > query) | (key < m - batch.counts)  # [B, n, m]
    if window is not None:
        hidden |= key <= query - window
    scores = torch.bmm(q, k.mT).view(count, kv, n, -1, m) * size**-0.5
    # Not -inf: a query that is padding may see nothing, and would get NaN.
    scores = scores.masked_fill_(hidden[:, None, :, None], torch.finfo(q.dtype).min)
    probs = F.dropout(scores.softmax(dim=-1), dropout).view(count * kv, -1, m)
    out = torch.bmm(probs, v).view(count, kv, n, -1, size)
    return out.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values [_, kv_heads, ...] for the heads that share them: [_, heads, ...]."""
    count = heads // x.shape[1]
    return x if count == 1 else x.repeat_interleave(count, dim=1)


def aligned(width: int) -> int:
    """Return the number of columns to allocate for a mask, which is then cut to ``width``."""
    return -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT


def float32_product(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``x weight^T`` [K, V] without gradient, for x [K, D] and weight [V, D].

    It is float32, and not rounded to bf16 first if the factors are bf16. A CPU that multiplies bf16
    makes two such products, since its results are bf16, too: the second is what rounding took from
    the first. Together they have 16 bits, in half the time of a product in float32.
    """
    x, weight = x.detach(), weight.detach()
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    if x.dtype == weight.dtype and _is_fast_bf16(weight):
        out = x.new_empty(len(x), len(weight), dtype=torch.float32) if out is None else out
        for part, columns in zip(weight.split(_PART), out.split(_PART, dim=1), strict=True):
            rounded = torch.mm(x, part.t())
            columns.copy_(rounded)
            columns += torch.addmm(rounded, x, part.t(), beta=-1)
        return out
    if out is not None or weight.dtype == torch.float32:
        return torch.mm(x.float(), weight.float().t(), out=out)
    wide = x.float()
    return torch.cat([torch.mm(wide, part.float().t()) for part in weight.split(_PART)], dim=1)


def add_product(total: Tensor, left: Tensor, w: Tensor) -> None:
    """Add ``left w`` to ``total`` in float32, where a sum's terms nearly cancel."""
    if _is_fast_bf16(w):
        total += float32_product(left.to(w.dtype), w.t())
    else:
        total.addmm_(left, w.to(total.dtype))  # without a tensor of total's size


def _is_fast_bf16(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and multiplies_bf16(weight.device)
