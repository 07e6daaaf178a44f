"""Other packages' graders, as worker processes run them: this file alone, so without torch."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import cache

from torchtune_grpo.sandbox.syscalls import set_limits

_UNREAD = re.compile(r"'|\\prime(?![a-z])|\\[lcdv]?dots(?![a-z])|\.\.\.|…")


def expression_comparer() -> Callable[[str, str], bool | None]:
    """Make a function that asks math-verify whether two bare LaTeX expressions are equal. It
    returns None if math-verify cannot read the second one, the gold.

    math-verify may read a part of an expression and drop the rest. So one whose value does not grow
    by 7919 when ``7919 +`` is put before it has not been read. Primes and dots, which it always
    drops, are only compared as text.

    For a tower of powers, sympy takes unlimited time and memory; the caller limits the time.
    """
    from math_verify import parse, verify
    from sympy import Expr, simplify  # type: ignore[import-untyped]

    set_limits({"AS": 4 * 2**30})
    # Each time, it warns that its own timeout is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def is_read_whole(text: str, value: object) -> bool:
        if not isinstance(value, Expr) or value.is_infinite:
            return True
        more = parse(f"$7919 + {text}$", parsing_timeout=None)
        is_expression = bool(more) and isinstance(more[0], Expr)
        return is_expression and simplify(more[0] - value - 7919) == 0

    def equal(given: str, gold: str) -> bool | None:
        if "".join(given.split()) == "".join(gold.split()):
            return True
        if _UNREAD.search(f"{given} {gold}"):
            return False
        expected, found = (parse(f"${text}$", parsing_timeout=None) for text in (gold, given))
        if not expected:
            return None
        is_equal = bool(found) and verify(expected, found, timeout_seconds=None)
        return is_equal and is_read_whole(gold, expected[0]) and is_read_whole(given, found[0])

    return equal


def task_scorer() -> Callable[[str, dict[str, object]], float]:
    """Make a function that scores an answer to an entry of ``reasoning_gym_dataset``."""
    from reasoning_gym import create_dataset

    made = cache(lambda task, settings: create_dataset(task, **json.loads(settings)))
    return lambda answer, entry: made(entry["task"], entry["settings"]).score_answer(answer, entry)
