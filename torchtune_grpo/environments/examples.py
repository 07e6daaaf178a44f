"""Environments of the shipped configs; docs/environments.md shows how to write one."""

from __future__ import annotations

import re


class Calculator:
    """A calculator within the policy's own message: ``calc(123 * 456)`` is followed by its value.

    It takes ``form: inline``, and ``)`` as a stop string. The reward is 1 if the last number of the
    message is the row's ``answer``.
    """

    def reset(self, answer: str, **row: object) -> None:
        self._answer, self._text = answer, ""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        if not text.endswith(")"):
            numbers = re.findall(r"\d+", text)
            return None, float(numbers[-1:] == [self._answer]), True
        call = re.search(r"calc\((\d{1,9}) \* (\d{1,9})\)\Z", text)
        return (f" = {int(call[1]) * int(call[2])}." if call else " = ?"), 0.0, False


class GuessNumber:
    """A game: guess the row's ``answer``, told each time whether it is higher or lower.

    ``reply`` is what it is told, with the word in place of ``{}``. The reward is 1, less ``cost``
    for each guess before the right one.
    """

    def __init__(self, cost: float = 0.1, reply: str = "{}") -> None:
        self._cost, self._told = cost, reply

    def reset(self, answer: str, **row: object) -> None:
        self._answer, self._reward = int(answer), 1.0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        found = re.search(r"\d{1,9}", text)
        if found is None:
            return None, 0.0, True
        guess = int(found[0])
        if guess == self._answer:
            return None, max(self._reward, self._cost), True
        self._reward -= self._cost
        return self._told.format("higher" if guess < self._answer else "lower"), 0.0, False
