"""A calculator within a GSM8K answer: ``calc[12 * 8]`` is followed by `` = 96``.

It takes ``form: inline`` and the stop string ``]``. Whether the final answer is right is for the
run's reward to say; the calculator only calculates.
"""

from __future__ import annotations

import re

_CALL = re.compile(r"calc\[((?!.*(?:\*\*|//))[-+*/(). 0-9]{1,60})\]\Z")


class Calculator:
    """Answers calls; a malformed one, or a division by zero, is answered by ``= ?``."""

    def reset(self, **row: object) -> None:
        """Begin a question: nothing is kept between calls."""

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return what follows the policy's text, no reward, and whether the text is over."""
        if not text.endswith("]"):
            return None, 0.0, True
        call = _CALL.search(text)
        try:
            value = eval(call[1], {"__builtins__": {}}) if call else None  # only numbers and signs
        except (ArithmeticError, SyntaxError, TypeError):
            value = None
        return " = ?" if value is None else f" = {value:.10g}", 0.0, False
