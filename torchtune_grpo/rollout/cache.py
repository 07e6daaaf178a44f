"""What a decoding step reads besides weights: keys and values, and where the live rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.linear import FEW_ROWS
from torchtune_grpo.trajectory import length_mask


@dataclass(frozen=True)
class CacheShape:
    """The model's properties that decide the size of the cache, besides the rows."""

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

    @property
    def prompt_width(self) -> int:
        return self.prompts[0].shape[3]

    def reserve(self, *, prompts: int, prompt_width: int, rows: int, width: int) -> None:
        """Reserve room; tensors that are large enough, but not more than twice that, are kept."""
        _grow(self.prompts, prompts, prompt_width, self.shape, keep=False)
        _grow(self.rows, rows, self.rounded(width), self.shape, keep=False)

    def grow(self, width: int) -> None:
        """Make room for ``width`` response tokens, rounded up to whole blocks."""
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
        """Zero a row: masked values have to be finite, too, since 0 * nan is nan."""
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

    It has a ``slot`` in the cache from the start of its first row to the end of its last one, and
    the ``logits`` [V] of the token after it until its last row has started.
    """

    tokens: Sequence[int]
    rows_left: int  # not yet ended
    slot: int = -1
    logits: Any = None


@dataclass(eq=False)
class Row:
    """A response of a rollout; it is truncated if the rollout ends before it does."""

    number: int
    prompt: Prompt
    count: int = 0  # sampled tokens
    ended: bool = False  # by a stop token or a stop string


def padded_rows(rows: int) -> int:
    """Number of rows in a decoding step, including padding rows.

    Matrix libraries waste the difference to a multiple of eight. With many rows the multiple is
    larger, so that few shapes occur.
    """
    if rows <= FEW_ROWS:
        return FEW_ROWS
    multiple = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // multiple) * multiple


class RowLayout:
    """The live rows and some padding rows, n in all, as tensors that a decoding step reads.

    ``places`` is the largest n; ``padding_row`` is the row number of all padding rows. ``grid``, if
    given, is kept up to date.
    """

    rows: Tensor  # [n] numbers
    places: Tensor  # [n] 0, 1, ..., n - 1
    slots: Tensor  # [n] slots of the rows' prompts; 0 for padding rows, as in all that follow
    prompt_lengths: Tensor  # [n]
    last: Tensor  # [n] index of each row's last token among its sampled ones
    positions: Tensor  # [n] position of that token, prompt included

    def __init__(
        self, buffers: Buffers, *, places: int, padding_row: int, grid: PromptGrid | None
    ) -> None:
        self._buffers, self._padding_row, self._grid = buffers, padding_row, grid
        # Room for the largest number of rows, so that nothing moves during the rollout.
        buffers.take("rows", (7 * places,), dtype=torch.long)

    def update(self, live: Sequence[Row]) -> None:
        """Describe a new set of live rows, in the order of their places in the cache."""
        n = padded_rows(len(live))
        padding = [0] * (n - len(live))
        slots = [row.prompt.slot for row in live]
        prompt_lengths = [len(row.prompt.tokens) for row in live]
        described = torch.tensor(
            [
                [row.number for row in live] + [self._padding_row for _ in padding],
                list(range(n)),
                slots + padding,
                prompt_lengths + padding,
                [1 for _ in live] + padding,
                [row.count - 1 for row in live] + padding,
                [p + row.count - 1 for p, row in zip(prompt_lengths, live)] + padding,
            ]
        )
        vectors = self._buffers.put("rows", described)
        self.rows, self.places, self.slots, self.prompt_lengths, self._is_live = vectors[:5]
        self._moving = vectors[5:]
        self.last, self.positions = self._moving
        if self._grid is not None:
            self._grid.update(slots, rows=n)

    def advance(self, places: Tensor | None = None) -> None:
        """Count one more token of all live rows, or of those in ``places``."""
        if places is None:
            self._moving += self._is_live
        else:
            self._moving[:, places] += self._is_live[places]


class PromptGrid:
    """Places of rows on a grid of [slots, kv_heads, width] cells, some empty, and what they see.

    With it, attention over a prompt is one product for all of its rows.
    """

    slots: int  # in use
    cells: int
    gather: tuple[Tensor, Tensor]  # row and kv head of each cell, then of each row [n, kv_heads]
    gather_cells: tuple[Tensor, Tensor]  # the same for the cells alone
    scatter: Tensor  # [n * kv_heads] the cell of each row's heads
    bias: Tensor  # [n, 1, 1, prompt_width + C] 0 or -inf: the prompt, then the response

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._zero = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self.prompt_width = self._width = 0

    def update(self, slots: Sequence[int], *, rows: int) -> None:
        """Lay out the live rows, given their slots in the order of places, and padding rows."""
        columns: list[int] = []  # each row's index among the rows of its slot
        rows_of = dict.fromkeys(slots, 0)
        for slot in slots:
            columns.append(rows_of[slot])
            rows_of[slot] += 1
        self.slots, width = max(slots) + 1, max(rows_of.values())
        kv, device = self._shape.kv_heads, self._shape.device
        heads, live = torch.arange(kv), len(slots)
        padding = [0] * (rows - live)
        slot, column = torch.tensor([[*slots, *padding], [*columns, *padding]])
        row_of = torch.zeros(self.slots, 1, width, dtype=torch.long)
        row_of[slot[:live], 0, column[:live]] = torch.arange(live)
        shape = (self.slots, kv, width)
        self.cells = self.slots * kv * width
        of_cells = [row_of.expand(shape).flatten(), heads[:, None].expand(shape).flatten()]
        of_rows = [torch.arange(rows).repeat_interleave(kv), heads.repeat(rows)]
        index = torch.cat([torch.stack(of_cells), torch.stack(of_rows)], dim=1).to(device)
        self.gather = (index[0], index[1])
        self.gather_cells = (index[0, : self.cells], index[1, : self.cells])
        cell = (slot[:, None] * kv + heads) * width + column[:, None]  # [n, kv]
        self.scatter = cell.flatten().to(device)
        self.prompt_width = self._width = 0  # the bias is out of date

    def show(self, at: RowLayout, *, prompt_width: int, width: int) -> None:
        """Write the bias if the widths have changed; :meth:`show_last` brings it up to date."""
        if (prompt_width, width) == (self.prompt_width, self._width):
            return
        self.prompt_width, self._width = prompt_width, width
        of_prompt = length_mask(at.prompt_lengths, prompt_width)
        of_response = length_mask(at.last + 1, width)
        visible = torch.cat([of_prompt, of_response], dim=1)  # [n, P + C]
        bias = torch.zeros(visible.shape, dtype=self._zero.dtype, device=visible.device)
        self.bias = bias.masked_fill_(~visible, -torch.inf)[:, None, None]

    def show_last(self, at: RowLayout) -> None:
        own = self.bias[:, 0, 0, self.prompt_width :]
        own.index_put_((at.places, at.last), self._zero)
