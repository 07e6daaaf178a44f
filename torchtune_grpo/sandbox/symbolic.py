"""Comparison of two LaTeX expressions by math-verify, for a process of its own.

math-verify hands text to a parser and then to sympy, which take any time and memory they like for
a tower of powers. Memory is limited here; the process that asks limits the time.
"""

from __future__ import annotations

import logging
import resource

from math_verify import parse, verify

_MAX_MEMORY = 4 * 2**30  # bytes of address space

resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
# It warns that its own timeout is off, each time.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def expressions_equal(given: str, gold: str) -> bool | None:
    """Whether two bare expressions are equal; None if the gold cannot be read."""
    expected = parse(f"${gold}$", parsing_timeout=None)
    if not expected:
        return None
    found = parse(f"${given}$", parsing_timeout=None)
    return bool(found and verify(expected, found, timeout_seconds=None))
