"""Rows that cannot be used: what is wrong with them, counted."""

from __future__ import annotations

from torchtune_grpo.config.text import shortened


class BadRow(ValueError):
    """A row that cannot be used.

    Args:
        kind (str): what is wrong, as in "2 rows <kind>"; the same for all such rows.
        detail (str): what is wrong with this one.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


class LeftOut:
    """What is wrong with the rows that are left out; as text, how many there are of each kind."""

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._details: dict[str, str] = {}

    def add(self, number: int, fault: BadRow) -> None:
        """Counts a row by its number."""
        self._rows.setdefault(fault.kind, []).append(number)
        self._details.setdefault(fault.kind, fault.detail)

    def count(self, kind: str | None = None) -> int:
        """How many rows there are, of one kind or of all."""
        return sum(len(rows) for name, rows in self._rows.items() if kind in (None, name))

    def __str__(self) -> str:
        told = []
        for kind, rows in self._rows.items():
            detail = self._details[kind]
            first = f"row {rows[0]}" if len(rows) == 1 else f"first row {rows[0]}"
            first += f": {shortened(detail, 200)}" if detail else ""
            told.append(f"{len(rows)} {kind} ({first})")
        return "; ".join(told)
