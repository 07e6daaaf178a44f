"""The tests of code that data sets have, each read into the one form that a sandbox runs.

Form                                   Column    Data sets
-------------------------------------  --------  ----------------------------------------------
``check(candidate)``                   ``test``  HumanEval, LeetCodeDataset
a list of assertions                   ``test``  MBPP
``test_...`` functions, a ``TestCase`` ``test``  KodCode, BigCodeBench
{"inputs": [...], "outputs": [...]}    ``tests`` APPS, TACO; CodeContests without the plural
[{"input": ..., "output": ...}, ...]   ``tests`` Codeforces, LiveCodeBench, SYNTHETIC-1
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import io
import json
import pickle
import re
import threading
import zlib
from collections.abc import Mapping
from typing import Any

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.sandbox.exam import Exam

_PARSING = threading.Lock()  # Python 3.11 counts the depth of all threads' trees as one
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(?:\(\)\.[^\W\d]\w*)?")
_REPLACES_INPUT = re.compile(r"builtins\.input\b|\bsys\.stdin\b")
_SOLUTIONS = ("solution", "solutions", "canonical_solution")  # columns with a row's own solution
# The sites that ask for methods import these.
_SITE_IMPORTS = """import bisect, collections, functools, heapq, itertools, math, re, string
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, lru_cache, reduce
from math import inf
from typing import *
"""


def unit_test(*, test: Any, entry_point: Any = None, setup: Any = "", **columns: Any) -> Exam:
    """Read a row whose test is code; raises ValueError if the row is unusable."""
    test, setup = _code("test", test), _code("setup", setup or "")
    called = _tested_names(test)
    name = entry_point or next(iter(called), "")
    if not name:
        raise ValueError(f"test={shortened(test)} calls no function; name it by entry_point")
    if fault := name_fault(entry_point=name):
        raise ValueError(fault)
    return Exam(name, setup, test, tuple(other for other in called if other != name))


def output_test(
    *, tests: object, fn_name: object = None, setup: Any = "", **columns: object
) -> Exam:
    """Read a row whose tests are inputs and outputs; raises ValueError if the row is unusable."""
    setup = _code("setup", setup or "")
    try:
        cases, name = _cases(tests, fn_name)
    except Exception as error:
        raise ValueError(f"tests={shortened(repr(tests))}: {describe(error)}") from error
    return Exam(name or "", f"{_SITE_IMPORTS}{setup}" if name else setup, cases=json.dumps(cases))


def unit_test_fault(exam: Exam) -> str | None:
    """Say what a unit test does that a sandbox cannot judge, if it can be seen."""
    if _REPLACES_INPUT.search(exam.test):
        return "replaces input(), which the completion has in another process: use ProgramReward"
    tested = {exam.entry_point, *exam.others, "candidate"}
    for node in _nodes(exam.test):
        match node:
            case (
                ast.Await(value=called)
                | ast.Call(func=ast.Attribute(attr="run" | "run_until_complete"), args=[called, *_])
            ):
                name = getattr(getattr(called, "func", None), "id", None)
                if name in tested:
                    return f"awaits {name}(), which stays in another process"
    return None


def own_solutions(row: Mapping[str, Any], exam: Exam) -> list[str]:
    """Return a row's own solutions, of which it may have a list (or JSON of one), as completions.

    A program is in a fence, or else what looks like prose would be cut off.
    """
    solutions = next((row[name] for name in _SOLUTIONS if row.get(name)), "")
    with contextlib.suppress(ValueError, TypeError):
        solutions = json.loads(solutions)
    listed = solutions if isinstance(solutions, (list, tuple)) else [solutions]
    texts = [text for text in listed if isinstance(text, str) and text]
    return [f"```\n{t}\n```" if exam.cases and "```" not in t else t for t in texts]


def name_fault(*, entry_point: object = "f") -> str | None:
    """Say what is wrong with the name of a function, if anything."""
    if isinstance(entry_point, str) and _ENTRY_POINT.fullmatch(entry_point):
        return None
    said = shortened(repr(entry_point))
    return f"entry_point={said} is not the name of a function or class, or Solution().method"


def _code(name: str, code: Any) -> str:
    """Return the code of a column, which may be a list of lines."""
    try:
        return code if isinstance(code, str) else "\n".join(code)
    except TypeError:
        raise ValueError(f"{name}={shortened(repr(code))} is not text") from None


def _nodes(test: str) -> list[ast.AST]:
    try:
        with _PARSING:
            tree = ast.parse(test)
    except (SyntaxError, ValueError):
        return []
    return [*ast.walk(tree)]


def _tested_names(test: str) -> list[str]:
    """Return the names that a test imports from ``solution``, or else those that it calls and that
    are neither Python's nor its own."""
    known, called = {*vars(builtins)}, []
    for node in _nodes(test):
        match node:
            case ast.ImportFrom(module="solution", names=names) if names[0].name != "*":
                return [alias.name for alias in names]
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {alias.asname or alias.name for alias in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                known.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                known.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                known.add(name)
            case ast.Call(func=ast.Name(id=name)):
                called.append(name)
    return [*dict.fromkeys(name for name in called if name not in known)]


def _cases(tests: Any, name: Any) -> tuple[list[tuple[Any, Any]], str | None]:
    """Return pairs of input and output, and the function's name if there is one."""
    if isinstance(tests, str):
        tests = json.loads(tests if tests.lstrip()[:1] in ("[", "{") else _decompressed(tests))
    if isinstance(tests, Mapping) and "test_cases" in tests:
        tests = tests["test_cases"]
    name, given = _function_name(name), tests
    if isinstance(tests, Mapping):
        ends = (tests[key if key in tests else f"{key}s"] for key in ("input", "output"))
        cases = [*zip(*ends, strict=True)]
    elif tests and isinstance(tests[0], Mapping):
        given = tests[0]
        cases = [(test["input"], test["output"]) for test in tests]
    else:
        given, cases = {}, [(given, wanted) for given, wanted in tests]
    if not cases:
        raise ValueError("there is no test")
    name = name or given.get("fn_name") or _function_name(given.get("metadata"))
    if name is None:
        return [(_text(given), _text(wanted)) for given, wanted in cases], None
    return [_arguments(given, wanted) for given, wanted in cases], name


def _arguments(given: Any, wanted: Any) -> tuple[Any, Any]:
    """Return a call's arguments and result, which may be text: JSON, one argument a line."""
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines()], json.loads(wanted)
    return given, wanted


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

    def find_class(self, module: str, name: str) -> object:
        raise ValueError(f"a pickle of text has no {module}.{name}")


def _text(lines: Any) -> str:
    """Return an input or output, which may be a list of lines, as text."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))
