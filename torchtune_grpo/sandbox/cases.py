"""Cases of input and output: what runs a completion on one, and what compares the outputs."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

# --- In the completion's process ------------------------------------------------------------------


class Program:
    """A program as a function from its standard input to what it prints.

    It runs anew for each input; its ``input``, ``sys.stdin``, ``open(0)`` and ``sys.stdout.buffer``
    work.
    """

    def __init__(self, source: str) -> None:
        self._code = compile(source, "<program>", "exec")
        self._stdin = os.dup(0)

    def __call__(self, given: str) -> str:
        os.dup2(self._stdin, 0)  # the last run may have closed it, and a file must not become 0
        with tempfile.TemporaryFile() as file:
            file.write(given.encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
        printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        with sys.stdin, contextlib.redirect_stdout(printed):
            try:
                exec(self._code, {"__name__": "__main__"})
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise RuntimeError(f"exit {end.code}") from None
            for thread in {*threading.enumerate()} - {threading.current_thread()}:
                thread.join()
        return printed.buffer.getvalue().decode()


def run_case(names: dict[str, Any], name: str, given: Any) -> Any:
    """Call a function, a method of a new ``Solution``, or methods of a new object of a class.

    For a class, ``given`` holds the names of methods and their arguments.
    """
    called = getattr(names["Solution"](), name) if "Solution" in names else eval(name, names)
    if isinstance(given, dict):
        return called(**given)
    if not isinstance(called, type):
        return called(*given)
    (_, *methods), (arguments, *others) = given
    made = called(*arguments)
    return [None, *(getattr(made, name)(*each) for name, each in zip(methods, others))]


# --- In the test's process ------------------------------------------------------------------------


def run_cases(
    function: Callable[[object], object], cases: Sequence[Sequence[object]], *, partial: bool
) -> tuple[float, str]:
    """Return the share of cases that pass, and why not all do; up to the first that fails, or all
    if ``partial``."""
    passed = 0
    for number, (given, wanted) in enumerate(cases, 1):
        why = _why_wrong(function, given, wanted)
        if why and not partial:
            return passed / len(cases), f"test {number} of {len(cases)}: {why}"
        passed += not why
    share = passed / len(cases)
    return share, "" if share == 1 else f"{passed} of {len(cases)} tests pass"


def _why_wrong(function: Callable[[Any], Any], given: Any, wanted: Any) -> str:
    try:
        got = function(given)
        if isinstance(given, str):
            right = isinstance(got, str) and _same_text(got, wanted)
        else:
            right = _same(got, wanted) or _same([got], wanted)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if right else "another output"


def _same_text(text: str, wanted: str) -> bool:
    """Compare the words of lines that are not blank."""
    rows, wanted_rows = (
        [line.split() for line in each.split("\n") if line.strip()] for each in (text, wanted)
    )
    return [*map(len, rows)] == [*map(len, wanted_rows)] and all(
        _same_word(*words) for lines in zip(rows, wanted_rows) for words in zip(*lines)
    )


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    try:
        number, other = Decimal(word), Decimal(wanted)
    except InvalidOperation:
        return False
    return number == other or ("." in wanted and _close(number, other))


def _same(value: object, wanted: object) -> bool:
    """Compare a returned value with one from JSON."""
    if isinstance(value, (list, tuple)) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        named = {str(key): each for key, each in value.items()}
        return named.keys() == wanted.keys() and all(_same(named[k], wanted[k]) for k in wanted)
    if isinstance(wanted, float) and isinstance(value, (int, float)):
        return _close(value, wanted)
    return bool(value == wanted)


def _close(number: Any, wanted: Any) -> bool:
    return math.isclose(number, wanted, rel_tol=1e-6, abs_tol=1e-9)
