"""What a decoding step reads besides weights: keys and values, and where the live rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.rollout.graphs import Buffers, coarse
from torchtune_grpo.rollout.linear import FEW_ROWS
from torchtune_grpo.trajectory import length_mask


@dataclass(frozen=True)
class CacheShape:
    """What decides the size of the cache, besides the rows."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes(self, *, prompts: int, prompt_width: int, rows: int, response_width: int) -> int:
        """2 (keys, values) * layers * kv_heads * head_dim * itemsize * cached positions."""
        positions = prompts * prompt_width + rows * response_width
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize * positions


class GroupCache:
    """Keys and values by layer: of prompts [2, prompts, kv_heads, P, hd], of rows [2, rows, ...].

    Responses grow by blocks, one layer at a time, so that growing never holds two caches. What is
    allocated stays for the next rollout, unless that has less than half as many prompts or rows: an
    evaluation's memory is the next update's.
    """

    BLOCK = 64

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.prompts: list[Tensor] = []
        self.rows: list[Tensor] = []

    @classmethod
    def rounded(cls, width: int) -> int:
        """A width in whole blocks."""
        return -(-width // cls.BLOCK) * cls.BLOCK

    @property
    def prompt_width(self) -> int:
        return self.prompts[0].shape[3]

    def reserve(self, *, prompts: int, prompt_width: int, rows: int, width: int) -> None:
        """Reserve room; what is large enough, and not more than twice that, is kept."""
        _grow(self.prompts, prompts, prompt_width, self.shape, keep=False)
        _grow(self.rows, rows, self.rounded(width), self.shape, keep=False)

    def grow(self, width: int) -> None:
        """Make room for ``width`` response tokens, to the next whole block."""
        if width > self.rows[0].shape[3]:
            rows = self.rows[0].shape[1]
            _grow(self.rows, rows, self.rounded(width), self.shape, keep=True)

    def tensors(self) -> list[Tensor]:
        return self.prompts + self.rows

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy a row's first ``length`` keys and values to another row's place."""
        for cached in self.rows:
            cached[:, target, :, :length] = cached[:, source, :, :length]

    def clear_row(self, place: int) -> None:
        """Zero a row: what is masked still has to be finite, since 0 * nan is nan."""
        for cached in self.rows:
            cached[:, place] = 0


def _grow(caches: list[Tensor], count: int, width: int, shape: CacheShape, *, keep: bool) -> None:
    none = torch.empty(2, 0, 0, 0, 0)
    if not caches:
        caches.extend([none] * shape.layers)
    size = (2, count, shape.kv_heads, width, shape.head_dim)
    for layer, old in enumerate(caches):
        fits = all(have >= want for have, want in zip(old.shape, size, strict=True))
        if fits and (keep or old.shape[1] <= 2 * count):
            continue
        if not keep:
            caches[layer] = old = none  # freed before the new one is made
        new = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        if keep:
            new[:, :, :, : old.shape[3]] = old
        caches[layer] = new


@dataclass(eq=False)
class Prompt:
    """A prompt of a rollout.

    It has a ``slot`` in the cache from its first row's beginning to its last row's end, and
    ``logits`` [V] of the token behind it until its last row has begun.
    """

    tokens: Sequence[int]
    rows_left: int  # not yet ended
    slot: int = -1
    logits: Any = None


@dataclass(eq=False)
class Row:
    """A response of a rollout; what is not ended when the rollout is, is truncated."""

    number: int
    prompt: Prompt
    count: int = 0  # sampled tokens
    ended: bool = False  # by a stop token or a stop string


def padded_rows(rows: int, *, few_shapes: bool = False) -> int:
    """Number of rows in a decoding step, including padding rows.

    Matrix libraries waste what is missing to a multiple of eight. With many rows the steps are
    larger, and with ``few_shapes`` larger still, so that few shapes occur.
    """
    if rows <= FEW_ROWS:
        return FEW_ROWS
    if few_shapes:
        return coarse(rows, least=8)
    multiple = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // multiple) * multiple


class RowLayout:
    """The live rows and some padding rows, n in all, as tensors that a decoding step reads.

    Attention over prompts works on a grid of [used_slots, kv_heads, group_width] cells, some empty.
    """

    rows: Tensor  # [n] numbers; those of padding rows are ``padding_row``
    last: Tensor  # [n] index of each row's last token among its sampled ones
    positions: Tensor  # [n] position of that token, prompt included
    places: Tensor  # [n] 0, 1, ..., n - 1
    cells: int  # of the grid
    gather: tuple[Tensor, Tensor]  # row and kv head of each cell, then of each row [n, kv_heads]
    gather_grid: tuple[Tensor, Tensor]  # of the cells alone
    scatter: Tensor  # [n * kv_heads] the cell of each row's heads
    bias: Tensor  # [n, 1, 1, prompt_width + width] 0 or -inf: the prompt, then the response

    def __init__(
        self,
        buffers: Buffers,
        *,
        kv_heads: int,
        slots: int,
        group_size: int,
        places: int,
        columns: int,
        padding_row: int,
        few_shapes: bool,
        dtype: torch.dtype,
    ) -> None:
        """Reserve room for n = ``places`` and a bias of ``columns``.

        ``few_shapes`` lays the grid out for all ``slots`` and whole groups at all times, so that n
        is all that its shape depends on.
        """
        self._kv_heads, self._padding_row, self._few_shapes = kv_heads, padding_row, few_shapes
        self.used_slots, self.group_width = slots, group_size
        cells, heads = slots * kv_heads * group_size, places * kv_heads
        # Room for the most rows and columns, so that nothing moves during the rollout.
        buffers.take("rows", (6 * places,), dtype=torch.long)
        buffers.take("gather", (2 * (cells + heads),), dtype=torch.long)
        buffers.take("scatter", (heads,), dtype=torch.long)
        buffers.take("bias", (places * columns,), dtype=dtype)
        self._buffers = buffers
        self._zero = buffers.put("zero", torch.zeros((), dtype=dtype))
        self.prompt_width = self.width = 0

    def update(self, live: Sequence[Row]) -> None:
        """Describe other live rows, in the order of their places in the cache."""
        slots = [row.prompt.slot for row in live]
        columns: list[int] = []  # of each row among those of its slot
        rows_of = dict.fromkeys(slots, 0)
        for slot in slots:
            columns.append(rows_of[slot])
            rows_of[slot] += 1
        if not self._few_shapes:
            self.used_slots, self.group_width = max(slots) + 1, max(rows_of.values())
        n = padded_rows(len(live), few_shapes=self._few_shapes)
        padding = [0] * (n - len(live))
        prompt_lengths = [len(row.prompt.tokens) for row in live]
        described = torch.tensor(
            [
                [row.number for row in live] + [self._padding_row for _ in padding],
                [row.count - 1 for row in live] + padding,
                [p + row.count - 1 for p, row in zip(prompt_lengths, live)] + padding,
                [1 for _ in live] + padding,
                prompt_lengths + padding,
                list(range(n)),
            ]
        )
        vectors = self._buffers.put("rows", described)
        self.rows, self.last, self.positions, self._is_live, self._prompt_lengths, self.places = (
            vectors
        )
        self._moving = vectors[1:3]
        self._lay_out_grid(slots + padding, columns + padding, live=len(live))
        self.prompt_width = self.width = 0  # another bias

    def _lay_out_grid(self, slots: list[int], columns: list[int], *, live: int) -> None:
        n, kv, width = len(slots), self._kv_heads, self.group_width
        heads = torch.arange(kv)
        slot, column = torch.tensor([slots, columns])
        row_of = torch.zeros(self.used_slots, 1, width, dtype=torch.long)
        row_of[slot[:live], 0, column[:live]] = torch.arange(live)
        shape = (self.used_slots, kv, width)
        self.cells = self.used_slots * kv * width
        of_grid = [row_of.expand(shape).flatten(), heads[:, None].expand(shape).flatten()]
        of_rows = [torch.arange(n).repeat_interleave(kv), heads.repeat(n)]
        index = torch.cat([torch.stack(of_grid), torch.stack(of_rows)], dim=1)
        gather = self._buffers.put("gather", index)
        self.gather = (gather[0], gather[1])
        self.gather_grid = (gather[0, : self.cells], gather[1, : self.cells])
        cell = (slot[:, None] * kv + heads) * width + column[:, None]  # [n, kv]
        self.scatter = self._buffers.put("scatter", cell.flatten())

    def show(self, *, prompt_width: int, width: int) -> None:
        """Write the bias for other widths; :meth:`show_last` brings it up to date."""
        if (prompt_width, width) == (self.prompt_width, self.width):
            return
        self.prompt_width, self.width = prompt_width, width
        of_prompt = length_mask(self._prompt_lengths, prompt_width)
        of_response = length_mask(self.last + 1, width)
        visible = torch.cat([of_prompt, of_response], dim=1)  # [n, P + C]
        shape = (len(self.rows), 1, 1, visible.shape[1])
        bias = self._buffers.take("bias", shape, dtype=self._zero.dtype)
        self.bias = bias.zero_().masked_fill_(~visible[:, None, None], -torch.inf)

    def show_last(self) -> None:
        own = self.bias[:, 0, 0, self.prompt_width :]
        own.index_put_((self.places, self.last), self._zero)

    def advance(self, places: Tensor | None = None) -> None:
        """Count one more token of the live rows, or of those in some places."""
        if places is None:
            self._moving += self._is_live
        else:
            self._moving[:, places] += self._is_live[places]
