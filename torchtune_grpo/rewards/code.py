"""Rewards for code: unit tests that a completion's function passes in a sandbox.

The test and its expected values are never in the process that runs the completion. They are in
another one, where the function is a stand-in that asks the first for an answer; only plain data
gets across. docs/reward_hacking.md tells what that is good for.
"""

from __future__ import annotations

import queue
import random
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtune.utils import get_logger

from torchtune_grpo.config.text import describe, shortened
from torchtune_grpo.rewards.program import code_blocks, definition_of, extract_program
from torchtune_grpo.rewards.unit_test import FAILURE_KINDS, failure_kind, unit_test_fault
from torchtune_grpo.sandbox import CodeSandbox, Limits, SandboxError, Verdict

log = get_logger("INFO")

# More than anybody writes for one function; far below what would slow a message down.
LONGEST_COMPLETION = 100_000
_MAX_TRIED = 500  # rows, in five seconds


def code_format_reward(
    prompts: list[str], completions: list[str], *, entry_point: list[str], **columns: list[Any]
) -> list[float]:
    """Rewards one fenced Python block that defines the function, whatever it computes.

    Args:
        prompts, completions, **columns: as all rewards get them.
        entry_point (list[str]): N names of functions.

    Returns:
        N numbers, 1.0 where there is exactly one such block and 0.0 elsewhere.
    """
    scores = []
    for text, name in zip(completions, entry_point, strict=True):
        blocks = code_blocks(text)
        is_one = len(blocks) == 1 and blocks[0].closed
        scores.append(float(is_one and bool(definition_of(name).search(blocks[0].code))))
    return scores


def _name_fault(*, entry_point: object) -> str | None:
    if isinstance(entry_point, str) and entry_point.isidentifier():
        return None
    return f"entry_point={shortened(repr(entry_point))} is no name of a function"


def _source_fault(name: str, code: object) -> str | None:
    if not isinstance(code, str):
        return f"{name}={shortened(repr(code))} is no text"
    try:
        compile(code, f"<{name}>", "exec")
    except Exception as error:  # also RecursionError, and MemoryError for too many brackets
        return f"{name}={shortened(repr(code))} is no Python: {describe(error).splitlines()[-1]}"
    return None


class CodeReward:
    """Rewards a function that passes its unit test: 1.0, and 0.0 for whatever else happens.

    Args:
        timeout (float): seconds for one completion and its test.
        workers (int): completions at once.
        memory_mb (int): megabytes of memory for each of a completion's processes.
        processes (int): how many of these it may have at once, threads included.
        unfenced (bool): whether to run where the kernel offers no filter of system calls, or
            neither namespaces nor Landlock.

    Raises:
        ValueError: if a number is not positive.
    """

    __name__ = "code_reward"
    decides = True

    def __init__(
        self,
        *,
        timeout: float = 5.0,
        workers: int = 2,
        memory_mb: int = 512,
        processes: int = 16,
        unfenced: bool = False,
    ) -> None:
        settings = {
            "timeout": timeout,
            "workers": workers,
            "memory_mb": memory_mb,
            "processes": processes,
        }
        for name, value in settings.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ValueError(f"rewards: {name} is {value!r}; give a number above 0.")
        self._limits = Limits(seconds=timeout, megabytes=memory_mb, processes=processes)
        self._workers = workers
        self._unfenced = unfenced
        self._sandboxes: list[CodeSandbox] = []
        self._idle: queue.SimpleQueue[CodeSandbox] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        test: list[str],
        entry_point: list[str],
        setup: list[str] | None = None,
        log_extra: Callable[[str, list[str]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | Exception]:
        """Runs each completion's test. Reports why each failed, and the share that did so by kind.

        Args:
            prompts, completions, **columns: as all rewards get them.
            test (list[str]): N tests: code that defines ``check(candidate)``, as HumanEval's, or
                that calls the function by its name, as MBPP's.
            entry_point (list[str]): N names of functions.
            setup (list[str] | None): N programs that precede both completion and test: the
                prompt's imports and helpers. None = nothing.

        Returns:
            N numbers; an exception where the sandbox or the test itself failed.

        Raises:
            SandboxError: if there can be no sandbox on this machine.
        """
        verdicts = self.judge(
            completions, test=test, entry_point=entry_point, setup=setup or [""] * len(completions)
        )
        if log_extra is not None:
            log_extra("why", [str(v) if isinstance(v, Exception) else v.why for v in verdicts])
        scores = list(map(_score, verdicts))
        if log_metric is not None:
            why = [v.why for v in verdicts if isinstance(v, Verdict) and not v.test_failed]
            kinds = Counter(map(failure_kind, filter(None, why)))
            for kind in FAILURE_KINDS:
                log_metric(kind, kinds[kind] / max(len(why), 1))
        return scores

    @staticmethod
    def check_row(*, test: object, entry_point: object, setup: object = "") -> str | None:
        """What keeps every completion from passing a row's test, or None; it runs nothing."""
        with warnings.catch_warnings(action="ignore"):  # about backslashes, say
            fault = _name_fault(entry_point=entry_point)
            for name, code in (("test", test), ("setup", setup)):
                fault = fault or _source_fault(name, code)
            if fault is not None:
                return fault
            fault = unit_test_fault(str(test), setup=str(setup), entry_point=str(entry_point))
        return fault and f"test={shortened(repr(test))} {fault}"

    def check_rows(
        self, *, test: list[str], entry_point: list[str], setup: list[str] | None = None
    ) -> dict[int, str | None]:
        """Runs rows' tests on a function that raises in every call: no test may pass that, or end
        before a call. Of many rows 500 are tried, always the same.

        Args:
            test, entry_point, setup: as in a call; :meth:`check_row` has nothing against them.

        Returns:
            Position of each row that was tried -> what is wrong with it, or None.

        Raises:
            SandboxError: if there can be no sandbox on this machine.
        """
        count = len(test)
        tried = sorted(random.Random(0).sample(range(count), min(count, _MAX_TRIED)))
        log.info(f"Code rewards: trying the tests of {len(tried)} of {count} rows.")
        names = [entry_point[row] for row in tried]
        verdicts = self.judge(
            [f"def {name}(*_, **__):\n    raise Exception('always')" for name in names],
            test=[test[row] for row in tried],
            entry_point=names,
            setup=[setup[row] if setup else "" for row in tried],
        )
        return {
            row: fault and f"test={shortened(repr(test[row]))}: {fault}"
            for row, fault in zip(tried, map(_trial_fault, verdicts), strict=True)
        }

    def judge(
        self, completions: list[str], *, test: list[str], entry_point: list[str], setup: list[str]
    ) -> list[Verdict | Exception]:
        """As a call, with the reasons. Equal programs with equal tests run once."""
        jobs = list(zip(completions, test, entry_point, setup, strict=True))
        distinct = dict.fromkeys(jobs)
        self._start()
        assert self._threads is not None
        judged = dict(zip(distinct, self._threads.map(self._judge, distinct), strict=True))
        return [judged[job] for job in jobs]

    def close(self) -> None:
        """Ends the sandboxes' processes; a later call starts new ones."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        for sandbox in self._sandboxes:
            sandbox.close()
        self._sandboxes = []
        self._idle = queue.SimpleQueue()

    def _start(self) -> None:
        if self._threads is not None:
            return
        self._sandboxes = [
            CodeSandbox(self._limits, unfenced=self._unfenced) for _ in range(self._workers)
        ]
        for sandbox in self._sandboxes:
            self._idle.put(sandbox)
        log.info(f"Code rewards: {self._sandboxes[0].confinement()}")
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="code reward")

    def _judge(self, job: tuple[str, str, str, str]) -> Verdict | Exception:
        text, test, entry_point, setup = job
        if len(text) > LONGEST_COMPLETION:
            return Verdict(False, f"longer than {LONGEST_COMPLETION} characters")
        code = extract_program(text, setup=setup, entry_point=entry_point)
        sandbox = self._idle.get()
        try:
            return sandbox.judge(code=code, setup=setup, test=test, entry_point=entry_point)
        except SandboxError as error:
            return error
        finally:
            self._idle.put(sandbox)


def _score(verdict: Verdict | Exception) -> float | Exception:
    if isinstance(verdict, Exception):
        return verdict
    return SandboxError(verdict.why) if verdict.test_failed else float(verdict.passed)


def _trial_fault(verdict: Verdict | Exception) -> str | None:
    """What is wrong with a test, by its verdict on a function that raises in every call."""
    if isinstance(verdict, Exception):
        raise verdict
    if verdict.passed:
        return "a function that raises in every call passes"
    return verdict.why if verdict.test_failed or not verdict.calls else None


code_format_reward.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]
code_format_reward.check_row = _name_fault  # type: ignore[attr-defined]
