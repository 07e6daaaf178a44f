"""Keys and values that a decoding step reads, and the layout of its live rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.linear import FEW_ROWS
from torchtune_grpo.rollout.request import RolloutRequest


@dataclass(frozen=True)
class CacheShape:
    """The model's properties that decide the size of the cache, besides the rows."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes(self, size: CacheSize) -> int:
        """2 (keys, values) * layers * kv_heads * head_dim * itemsize * cached positions."""
        positions = size.prompts * size.prompt_width + size.rows * size.width
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize * positions


@dataclass(frozen=True)
class CacheSize:
    """The numbers of prompts and rows that have a slot in the cache, and their widths in tokens."""

    max_rows: int  # responses that are sampled at once
    slots: int  # responses that have begun and not ended, those that pause between two turns too
    prompts: int
    prompt_width: int
    width: int

    @classmethod
    def of(cls, request: RolloutRequest, *, max_rows: int) -> CacheSize:
        """Return the size that a request needs with ``max_rows`` responses at once.

        With turns it has slots for twice as many, if there are: as many may pause as are sampled.
        It has twice the prompts of that many rows in whole groups, so that new groups can start
        while the last rows of others are still running; groups of one row need no spare ones.
        """
        slots = min(2 * max_rows, request.num_rows) if request.turns else max_rows
        spare = 2 if request.group_size > 1 else 1
        return cls(
            max_rows=max_rows,
            slots=slots,
            prompts=min(len(request.prompts), spare * -(-slots // request.group_size)),
            prompt_width=GroupCache.rounded(max(map(len, request.prompts))),
            width=GroupCache.rounded(request.max_row_tokens),
        )

    @property
    def rows(self) -> int:
        """The number of rows' slots: all padding rows share one."""
        return max(padded_rows(self.max_rows), self.slots + 1)


class GroupCache:
    """Keys and values by layer: prompts [2, prompts, kv_heads, P, hd] and rows [2, rows, ...].

    Responses grow by blocks, one layer at a time, so that there are never two whole caches. Memory
    is kept for the next rollout, unless that has less than half as many prompts or rows: what an
    evaluation has allocated is free again for the next update.
    """

    BLOCK = 64

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.prompts: list[Tensor] = []
        self.rows: list[Tensor] = []

    @classmethod
    def rounded(cls, width: int) -> int:
        """Round a width up to whole blocks."""
        return -(-width // cls.BLOCK) * cls.BLOCK

    def reserve(self, size: CacheSize) -> None:
        """Reserve room; tensors that are large enough, but not more than twice that, are kept."""
        self._reserve(self.prompts, size.prompts, size.prompt_width)
        self._reserve(self.rows, size.rows, size.width)

    def _reserve(self, caches: list[Tensor], count: int, width: int) -> None:
        if caches:
            _, kept_count, _, kept_width, _ = caches[-1].shape  # the last one to grow
            if count <= kept_count <= 2 * count and width <= kept_width:
                return
        caches.clear()  # freed before the new ones are made
        shape = self.shape
        size = (2, count, shape.kv_heads, width, shape.head_dim)
        caches += [
            torch.zeros(size, dtype=shape.dtype, device=shape.device) for _ in range(shape.layers)
        ]

    def grow(self, width: int) -> None:
        """Make room for ``width`` response tokens, rounded up to whole blocks."""
        more = self.rounded(width) - self.rows[-1].shape[3]
        if more > 0:
            for layer, rows in enumerate(self.rows):
                self.rows[layer] = F.pad(rows, (0, 0, 0, more))

    def tensors(self) -> list[Tensor]:
        return self.prompts + self.rows

    def swap(self, one: int, other: int, *, length: int) -> None:
        """Exchange the first ``length`` keys and values of two slots."""
        for cached in self.rows:
            cached[:, [one, other], :, :length] = cached[:, [other, one], :, :length]

    def clear_row(self, slot: int) -> None:
        """Zero a row: masked values have to be finite, too, since 0 * nan is nan."""
        for cached in self.rows:
            cached[:, slot] = 0


@dataclass(eq=False)
class CachedPrompt:
    """A prompt of a rollout.

    It has a ``slot`` in the cache from the start of its first row to the end of its last one, and
    the ``logits`` [V] of the token after it until its last row has started.
    """

    tokens: Sequence[int]
    rows_left: int  # not yet ended
    slot: int = -1
    logits: Any = None


@dataclass(eq=False)
class Row:
    """A response of a rollout; it is truncated if the rollout ends before it does.

    It has a ``slot`` in the cache from its first token to its end. At the end of a turn
    ``response`` is what is asked about, and then what was replied comes at its end.
    """

    number: int  # in the request
    prompt: CachedPrompt
    slot: int = -1
    count: int = 0  # tokens
    given: int = 0  # of these, tokens that were not sampled
    begin: int = 0  # index of the first token of its present turn
    response: Sequence[int] = ()
    ended: bool = False  # its turn, by a stop token or a stop string

    def room(self, request: RolloutRequest) -> int:
        """Return how many more tokens it may sample."""
        left = request.params.max_generated_tokens - (self.count - self.given)
        return min(left, request.max_row_tokens - self.count)

    def begin_turn(self) -> None:
        """Begin the next turn behind the reply at the end of ``response``."""
        self.given += len(self.response) - self.count
        self.begin = self.count = len(self.response)
        self.ended = False


def padded_rows(rows: int) -> int:
    """Number of rows in a decoding step, including padding rows.

    Matrix libraries waste the difference to a multiple of eight. With many rows the multiple is
    larger, so that few shapes occur.
    """
    if rows <= FEW_ROWS:
        return FEW_ROWS
    multiple = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // multiple) * multiple


class LiveRows:
    """The live rows and some padding rows, n in all, as tensors that a decoding step reads.

    A step's index, 0 to n - 1, is not a slot: a row that pauses leaves the step and keeps its slot.
    """

    numbers: Tensor  # [n] in the request; all padding rows have the same one
    slots: Tensor  # [n] slots of the rows; all padding rows have the same one
    prompt_slots: Tensor  # [n] slots of their prompts; 0 for padding rows, as in all that follow
    prompt_lengths: Tensor  # [n]
    last: Tensor  # [n] index of each row's last token in its response
    positions: Tensor  # [n] position of that token, prompt included

    def __init__(self, buffers: Buffers, *, size: CacheSize, padding_row: Row) -> None:
        self._buffers, self._padding_row = buffers, padding_row
        # Room for the largest number of rows, so that nothing moves during the rollout.
        buffers.take("rows", (7 * padded_rows(size.max_rows),), dtype=torch.long)

    def update(self, live: Sequence[Row]) -> None:
        """Describe a new set of live rows, in the order of their indices."""
        padding = [0] * (padded_rows(len(live)) - len(live))
        rows = [*live, *(self._padding_row for _ in padding)]
        described = torch.tensor(
            [
                [row.number for row in rows],
                [row.slot for row in rows],
                [row.prompt.slot for row in live] + padding,
                [len(row.prompt.tokens) for row in live] + padding,
                [1 for _ in live] + padding,
                [row.count - 1 for row in live] + padding,
                [len(row.prompt.tokens) + row.count - 1 for row in live] + padding,
            ]
        )
        vectors = self._buffers.put("rows", described)
        self.numbers, self.slots, self.prompt_slots, self.prompt_lengths = vectors[:4]
        self._is_live, self._moving = vectors[4], vectors[5:]
        self.last, self.positions = self._moving

    def advance(self) -> None:
        """Count one more token of all live rows."""
        self._moving += self._is_live
