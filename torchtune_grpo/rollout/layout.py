"""Where the live rows of a rollout are, as tensors that a decoding step reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchtune_grpo.rollout.buffers import Buffers
from torchtune_grpo.rollout.linear import FEW_ROWS
from torchtune_grpo.trajectory import length_mask


def padded_rows(rows: int, *, few_shapes: bool = False) -> int:
    """Rows of a decoding step, those included that are nobody's.

    Matrix libraries waste what is missing to a multiple of eight. With many rows the steps are
    larger, and with ``few_shapes`` larger still, so that few shapes occur.
    """
    if rows <= FEW_ROWS:
        return FEW_ROWS if rows else 0
    if few_shapes:
        return coarse(rows, least=8)
    multiple = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // multiple) * multiple


def coarse(count: int, *, least: int) -> int:
    """The smallest of ``least`` * (1, 2, 3, 4, 6, 8, 12, 16, 24, ...) that is no less."""
    blocks = -(-count // least)
    power = 1 << (blocks - 1).bit_length()
    return least * (power * 3 // 4 if 4 * blocks <= 3 * power > 6 else power)


class RowLayout:
    """The live rows, padded with rows that are nobody's; n of them.

    Its tensors are at the same addresses whenever n, the slots and the widths are the same,
    whatever rows they describe.

    Args:
        buffers (Buffers): where the tensors lie.
        kv_heads (int): of the model.
        slots (int): most prompts in the cache.
        group_size (int): most rows of a prompt.
        nobody (int): the number of a row that is nobody's.
        few_shapes (bool): round n up further, and lay the grid out for all slots and whole groups
            at all times, so that n is all that its shape depends on.
        dtype (torch.dtype): of the attention's scores.

    Attributes:
        rows (Tensor): [n] each row's number.
        last (Tensor): [n] the place of its last token among its sampled ones.
        positions (Tensor): [n] the position of that token, prompt included.
        places (Tensor): [n] 0, 1, ..., n - 1.
        used_slots (int): slots in the grid.
        group_width (int): rows of a slot in the grid, some of which may be empty.
        gather (tuple[Tensor, Tensor]): row and kv head of each cell of the grid, [used_slots,
            kv_heads, group_width] of them, and behind those of each row, [n, kv_heads].
        gather_grid (tuple[Tensor, Tensor]): those of the grid alone.
        cells (int): how many these are.
        scatter (Tensor): [n * kv_heads] the cell of the grid that each row's heads are in.
        bias (Tensor): [n, 1, 1, prompt_width + width] 0 or -inf: the prompt, then the response.
        prompt_width (int): columns of the bias that are the prompt's.
        width (int): columns of the bias that are the response's.
    """

    def __init__(
        self,
        buffers: Buffers,
        *,
        kv_heads: int,
        slots: int,
        group_size: int,
        nobody: int,
        few_shapes: bool,
        dtype: torch.dtype,
    ) -> None:
        self._buffers = buffers
        self._kv_heads = kv_heads
        self._few_shapes = few_shapes
        self._nobody = nobody
        self._dtype = dtype
        self._zero = buffers.take("zero", (), dtype=dtype)
        self.used_slots, self.group_width = slots, group_size
        self.prompt_width = self.width = 0

    def reserve(self, places: int, *, columns: int) -> None:
        """Makes room for n = ``places`` and a bias of so many columns."""
        cells = self.used_slots * self._kv_heads * self.group_width
        heads = places * self._kv_heads
        for name, size in (
            ("rows", 6 * places),
            ("gather", 2 * (cells + heads)),
            ("scatter", heads),
        ):
            self._buffers.take(name, (size,), dtype=torch.long)
        self._buffers.take("bias", (places * columns,), dtype=self._dtype)

    def update(
        self,
        *,
        rows: Sequence[int],
        slots: Sequence[int],
        counts: Sequence[int],
        prompt_lengths: Sequence[int],
    ) -> None:
        """Describes other live rows.

        Args:
            rows (Sequence[int]): their numbers, in the order of their places in the cache.
            slots (Sequence[int]): where their prompts lie.
            counts (Sequence[int]): their sampled tokens.
            prompt_lengths (Sequence[int]): of their prompts.
        """
        rows_of = dict.fromkeys(slots, 0)
        columns = []
        for slot in slots:
            columns.append(rows_of[slot])
            rows_of[slot] += 1
        if not self._few_shapes:
            self.used_slots = max(slots, default=-1) + 1
            self.group_width = max(rows_of.values(), default=0)
        n = padded_rows(len(rows), few_shapes=self._few_shapes)
        pad = n - len(rows)
        described = torch.tensor(
            [
                [*rows, *[self._nobody] * pad],
                [*[count - 1 for count in counts], *[0] * pad],
                [*[p + c - 1 for p, c in zip(prompt_lengths, counts, strict=True)], *[0] * pad],
                [*[1] * len(rows), *[0] * pad],
                [*prompt_lengths, *[0] * pad],
                list(range(n)),
            ]
        )
        held = self._buffers.take("rows", described.shape, dtype=torch.long)
        held.copy_(described)
        self.rows, self.last, self.positions, self._is_live, self._prompt_lengths, self.places = (
            held
        )
        self._moving = held[1:3]

        heads = torch.arange(self._kv_heads)
        grid = torch.zeros(self.used_slots, 1, self.group_width, dtype=torch.long)
        at = torch.tensor([[*slots, *[0] * pad], [*columns, *[0] * pad]])
        grid[at[0, : len(rows)], 0, at[1, : len(rows)]] = torch.arange(len(rows))
        shape = (self.used_slots, self._kv_heads, self.group_width)
        of_grid = torch.stack(
            [grid.expand(shape).flatten(), heads[:, None].expand(shape).flatten()]
        )
        of_rows = torch.stack([torch.arange(n).repeat_interleave(len(heads)), heads.repeat(n)])
        cell = (at[0][:, None] * len(heads) + heads) * self.group_width + at[1][:, None]
        self.cells = of_grid.shape[1]
        index = torch.cat([of_grid, of_rows], dim=1)
        gather = self._buffers.take("gather", index.shape, dtype=torch.long)
        gather.copy_(index)
        self.gather = (gather[0], gather[1])
        self.gather_grid = (gather[0, : self.cells], gather[1, : self.cells])
        self.scatter = self._buffers.take("scatter", (cell.numel(),), dtype=torch.long)
        self.scatter.copy_(cell.flatten())
        self.prompt_width = self.width = 0  # the bias is another one

    def show(self, *, prompt_width: int, width: int) -> None:
        """Makes the bias for some widths, if it is not there; its rows go on by themselves."""
        if (prompt_width, width) == (self.prompt_width, self.width):
            return
        self.prompt_width, self.width = prompt_width, width
        visible = torch.cat(
            [length_mask(self._prompt_lengths, prompt_width), length_mask(self.last + 1, width)],
            dim=1,
        )  # [n, P + C]
        shape = (len(self.rows), 1, 1, prompt_width + width)
        self.bias = self._buffers.take("bias", shape, dtype=self._dtype)
        self.bias.zero_().masked_fill_(~visible[:, None, None], -torch.inf)

    def show_last(self) -> None:
        """Lets every row see its last token."""
        own = self.bias[:, 0, 0, self.prompt_width :]
        own.index_put_((self.places, self.last), self._zero)

    def advance(self, places: Tensor | None = None) -> None:
        """Counts one more token of the live rows, of those in some places or of all."""
        if places is None:
            self._moving += self._is_live
        else:
            self._moving[:, places] += self._is_live[places]
