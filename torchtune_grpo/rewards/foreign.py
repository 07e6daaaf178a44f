"""Other packages' graders, as worker processes run them: this file alone, so without torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torchtune_grpo.sandbox.syscalls import set_limits


def expression_comparer() -> Callable[[str, str], bool | None]:
    """Make a function by which math-verify says whether two bare LaTeX expressions are equal. It
    returns None if the second one, the gold, cannot be read.

    For a tower of powers, sympy takes unlimited time and memory; the caller limits the time.
    """
    from math_verify import parse, verify

    set_limits({"AS": 4 * 2**30})
    # Each time, it warns that its own timeout is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def equal(given: str, gold: str) -> bool | None:
        expected = parse(f"${gold}$", parsing_timeout=None)
        if not expected:
            return None
        found = parse(f"${given}$", parsing_timeout=None)
        return bool(found and verify(expected, found, timeout_seconds=None))

    return equal


def task_scorer() -> Callable[[str, dict[str, Any]], float]:
    """Make a function that scores an answer to an entry of ``reasoning_gym_dataset``."""
    from reasoning_gym import create_dataset

    made = cache(lambda task, settings: create_dataset(task, **json.loads(settings)))
    return lambda answer, entry: made(entry["task"], entry["settings"]).score_answer(answer, entry)
