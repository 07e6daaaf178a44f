"""Whether two LaTeX expressions are the same, by math-verify; for a process of its own.

math-verify hands text to a parser and then to sympy, which take any time and memory they like for
a tower of powers. Here they have a limit on memory, and the process that asks has the clock.
"""

from __future__ import annotations

import logging
import resource

from math_verify import parse, verify

_MAX_MEMORY = 4 * 2**30  # bytes of address space

resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
# It warns that its own timeout is off, each time.
logging.getLogger("math_verify").setLevel(logging.ERROR)

UNREADABLE_GOLD = -1.0


def expressions_equal(given: str, gold: str) -> float:
    """1.0 if two bare expressions are equal, else 0.0; UNREADABLE_GOLD if there is no gold."""
    expected = parse(f"${gold}$", parsing_timeout=None)
    if not expected:
        return UNREADABLE_GOLD
    found = parse(f"${given}$", parsing_timeout=None)
    return float(bool(found) and bool(verify(expected, found, timeout_seconds=None)))
