"""The exam that judges a completion, and its verdict."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Exam(NamedTuple):
    """A test of a completion, which never sees it."""

    entry_point: str  # function, class or ``Solution().method``; "" for a whole program
    setup: str = ""  # code that precedes both completion and test: the prompt's imports and helpers
    test: str = ""  # code that defines ``check(candidate)``, or calls the function by its name
    others: tuple[str, ...] = ()  # further names that the test calls, if they are the completion's
    cases: str = ""  # in place of a test: pairs of input and output, as JSON
    partial: bool = False  # run all cases, not only up to the first that fails


class Kind(StrEnum):
    """What came of a test."""

    PASSED = "passed"
    WRONG = "wrong"
    EXCEPTION = "exception"  # that the completion raised
    SYNTAX = "syntax"
    TIMEOUT = "timeout"
    CRASH = "crash"
    REFUSED = "refused"  # something that the sandbox does not judge or allow
    BROKEN_TEST = "broken_test"  # the test failed by itself: that says nothing about the completion


class Verdict(NamedTuple):
    """A test's result for a completion."""

    kind: Kind
    why: str = ""  # reason why it did not pass
    questions: int = 0  # of the test to the completion: calls, and looks at its names
    share: float | None = None  # of an exam's cases, how many pass

    @property
    def passed(self) -> bool:
        return self.kind == Kind.PASSED

    @property
    def test_failed(self) -> bool:
        return self.kind == Kind.BROKEN_TEST
