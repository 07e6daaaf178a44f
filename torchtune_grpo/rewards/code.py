"""Rewards for code: unit tests that a completion's function passes in a sandbox.

The test and its expected values are never in the process that runs the completion. They are in
another one, where the function is a stand-in that asks the first for an answer; only plain data
gets across. docs/reward_hacking.md says what that is good for.
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
from collections.abc import Callable, Sequence
from typing import Any

from torchtune.utils import get_logger

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.extraction import code_blocks, definition_of, extract_program
from torchtune_grpo.rewards.reward import declares
from torchtune_grpo.rewards.workers import MAX_WORKERS, WorkerPool, default_workers
from torchtune_grpo.sandbox import CodeSandbox, Limits, SandboxError, Verdict

log = get_logger("INFO")

_LONGEST = 100_000  # characters of a completion
_FAILURE_KINDS = ("wrong", "exception", "syntax", "timeout", "crash", "refused")
# What the sandbox does not allow, or a stand-in for an object of the completion does not.
_REFUSALS = ("refused", "NotPlain", "PermissionError", "FileNotFoundError", "ModuleNotFoundError")
_MAX_TRIED = 500  # rows, in five seconds
_RAISES = "def {}(*_, **__): raise Exception('always')"
_VACUOUS = "a function that raises in every call passes"
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(?:\(\)\.[^\W\d]\w*)?")


def _name_fault(*, entry_point: object = None) -> str | None:
    if entry_point is None:
        return None
    if isinstance(entry_point, str) and _ENTRY_POINT.fullmatch(entry_point):
        return None
    said = shortened(repr(entry_point))
    return f"entry_point={said} is not the name of a function or class, or Solution().method"


def _always_raising(entry_point: str) -> str:
    """A program whose function or method raises in every call."""
    name, _, method = entry_point.partition("().")
    return f"class {name}:\n    {_RAISES.format(method)}" if method else _RAISES.format(name)


@declares(reward_range=(0.0, 1.0), check_row=_name_fault)
def code_format_reward(
    prompts: list[str],
    completions: list[str],
    *,
    entry_point: list[str] | None = None,
    **columns: list[Any],
) -> list[float]:
    """Score 1.0 where there is exactly one fenced Python block and it defines the function of the
    column ``entry_point``, if there is one, whatever it computes, and 0.0 elsewhere."""
    scores = []
    for text, name in zip(completions, entry_point or [""] * len(completions), strict=True):
        blocks = code_blocks(text)
        is_one = len(blocks) == 1 and blocks[0].closed
        scores.append(
            float(is_one and (not name or bool(definition_of(name).search(blocks[0].code))))
        )
    return scores


class CodeReward:
    """Rewards a function that passes its unit test: 1.0, and 0.0 for whatever else happens."""

    __name__ = "code_reward"
    decides = True

    def __init__(
        self,
        *,
        timeout: float = 1.0,  # seconds for one completion and its test
        workers: int | None = None,  # completions at once; None: two for each core, at most 16
        memory_mb: int = 512,  # of a completion's processes together
        processes: int = 16,  # of a completion at once, threads included
        packages: Sequence[str] = (),  # names of those that completions and tests can import
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
        entry_point: list[str] | None = None,
        setup: list[Any] | None = None,
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | Exception]:
        """Run each completion's test; report why each failed, and the share that did so by kind.

        A test is code, or a list of lines, that defines ``check(candidate)``, as HumanEval's, or
        functions ``test_...`` or a ``unittest.TestCase``, or calls the function by its name, as
        MBPP's. ``entry_point`` is that name, by default the first that the test calls; it may also
        be that of a class, or ``Solution().method``.
        ``setup`` precedes both completion and test: the prompt's imports and helpers. Where the
        sandbox or the test itself failed, an exception stands for the score.
        A SandboxError is raised if there can be no sandbox on this machine.
        """
        verdicts = self.judge(completions, **_columns(test, entry_point, setup))
        if log_extra is not None:
            log_extra("why", [str(v) if isinstance(v, Exception) else v.why for v in verdicts])
        scores = list(map(self.score, verdicts))
        if log_metric is not None:
            why = [v.why for v in verdicts if isinstance(v, Verdict) and not v.test_failed]
            kinds = Counter(map(failure_kind, filter(None, why)))
            for kind in _FAILURE_KINDS:
                log_metric(kind, kinds[kind] / max(len(why), 1))
        return scores

    @staticmethod
    def check_row(*, test: Any, entry_point: object = None, setup: Any = "") -> str | None:
        """Say what makes a row unusable, or None; runs nothing."""
        for name, code in (("test", test), ("setup", setup)):
            if not isinstance(_joined(code), str):
                return f"{name}={shortened(repr(code))} is not text"
        if entry_point is None and not _tested_name(_joined(test)):
            return f"test={shortened(repr(test))} calls no function; name it by entry_point"
        return _name_fault(entry_point=entry_point)

    def check_rows(
        self,
        *,
        test: list[Any],
        entry_point: list[str] | None = None,
        setup: list[Any] | None = None,
        solution: list[Any] | None = None,
        solutions: list[Any] | None = None,
        canonical_solution: list[Any] | None = None,
    ) -> dict[int, str | None]:
        """Find broken tests by running them: a function that raises in every call has to be called
        and may not pass, and the row's own solution (the first of several) has to pass.

        Of many rows 500 are tried, always the same. Returns the position of each row that was tried
        and what is wrong with it, or None.
        """
        count = len(test)
        tried = _tried_rows(count)
        log.info(f"Code rewards: trying the tests of {len(tried)} of {count} rows.")
        columns = _columns(test, entry_point, setup)
        chosen = {name: [values[row] for row in tried] for name, values in columns.items()}
        programs = [*map(_always_raising, chosen["entry_point"])]
        faults: dict[int, str | None] = {}
        for row, verdict in zip(tried, self.judge(programs, **chosen), strict=True):
            faults[row] = _trial_fault(verdict)
        others = self.try_solutions(solution or solutions or canonical_solution or [], columns)
        # A test that imports more than the function is known by the solution alone.
        faults = {
            row: fault if fault == _VACUOUS else others.get(row, fault)
            for row, fault in faults.items()
        }
        return {
            row: fault and f"test={shortened(repr(test[row]))}: {fault}"
            for row, fault in faults.items()
        }

    def try_solutions(
        self, solutions: list[Any], columns: dict[str, list[str]]
    ) -> dict[int, str | None]:
        """What is wrong with the rows that are tried, by their own solutions."""
        programs = {row: first_program(solutions[row]) for row in _tried_rows(len(solutions))}
        tried = [row for row, program in programs.items() if program]
        chosen = {name: [values[row] for row in tried] for name, values in columns.items()}
        verdicts = self.judge([programs[row] for row in tried], **chosen)
        return dict(zip(tried, map(_solution_fault, verdicts), strict=True))

    def judge(
        self,
        completions: Sequence[str],
        *,
        test: Sequence[str],
        entry_point: Sequence[str],
        setup: Sequence[str],
    ) -> list[Verdict | Exception]:
        """Return verdicts in place of scores. Equal programs with equal tests run once."""
        jobs = list(zip(completions, test, entry_point, setup, strict=True))
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

    def program_of(self, text: str, setup: str, entry_point: str) -> tuple[str, str]:
        """What runs for a completion, and the name of the function in it that the test calls."""
        return extract_program(text, setup=setup, entry_point=entry_point), entry_point

    def _judge(self, sandbox: CodeSandbox, job: tuple[str, str, str, str]) -> Verdict | Exception:
        text, test, entry_point, setup = job
        if len(text) > _LONGEST:
            return Verdict(False, f"longer than {_LONGEST} characters")
        code, entry_point = self.program_of(text, setup, entry_point)
        try:
            return sandbox.judge(code=code, setup=setup, test=test, entry_point=entry_point)
        except SandboxError as error:
            return error


def _columns(
    test: list[Any], entry_point: list[str] | None, setup: list[Any] | None
) -> dict[str, list[str]]:
    """The columns of tests, of the names that they call, and of what precedes them."""
    tests = [_joined(each) for each in test]
    names = entry_point or [_tested_name(each) for each in tests]
    before = [_joined(each) for each in setup or [""] * len(tests)]
    return {"test": tests, "entry_point": names, "setup": before}


def _joined(code: Any) -> Any:
    """A list's lines as one text; other values as they are."""
    is_lines = isinstance(code, (list, tuple)) and all(isinstance(line, str) for line in code)
    return "\n".join(code) if is_lines else code


def _tested_name(test: str) -> str:
    """The name that a test imports from ``solution``, or the first that it calls and that is
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


def first_program(solutions: Any) -> str:
    """A row's own solution, or the first of a list of them, which may be JSON; "" without any."""
    with contextlib.suppress(ValueError, TypeError):
        solutions = json.loads(solutions)
    first = next(iter(solutions), "") if isinstance(solutions, (list, tuple)) else solutions
    return first if isinstance(first, str) else ""


def _tried_rows(count: int) -> list[int]:
    return sorted(random.Random(0).sample(range(count), min(count, _MAX_TRIED)))


def _trial_fault(verdict: Verdict | Exception) -> str | None:
    """Say what is wrong with a test, by its verdict on a function that raises in every call."""
    if isinstance(verdict, Exception):
        raise verdict
    if verdict.passed:
        return _VACUOUS
    return verdict.why if verdict.test_failed or not verdict.calls else None


def _solution_fault(verdict: Verdict | Exception) -> str | None:
    if isinstance(verdict, Exception):
        raise verdict
    return None if verdict.passed else f"the row's own solution fails: {verdict.why}"


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
