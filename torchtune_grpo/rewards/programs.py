"""Rewards for whole programs and methods, judged by the inputs and outputs in a data set.

They are judged as functions are: one process runs the completion, as a function from an input to
what it printed or returned; another process holds the expected outputs.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.rewards.code import CodeReward, Exam
from torchtune_grpo.rewards.extraction import extract_program
from torchtune_grpo.sandbox import Verdict

# Runs in the completion's process. A program runs anew for each input; its `input`, `sys.stdin`,
# `open(0)` and `sys.stdout.buffer` work. A method is called on a new Solution. A class gets the
# names of methods and their arguments.
_PROGRAM = """
import contextlib, io, os, sys, tempfile, threading

program = compile({source!r}, "<program>", "exec")
kept = os.dup(0)

def _judged(given):
    os.dup2(kept, 0)  # a program may have closed it, and no other file may take its place
    with tempfile.TemporaryFile() as file:
        file.write(given.encode())
        file.seek(0)
        os.dup2(file.fileno(), 0)
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), open(0, encoding="utf-8", closefd=False) as sys.stdin:
        try:
            exec(program, {{"__name__": "__main__"}})
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"exit {{end.code}}")
        for thread in {{*threading.enumerate()}} - {{threading.current_thread()}}:
            thread.join()
    return printed.buffer.getvalue().decode()
"""
_METHOD = """{source}

def _judged(given):
    called = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
    if isinstance(given, dict):
        return called(**given)
    if not isinstance(called, type):
        return called(*given)
    (_, *names), (arguments, *others) = given
    made = called(*arguments)
    return [None, *(getattr(made, name)(*each) for name, each in zip(names, others))]
"""
# The sites that ask for methods import these.
_IMPORTED = """import bisect, collections, functools, heapq, itertools, math, re, string
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from math import inf
from typing import *
"""
_WHOLE = "<program>"  # in place of a function's name
# Runs in the process that holds the expected outputs.
_TEST = """
import json, math
from decimal import Decimal, InvalidOperation

cases, is_partial = json.loads({cases!r}), {is_partial}

def close(number, wanted):
    return math.isclose(number, wanted, rel_tol=1e-6, abs_tol=1e-9)

def same_words(word, wanted):
    if word == wanted:
        return True
    try:
        number, other = Decimal(word), Decimal(wanted)
    except InvalidOperation:
        return False
    return number == other or ("." in wanted and close(number, other))

def same_text(text, wanted):
    rows = [[line.split() for line in t.split("\\n") if line.strip()] for t in (text, wanted)]
    return [*map(len, rows[0])] == [*map(len, rows[1])] and all(
        same_words(*words) for lines in zip(*rows) for words in zip(*lines))

def same(value, wanted):
    if isinstance(value, (list, tuple)) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        named = {{str(key): each for key, each in value.items()}}
        return named.keys() == wanted.keys() and all(same(named[k], wanted[k]) for k in wanted)
    if isinstance(wanted, float) and isinstance(value, (int, float)):
        return close(value, wanted)
    return value == wanted

def check(candidate):
    global share
    passed = 0
    for number, (given, wanted) in enumerate(cases, 1):
        try:
            got = candidate(given)
            if isinstance(given, str):
                right = isinstance(got, str) and same_text(got, wanted)
            else:
                right = same(got, wanted) or same([got], wanted)
            why = "another output"
        except Exception as error:
            right, why = False, f"{{type(error).__name__}}: {{error}}"
        passed += right
        assert right or is_partial, f"test {{number}} of {{len(cases)}}: {{why}}"
    share = passed / len(cases)
    assert passed == len(cases), f"{{passed}} of {{len(cases)}} tests pass"
"""


class ProgramReward(CodeReward):
    """Reward for the outputs of a program that reads and prints, or of a function or method.

    The column ``tests`` holds inputs and outputs, as JSON or as values: ``{"inputs": [...],
    "outputs": [...]}`` as in APPS and TACO, with ``fn_name`` for a function or a method of
    ``Solution``; ``{"input": [...], "output": [...]}`` as in CodeContests; or a list of pairs or of
    ``{"input": ..., "output": ...}`` as in Codeforces and LiveCodeBench, compressed or not. Where
    ``fn_name`` is a class, an input is a list of method names and a list of their arguments.
    Printed outputs are compared line by line and word by word, numbers by value and decimals to
    within a millionth. The score is 1.0 if all tests pass, else 0.0, and the first failure ends the
    tests. With ``partial``, the score is the share of tests that pass.
    """

    __name__ = "program_reward"
    _tests = "tests"

    def __init__(self, *, partial: bool = False, timeout: float = 5.0, **limits: Any) -> None:
        super().__init__(timeout=timeout, **limits)
        self._options = {"partial": partial}

    def __call__(  # type: ignore[override]  # another column
        self, prompts: list[str], completions: list[str], *, tests: list[Any], **columns: Any
    ) -> list[float | Exception]:
        """Run each completion on its row's inputs, all within ``timeout``."""
        columns |= {"test": tests, "tests": tests}
        return super().__call__(prompts, completions, **columns)

    def score(self, verdict: Verdict | Exception) -> float | Exception:
        score = super().score(verdict)
        if isinstance(verdict, Exception) or isinstance(score, Exception):
            return score
        return (verdict.share or 0.0) if self._options["partial"] else score

    @staticmethod
    def program_of(text: str, exam: Exam) -> tuple[str, str]:
        name = exam.entry_point
        if name == _WHOLE:
            source = extract_program(text, setup=exam.setup, entry_point=None)
            return _PROGRAM.format(source=source), "_judged"
        owner = "Solution" if "class Solution" in text else name
        source = extract_program(text, setup=f"{_IMPORTED}{exam.setup}", entry_point=owner)
        return _METHOD.format(source=source, name=name), "_judged"

    @staticmethod
    def exam(  # type: ignore[override]
        *, tests: Any, fn_name: Any = None, setup: str = "", partial: bool = False, **columns: Any
    ) -> Exam:
        try:
            cases, name = _cases(tests, fn_name)
        except Exception as error:
            raise ValueError(f"tests={shortened(repr(tests))}: {describe(error)}") from error
        test = _TEST.format(cases=json.dumps(cases), is_partial=partial)
        return Exam(test, name or _WHOLE, setup)

    @staticmethod
    def own_program(row: Mapping[str, Any]) -> str:
        program = CodeReward.own_program(row)
        return program if "```" in program else program and f"```\n{program}\n```"


def _cases(tests: Any, name: str | None) -> tuple[list[tuple[Any, Any]], str | None]:
    """Return pairs of input and output, and the function's name if there is one."""
    if isinstance(tests, str):
        tests = json.loads(tests if tests.lstrip()[:1] in ("[", "{") else _decompressed(tests))
    if isinstance(tests, Mapping) and "test_cases" in tests:
        tests = tests["test_cases"]
    if isinstance(tests, Mapping):
        name = _function_name(name) or tests.get("fn_name")
        ends = (tests[key if key in tests else f"{key}s"] for key in ("input", "output"))
        cases = [*zip(*ends, strict=True)]
    elif tests and isinstance(tests[0], Mapping):
        first = tests[0]
        name = _function_name(name) or first.get("fn_name") or _function_name(first.get("metadata"))
        cases = [(test["input"], test["output"]) for test in tests]
    else:
        cases = [(given, wanted) for given, wanted in tests]
    if not cases:
        raise ValueError("there is no test")
    if name is None:
        return [(_text(given), _text(wanted)) for given, wanted in cases], None
    parsed = [
        ([json.loads(line) for line in given.splitlines()], json.loads(wanted))
        if isinstance(given, str)
        else (given, wanted)
        for given, wanted in cases
    ]
    return parsed, name


def _function_name(given: Any) -> str | None:
    """Return a function's name, which may be in LiveCodeBench's ``metadata``, a mapping or JSON."""
    if isinstance(given, str) and given.startswith("{"):
        given = json.loads(given)
    return given.get("func_name") if isinstance(given, Mapping) else given


def _decompressed(tests: str) -> str:
    """Return the JSON in LiveCodeBench's ``private_test_cases``: pickled, deflated, in base 64."""
    return str(_TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(tests)))).load())


class _TextUnpickler(pickle.Unpickler):
    """Unpickler that refuses every class and function, so that nothing runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"a pickle of text has no {module}.{name}")


def _text(lines: Any) -> str:
    """Return an input or output, which may be a list of lines, as text."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))
