"""Where the live rows of a rollout are, as tensors that a decoding step reads."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from torchtune_grpo.rollout._linear import FEW_ROWS


def padded_rows(rows: int) -> int:
    """Rows of a decoding step, those included that are nobody's.

    Matrix libraries waste what is missing to a multiple of eight. With many rows the steps are
    larger, so that few shapes occur.
    """
    if rows <= FEW_ROWS:
        return FEW_ROWS if rows else 0
    multiple = max(8, 1 << (rows.bit_length() - 3))
    return -(-rows // multiple) * multiple


class RowLayout:
    """The live rows, padded with rows that are nobody's; n of them.

    Its tensors stay at the same addresses, whatever rows they describe.

    Args:
        max_rows (int): most live rows.
        slots (int): most prompts in the cache.
        group_size (int): most rows of a prompt.
        nobody (int): the number of a row that is nobody's.
        fixed_grid (bool): lay the grid out for all slots and whole groups at all times, so that n
            is all that its shape depends on.
        device (torch.device): of the rollout.

    Attributes:
        rows (Tensor): [n] each row's number.
        slots (Tensor): [n] where its prompt lies in the cache.
        columns (Tensor): [n] its place among the rows of its prompt.
        counts (Tensor): [n] its sampled tokens.
        is_live (Tensor): [n] 1, or 0 for nobody's.
        grid (Tensor | None): [used_slots * group_width] the row in each place of all slots, any
            row in an empty place; None where the rows are the grid, place for place.
        used_slots (int): slots in the grid.
        group_width (int): rows of a slot in the grid, some of which may be empty.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        slots: int,
        group_size: int,
        nobody: int,
        fixed_grid: bool,
        device: torch.device,
    ) -> None:
        self.used_slots, self.group_width = slots, group_size
        self.max_places = padded_rows(max_rows)
        self._fixed_grid = fixed_grid
        self._nobody = nobody
        self._places = torch.zeros(5, self.max_places, dtype=torch.long, device=device)
        self._grid = torch.zeros(slots * group_size, dtype=torch.long, device=device)
        self.update(rows=[], slots=[], counts=[])

    def update(self, *, rows: list[int], slots: list[int], counts: list[int]) -> None:
        """Describes other live rows.

        Args:
            rows (list[int]): their numbers, in the order of their places in the cache.
            slots (list[int]): where their prompts lie.
            counts (list[int]): their sampled tokens.
        """
        rows_of: Counter[int] = Counter()
        columns = []
        for slot in slots:
            columns.append(rows_of[slot])
            rows_of[slot] += 1
        if not self._fixed_grid:
            self.used_slots = max(slots, default=-1) + 1
            self.group_width = max(rows_of.values(), default=0)
        n = padded_rows(len(rows))
        pad = n - len(rows)
        described = [
            rows + [self._nobody] * pad,
            slots + [0] * pad,
            columns + [0] * pad,
            counts + [1] * pad,
            [1] * len(rows) + [0] * pad,
        ]
        self._places[:, :n] = torch.tensor(described, dtype=torch.long).to(self._places.device)
        self.rows, self.slots, self.columns, self.counts, self.is_live = self._places[:, :n]

        grid = [0] * (self.used_slots * self.group_width)
        for index, (slot, column) in enumerate(zip(slots, columns, strict=True)):
            grid[slot * self.group_width + column] = index
        self.grid: Tensor | None = None
        if self._fixed_grid or grid != list(range(n)):
            self.grid = self._grid[: len(grid)]
            self.grid.copy_(torch.tensor(grid, dtype=torch.long))

    def advance(self, places: Tensor | slice) -> None:
        """Counts one more token of the live rows in some places."""
        self.counts[places] += self.is_live[places]
