"""Rewards for code: a completion's function has to pass a unit test in a sandbox.

The test and its expected values are never in the process that runs the completion. They are in
a second process, where a stand-in for the function asks the first process for each answer; only
plain data crosses. docs/reward_hacking.md says what that is good for.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torchtune.utils import get_logger

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.extraction import code_blocks, definition_of, extract_program
from torchtune_grpo.rewards.reward import declares
from torchtune_grpo.rewards.workers import MAX_WORKERS, WorkerPool, default_workers
from torchtune_grpo.sandbox import CodeSandbox, Limits, SandboxError, Verdict

log = get_logger("INFO")

_LONGEST = 100_000  # characters in a completion
_FAILURE_KINDS = ("wrong", "exception", "syntax", "timeout", "crash", "refused")
# Names of failures in which the sandbox, or a stand-in for an object, refused something.
_REFUSALS = ("refused", "NotPlain", "PermissionError", "FileNotFoundError", "ModuleNotFoundError")
_SOLUTIONS = ("solution", "solutions", "canonical_solution")  # columns with a row's own solution
_MAX_TRIED = 500  # rows, which take five seconds
_RAISES = "def {}(*_, **__): raise Exception('always')"
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(?:\(\)\.[^\W\d]\w*)?")


class Exam(NamedTuple):
    """A row's test, the function that it calls, and the code that precedes test and completion."""

    test: str
    entry_point: str
    setup: str


def _name_fault(*, entry_point: object = "f") -> str | None:
    if isinstance(entry_point, str) and _ENTRY_POINT.fullmatch(entry_point):
        return None
    said = shortened(repr(entry_point))
    return f"entry_point={said} is not the name of a function or class, or Solution().method"


@declares(reward_range=(0.0, 1.0), check_row=_name_fault)
def code_format_reward(
    prompts: list[str],
    completions: list[str],
    *,
    entry_point: list[str] | None = None,
    **columns: list[Any],
) -> list[float]:
    """Score 1.0 for exactly one fenced Python block that defines the function named in the column
    ``entry_point``, if there is such a column, whatever the function computes; else score 0.0."""
    scores = []
    for text, name in zip(completions, entry_point or [""] * len(completions), strict=True):
        blocks = code_blocks(text)
        is_one = len(blocks) == 1 and blocks[0].closed
        defines = not name or bool(blocks and definition_of(name).search(blocks[0].code))
        scores.append(float(is_one and defines))
    return scores


class CodeReward:
    """Reward of 1.0 for a function that passes its unit test, and of 0.0 otherwise."""

    __name__ = "code_reward"
    decides = True
    _tests = "test"  # the column that holds the tests
    _options: Mapping[str, Any] = {}  # further arguments of exam

    def __init__(
        self,
        *,
        timeout: float = 1.0,  # seconds for one completion and its test
        workers: int | None = None,  # completions at once; None: two per core, at most 16
        memory_mb: int = 512,  # for all processes of a completion together
        processes: int = 16,  # per completion at once, threads included
        packages: Sequence[str] = (),  # packages that completions and tests can import
        unfenced: bool = False,  # as in CodeSandbox
    ) -> None:
        workers = default_workers() if workers is None else workers
        numbers = dict(timeout=timeout, workers=workers, memory_mb=memory_mb, processes=processes)
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"rewards: {name} is {value!r}; give a number above 0.")
        if workers > MAX_WORKERS:
            raise ValueError(f"rewards: workers is {workers}; give at most {MAX_WORKERS}.")
        limits = Limits(seconds=timeout, megabytes=memory_mb, processes=processes)
        folders = [_folder_of(package) for package in packages]
        self._sandboxes = [CodeSandbox(limits, folders, unfenced=unfenced) for _ in range(workers)]
        self._pool = WorkerPool(self._sandboxes)
        self._logged = False

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        test: list[Any],
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | Exception]:
        """Run each completion's test; report why each failed, and the share of each kind.

        A test is code, as text or a list of lines. It defines ``check(candidate)`` as in HumanEval,
        ``test_...`` functions or a ``unittest.TestCase``, or calls the function by name as in MBPP.
        The column ``entry_point`` holds that name, by default the first one that the test calls; it
        may also be a class or ``Solution().method``. The column ``setup`` holds code that precedes
        both completion and test: the prompt's imports and helpers. Where the sandbox or the test
        itself failed, the score is an exception. Raises a SandboxError if this machine cannot have
        a sandbox.
        """
        verdicts = self.judge(completions, test=test, **columns)
        if log_extra is not None:
            log_extra("why", [str(v) if isinstance(v, Exception) else v.why for v in verdicts])
        scores = list(map(self.score, verdicts))
        if log_metric is not None:
            why = [v.why for v in verdicts if isinstance(v, Verdict) and not v.test_failed]
            kinds = Counter(map(failure_kind, filter(None, why)))
            for kind in _FAILURE_KINDS:
                log_metric(kind, kinds[kind] / max(len(why), 1))
        return scores

    @classmethod
    def check_row(cls, **row: Any) -> str | None:
        """Return what makes a row unusable, or None; run nothing."""
        try:
            cls.exam(**row)
        except ValueError as error:
            return str(error)
        return None

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str | None]:
        """Find broken tests by running them: a test must call a function that raises in every call
        and must fail it, and the row's own solution, if there is one, must pass.

        At most 500 rows are tried, always the same ones. Returns the position of each tried row,
        mapped to what is wrong with it, or to None.
        """
        count = min(len(rows), _MAX_TRIED)
        tried = sorted(random.Random(0).sample(range(len(rows)), count))
        log.info(f"Code rewards: trying the tests of {count} of {len(rows)} rows.")
        exams = {n: self.exam(**rows[n], **self._options) for n in tried}
        raising = {n: _always_raising(exam.entry_point) for n, exam in exams.items()}
        solving = {n: program for n in tried if (program := self.own_program(rows[n]))}
        failed, solved = self._tried(raising, exams), self._tried(solving, exams)
        faults = {n: _trial_fault(failed[n], solved.get(n)) for n in tried}
        tests = {n: shortened(repr(rows[n][self._tests])) for n in tried}
        return {n: fault and f"{self._tests}={tests[n]}: {fault}" for n, fault in faults.items()}

    def _tried(self, programs: dict[int, str], exams: dict[int, Exam]) -> dict[int, Verdict]:
        judged: list[Any] = self._judge_all(programs.values(), [exams[n] for n in programs])
        for verdict in judged:
            if isinstance(verdict, Exception):
                raise verdict
        return dict(zip(programs, judged, strict=True))

    def judge(
        self, completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[Verdict | Exception]:
        """Return verdicts in place of scores. Equal programs with equal tests run once."""
        lists = {name: each for name, each in columns.items() if isinstance(each, (list, tuple))}
        rows = [dict(zip(lists, row)) for row in zip(*lists.values(), strict=True)]
        return self._judge_all(completions, [self.exam(**row, **self._options) for row in rows])

    def _judge_all(
        self, completions: Iterable[str], exams: Iterable[Exam]
    ) -> list[Verdict | Exception]:
        jobs = list(zip(completions, exams, strict=True))
        distinct = list(dict.fromkeys(jobs))
        if not self._logged:
            log.info(f"Code rewards: {self._sandboxes[0].confinement()}")
            self._logged = True
        judged = dict(zip(distinct, self._pool.map(self._judge, distinct), strict=True))
        return [judged[job] for job in jobs]

    def close(self) -> None:
        """End the sandboxes' processes; a later call starts new ones."""
        self._pool.close()

    def score(self, verdict: Verdict | Exception) -> float | Exception:
        if isinstance(verdict, Exception):
            return verdict
        return SandboxError(verdict.why) if verdict.test_failed else float(verdict.passed)

    @staticmethod
    def exam(*, test: Any, entry_point: Any = None, setup: Any = "", **columns: Any) -> Exam:
        """Return a row's exam; raises ValueError if the row is unusable."""
        test, setup = _text("test", test), _text("setup", setup)
        name = entry_point or _tested_name(test)
        if not name:
            raise ValueError(f"test={shortened(test)} calls no function; name it by entry_point")
        if fault := _name_fault(entry_point=name):
            raise ValueError(fault)
        return Exam(test, name, setup)

    @staticmethod
    def own_program(row: Mapping[str, Any]) -> str:
        """Return a row's own solution, the first if it has a list (or JSON of one), or ""."""
        solutions = next((row[name] for name in _SOLUTIONS if row.get(name)), "")
        with contextlib.suppress(ValueError, TypeError):
            solutions = json.loads(solutions)
        first = next(iter(solutions), "") if isinstance(solutions, (list, tuple)) else solutions
        return first if isinstance(first, str) else ""

    @staticmethod
    def program_of(text: str, exam: Exam) -> tuple[str, str]:
        """Return the program to run for a completion, and the function that the test calls."""
        program = extract_program(text, setup=exam.setup, entry_point=exam.entry_point)
        return program, exam.entry_point

    def _judge(self, sandbox: CodeSandbox, job: tuple[str, Exam]) -> Verdict | Exception:
        text, exam = job
        if len(text) > _LONGEST:
            return Verdict(False, f"longer than {_LONGEST} characters")
        code, entry_point = self.program_of(text, exam)
        try:
            return sandbox.judge(
                code=code, setup=exam.setup, test=exam.test, entry_point=entry_point
            )
        except SandboxError as error:
            return error


def _always_raising(entry_point: str) -> str:
    """Return a program whose function or method raises in every call."""
    name, _, method = entry_point.partition("().")
    if not name.isidentifier():  # it is a whole program
        return _RAISES.partition(": ")[2]
    return f"class {name}:\n    {_RAISES.format(method)}" if method else _RAISES.format(name)


def _text(name: str, code: Any) -> str:
    """Return the code of a column, which may be a list of lines."""
    try:
        return code if isinstance(code, str) else "\n".join(code)
    except TypeError:
        raise ValueError(f"{name}={shortened(repr(code))} is not text") from None


def _tested_name(test: str) -> str:
    """Return the name that a test imports from ``solution``, or else the first one it calls that is
    neither Python's nor its own; "" if there is none."""
    try:
        nodes = [*ast.walk(ast.parse(test))]
    except (SyntaxError, ValueError):
        return ""
    known, called = {*vars(builtins)}, []
    for node in nodes:
        match node:
            case ast.ImportFrom(module="solution", names=[ast.alias(name=name), *_]):
                return name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                known |= {alias.asname or alias.name for alias in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                known.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                known.add(name)
            case ast.Call(func=ast.Name(id=name)):
                called.append(name)
    return next((name for name in called if name not in known), "")


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"rewards: packages has {package!r}, which is no installed package.")
    return found.submodule_search_locations[0]


def _trial_fault(raising: Verdict, own: Verdict | None) -> str | None:
    """Say what is wrong with a test, given the verdicts on a function that raises in every call and
    on the row's own solution, if it has one, which may define more than a function."""
    if raising.passed:
        return "a function that raises in every call passes"
    if own is not None:
        return None if own.passed else f"the row's own solution fails: {own.why}"
    return raising.why if raising.test_failed or not raising.calls else None


def failure_kind(why: str) -> str:
    """Sort a verdict's reason into one of ``_FAILURE_KINDS``."""
    name = why.partition(":")[0]
    if name == "AssertionError":
        return "wrong"
    if name in ("SyntaxError", "IndentationError", "TabError"):
        return "syntax"
    if why.startswith("no verdict"):
        return "timeout"
    if name in _REFUSALS:
        return "refused"
    return "exception" if name.isidentifier() else "crash"
