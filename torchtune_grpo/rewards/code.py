"""Rewards for code: a completion has to pass its row's tests in a sandbox.

The tests and the expected values are never in the process that runs the completion. They are in
a second process, where a stand-in for the function asks the first process for each answer; only
plain data crosses. docs/reward_hacking.md says what that is good for.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune.utils import get_logger

from torchtune_grpo.config.text import shortened
from torchtune_grpo.data import code_tests
from torchtune_grpo.rewards.extraction import code_blocks, definition_of, extract_program
from torchtune_grpo.rewards.reward import declares
from torchtune_grpo.rewards.workers import MAX_WORKERS, WorkerPool
from torchtune_grpo.sandbox.code import CodeSandbox, Limits, SandboxError
from torchtune_grpo.sandbox.exam import Exam, Kind, Verdict

log = get_logger("INFO")

_LONGEST = 100_000  # characters in a completion
_MAX_TRIED = 500  # rows, which take five seconds
_MAX_SOLUTIONS = 10  # that are tried of one row
_SOLUTION = re.compile(r"(?:^|>)[ \t]*class Solution\b", re.MULTILINE)
_RAISES = "raise Exception('always')"


@declares(reads="text", reward_range=(0.0, 1.0), check_row=code_tests.name_fault)
def code_format_reward(
    prompts: list[str],
    completions: list[str],
    *,
    entry_point: list[str] | None = None,
    **columns: list[object],
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
    """Reward of 1.0 for a function that passes its unit test, and of 0.0 otherwise.

    A test is code, as text or a list of lines. It defines ``check(candidate)`` as in HumanEval,
    ``test_...`` functions or a ``unittest.TestCase``, or calls the function by name as in MBPP.
    The column ``entry_point`` holds that name, by default the first one that the test calls; it
    may also be a class or ``Solution().method``. The column ``setup`` holds code that precedes
    both completion and test: the prompt's imports and helpers.
    """

    __name__ = "code_reward"
    reads = "text"
    decides = True
    isolates = True  # in processes of its own
    tests_column = "test"
    read_test: Callable[..., Exam] = staticmethod(code_tests.unit_test)
    partial = False  # score the share of cases that pass

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
        if workers is None:  # sleeping ones should leave no core idle; each takes memory
            workers = min(2 * len(os.sched_getaffinity(0)), 16)
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
        test: list[object],
        **columns: Any,
    ) -> list[float | Exception]:
        """Run each completion's test; report why each failed, and the share of each kind.

        Where the sandbox or the test itself failed, the score is an exception. Raises a
        SandboxError if this machine cannot have a sandbox.
        """
        return self._scores(completions, test=test, **columns)

    def _scores(
        self,
        completions: list[str],
        *,
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | Exception]:
        verdicts = self.judge(completions, **columns)
        if log_extra is not None:
            log_extra("why", [verdict.why for verdict in verdicts])
        if log_metric is not None:
            kinds = Counter(verdict.kind for verdict in verdicts)
            judged = kinds.total() - kinds[Kind.BROKEN_TEST]
            for kind in Kind:
                if kind not in (Kind.PASSED, Kind.BROKEN_TEST):
                    log_metric(kind, kinds[kind] / max(judged, 1))
        return [self._score(verdict) for verdict in verdicts]

    def _score(self, verdict: Verdict) -> float | Exception:
        if verdict.test_failed:
            return SandboxError(verdict.why)
        return (verdict.share or 0.0) if self.partial else float(verdict.passed)

    @classmethod
    def check_row(cls, **row: object) -> str | None:
        """Return what makes a row unusable, or None; run nothing."""
        try:
            return cls._named(row, code_tests.unit_test_fault(cls.read_test(**row)))
        except ValueError as error:
            return str(error)

    def check_rows(self, rows: Sequence[Mapping[str, object]]) -> dict[int, str | None]:
        """Find broken tests by running them: a test must ask for functions that raise in every call
        and must fail them, and one of the row's own solutions, if it has any, must pass.

        At most 500 rows are tried, always the same ones. Returns the position of each tried row,
        mapped to what is wrong with it, or to None.
        """
        count = min(len(rows), _MAX_TRIED)
        tried = sorted(random.Random(0).sample(range(len(rows)), count))
        log.info(f"Code rewards: trying the tests of {count} of {len(rows)} rows.")
        self._log_confinement()
        faults = self._pool.map(self._trial, [rows[n] for n in tried])
        return {n: self._named(rows[n], fault) for n, fault in zip(tried, faults, strict=True)}

    def _trial(self, sandbox: CodeSandbox, row: Mapping[str, object]) -> str | None:
        exam = self.read_test(**row)
        raising = self._judge(sandbox, (_always_raising(exam), exam))
        if raising.passed:
            return "a function that raises in every call passes"
        fault = None if raising.questions else raising.why
        for solution in code_tests.own_solutions(row, exam)[:_MAX_SOLUTIONS]:
            verdict = self._judge(sandbox, (solution, exam))
            if verdict.passed:
                return None
            fault = f"the row's own solution fails: {verdict.why}"
        return fault

    @classmethod
    def _named(cls, row: Mapping[str, object], fault: str | None) -> str | None:
        """Put the column and its value before what is wrong with it, if anything is."""
        return fault and f"{cls.tests_column}={shortened(repr(row[cls.tests_column]))}: {fault}"

    def judge(self, completions: Sequence[str], **columns: Sequence[object]) -> list[Verdict]:
        """Return verdicts in place of scores. Equal programs with equal tests run once."""
        lists = {name: each for name, each in columns.items() if isinstance(each, (list, tuple))}
        rows = [dict(zip(lists, row)) for row in zip(*lists.values(), strict=True)]
        jobs = list(zip(completions, (self.read_test(**row) for row in rows), strict=True))
        distinct = list(dict.fromkeys(jobs))
        self._log_confinement()
        judged = dict(zip(distinct, self._pool.map(self._judge, distinct), strict=True))
        return [judged[job] for job in jobs]

    def _log_confinement(self) -> None:
        if not self._logged:
            log.info(f"Code rewards: {self._sandboxes[0].confinement()}")
            self._logged = True

    def _judge(self, sandbox: CodeSandbox, job: tuple[str, Exam]) -> Verdict:
        """Judge a completion; if the sandbox fails, that is not the completion's fault."""
        text, exam = job
        if len(text) > _LONGEST:
            return Verdict(Kind.CRASH, f"longer than {_LONGEST} characters")
        defined = exam.entry_point
        if exam.cases and defined and _SOLUTION.search(text.rpartition("</think>")[2]):
            defined = "Solution"
        program = extract_program(text, setup=exam.setup, entry_point=defined or None)
        try:
            return sandbox.judge(program, exam._replace(partial=self.partial))
        except SandboxError as error:
            return Verdict(Kind.BROKEN_TEST, str(error))

    def close(self) -> None:
        """End the sandboxes' processes; a later call starts new ones."""
        self._pool.close()


class ProgramReward(CodeReward):
    """Reward for the outputs of a program that reads and prints, or of a function or method.

    The column ``tests`` holds inputs and outputs, as JSON or as values: ``{"inputs": [...],
    "outputs": [...]}`` as in APPS and TACO, with ``fn_name`` for a function or a method of
    ``Solution``; ``{"input": [...], "output": [...]}`` as in CodeContests; or a list of pairs or of
    ``{"input": ..., "output": ...}`` as in Codeforces and LiveCodeBench, compressed or not. Where
    ``fn_name`` is a class, an input is a list of method names and a list of their arguments.
    Printed outputs are compared line by line and word by word, numbers by value and decimals to
    within a millionth. The score is 1.0 if all tests pass, else 0.0, and the first failure ends the
    tests. With ``partial``, the score is the share of tests that pass, and does not decide what is
    right.
    """

    __name__ = "program_reward"
    isolates = True
    tests_column = "tests"
    read_test = staticmethod(code_tests.output_test)

    def __init__(self, *, partial: bool = False, timeout: float = 5.0, **limits: Any) -> None:
        super().__init__(timeout=timeout, **limits)
        self.partial = partial
        self.decides = not partial  # partial scores of wrong programs may be nearly 1

    def __call__(  # type: ignore[override]  # another column
        self, prompts: list[str], completions: list[str], *, tests: list[Any], **columns: Any
    ) -> list[float | Exception]:
        """Run each completion on its row's inputs, all within ``timeout``."""
        return self._scores(completions, tests=tests, **columns)


def _always_raising(exam: Exam) -> str:
    """Return a program whose functions, all that the test names, raise in every call."""
    name, _, method = exam.entry_point.partition("().")
    if not name:  # it is a whole program
        return _RAISES
    defined = f"class {name}: {method} = _raises" if method else f"{name} = _raises"
    others = f"globals().update({{n: _raises for n in {exam.others} if n not in globals()}})"
    return f"def _raises(*_, **__): {_RAISES}\n{defined}\n{others}"


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"rewards: packages has {package!r}, which is no installed package.")
    return found.submodule_search_locations[0]
