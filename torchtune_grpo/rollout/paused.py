"""Rows that pause between two turns, until their replies are due."""

from __future__ import annotations

from collections.abc import Sequence

from torchtune_grpo.rollout.cache import Row
from torchtune_grpo.rollout.request import Turns

LIVE_PER_ANSWERED = 8  # a pass over the tokens of one reply costs about as much as a step


class PausedRows:
    """The rows of a rollout between two turns, by number, and the replies that have come.

    A reply is due ``steps`` decoding steps after its turn's end, or when nothing else can be
    sampled. Then the rollout waits for it, so that which rows are sampled side by side depends on
    tokens alone. With None a reply is taken whenever it comes.
    """

    steps: int | None = None

    def __init__(self, turns: Turns | None) -> None:
        self.turns = turns
        self.rows: dict[int, Row] = {}
        self._due: dict[int, int] = {}  # by number, in steps
        self._replies: dict[int, Sequence[int]] = {}
        self._awaited: list[int] = []

    def add(self, row: Row, *, now: int) -> None:
        """Pause a row whose turn has ended, ``now`` steps after the rollout's beginning."""
        assert self.turns is not None
        self.rows[row.number], self._due[row.number] = row, now + (self.steps or 0)
        self.turns.end_turn(row.number, row.response, sampled=row.count - row.given)

    def answered(self, *, now: int, live: int, is_idle: bool) -> dict[int, Sequence[int]] | None:
        """Return the replies with which rows go on or end now, by the rows' numbers, in order.

        None: one that is due has not come, and the rollout has to ask again. Rows go on once they
        are an eighth as many as the ``live`` ones.
        """
        due = self._awaited or [n for n in sorted(self.rows) if is_idle or self._due[n] <= now]
        waits = self.steps is not None
        if not due or self.turns is None or (waits and len(due) * LIVE_PER_ANSWERED < live):
            return {}
        if any(n not in self._replies for n in due):
            self._replies |= self.turns.replies(wait=is_idle or waits)
        come = {n: self._replies[n] for n in due if n in self._replies}
        self._awaited = due if waits and len(come) < len(due) else []
        if self._awaited:  # no others are, until these have come
            return None
        going = sum(len(reply) > 0 for reply in come.values())
        are_enough = going * LIVE_PER_ANSWERED >= live
        return {n: reply for n, reply in come.items() if are_enough or not reply}

    def pop(self, number: int) -> Row:
        """Return a row that goes on or ends, with its reply at the end of its response."""
        row = self.rows.pop(number)
        row.response = [*row.response, *self._replies.pop(number)]
        return row
