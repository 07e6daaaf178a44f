"""The process that runs a test. It never runs a line of the completion.

The test calls a stand-in, which sends its arguments to the candidate's process and gets plain data
back, or stand-ins for objects that stay there. So the completion reaches neither expected values
nor the interpreter that compares them, and an object cannot claim to equal what is expected.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import re
import signal
import socket
import sys
import types
import unittest
from functools import partial, partialmethod
from typing import Any, NoReturn

from torchtune_grpo.sandbox import syscalls, wire
from torchtune_grpo.sandbox.candidate import ENTRY, NAMES, run_candidate
from torchtune_grpo.sandbox.cases import run_cases
from torchtune_grpo.sandbox.exam import Exam, Kind, Verdict
from torchtune_grpo.sandbox.fences import Fences

MAX_ANSWER = 2**24  # bytes
# What a stand-in passes on to its object, and what it refuses because it would show the object a
# value it may be expected to equal. Methods of plain values (startswith, issubset) could as well.
_DONE_THERE = "call setattr len iter next str repr bool getitem setitem delitem".split()
_REFUSED = "eq ne lt le gt ge hash".split()
_OF_PLAIN = {name for kind in (str, bytes, int, float, frozenset, tuple) for name in dir(kind)}
_KINDS = {
    "AssertionError": Kind.WRONG,
    **dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), Kind.SYNTAX),
    # What the fences raise, or a stand-in.
    **dict.fromkeys(("PermissionError", "FileNotFoundError"), Kind.REFUSED),
    **dict.fromkeys(("ModuleNotFoundError", "NotPlain"), Kind.REFUSED),
}


def run_checker(judge: socket.socket, *, fences: Fences) -> None:
    """Fork a candidate, run a test on a stand-in for its function, and send the verdict.

    ``judge`` sends ``program`` (see ``run_candidate``), ``exam`` and the test's ``limits``. It
    gets a verdict, or a ``fault``: why the completion was never started.
    """
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # closes its memory to processes of its user
    calls, theirs = socket.socketpair()
    candidate = fences.fork()  # before this process holds anything to hide from it
    if not candidate:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()  # or its signals to its group would reach this process as well
        calls.close()
        judge.close()
        run_candidate(theirs, fences)
        return
    theirs.close()
    task = wire.receive(judge)
    syscalls.set_limits(task["limits"])
    try:
        wire.send(calls, task["program"])
        begins = wire.receive(calls)
    except wire.PeerGone as error:
        begins = {"fault": f"its process {error}"}
    if "fault" in begins:
        wire.send(judge, begins)
        return
    fences.confine_test(candidate)
    exam = Exam(**task["exam"])
    verdict = _examine(exam, _CandidateProcess(calls, exam))
    # It is stopped, so that all that it has used can still be read.
    os.kill(candidate, signal.SIGSTOP)
    if not os.WIFSTOPPED(os.waitpid(candidate, os.WUNTRACED)[1]) and verdict.passed:
        why = "the completion's process ended before its test did"
        verdict = verdict._replace(kind=Kind.CRASH, why=why)
    wire.send(judge, verdict._asdict())
    signal.pause()


def _examine(exam: Exam, candidate: _CandidateProcess) -> Verdict:
    """Run the test or the cases, and say what came of it."""
    error: BaseException | None = None
    share = None
    try:
        names = _load(exam, candidate)
        if exam.cases:
            cases = json.loads(exam.cases)
            share, why = run_cases(candidate.entry.__call__, cases, partial=exam.partial)
            error = AssertionError(why) if why else None
        else:
            _run_test(exam, candidate, names)
    except BaseException as raised:
        error = raised
    kind, why = _kind_and_reason(error, candidate)
    return Verdict(kind, why[:500], candidate.questions, share)


def _kind_and_reason(error: BaseException | None, candidate: _CandidateProcess) -> tuple[Kind, str]:
    """Find who is to blame for what ended the test, if anything did.

    Only before its first question, be it for a name, is a failure the test's own. From then on it
    may follow from what the completion defines, raises or returns.
    """
    if candidate.failure:  # which the test may have caught
        return candidate.failure
    why = f"{type(error).__name__}: {error}" if error else ""
    if not candidate.questions:
        text = "the test itself failed before it called the function: "
        return Kind.BROKEN_TEST, text + (why or "it never did")
    if error is None:
        if candidate.was_called:
            return Kind.PASSED, ""
        return Kind.WRONG, "with these names, the test ends without a call of the function"
    explained = error is candidate.raised or isinstance(error, AssertionError)
    if candidate.objects and not explained:  # the test may have taken an object for a value
        return Kind.REFUSED, f"refused: {why}"
    return _KINDS.get(type(error).__name__, Kind.EXCEPTION), why


def _load(exam: Exam, candidate: _CandidateProcess) -> dict[str, object]:
    """Load the setup and the completion, and return the names that the test may use."""
    module = types.ModuleType("test")
    sys.modules["test"] = sys.modules["solution"] = module
    names = vars(module)
    exec(compile(exam.setup, "<setup>", "exec"), names)
    candidate.load()
    names[exam.entry_point] = candidate.entry
    names["__getattr__"] = candidate.lookup  # for `from solution import another`
    return names


def _run_test(exam: Exam, candidate: _CandidateProcess, names: dict[str, Any]) -> None:
    for name in exam.others:
        if name not in names:
            with contextlib.suppress(AttributeError):
                names[name] = candidate.lookup(name)
    exec(compile(exam.test, "<test>", "exec"), names)
    own = {name: value for name, value in names.items() if type(value) is not _StandIn}
    if "check" in own:
        own["check"](candidate.entry)
    for name, function in own.items():
        if name.startswith("test_") and callable(function):
            function()
    for kind in own.values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
            unittest.defaultTestLoader.loadTestsFromTestCase(kind).debug()  # raises what fails


class _NoAnswer(BaseException):
    """Raised when no answer will come; a test's ``except Exception`` does not catch it."""


class _CandidateProcess:
    """The candidate's process, as the checker sees it."""

    def __init__(self, calls: socket.socket, exam: Exam) -> None:
        self._calls = calls
        # Judged by its name, as a completion could define a class in place of a function.
        self._is_class = re.fullmatch(r"_*[A-Z]\w*", exam.entry_point) is not None
        self.entry = _StandIn(self, ENTRY, is_known=True)
        self._names = _StandIn(self, NAMES, is_known=False)
        self.objects: dict[int, _StandIn] = {}
        self.questions = 0  # that it was asked, whether it answers or not
        self.was_called = False  # or asked for more than its names
        self.failure: tuple[Kind, str] | None = None  # why no more answers come
        self.raised: Exception | None = None  # the completion's last exception

    def load(self) -> None:
        """Wait until the completion is loaded."""
        answer = self._receive("ready")
        if "error" in answer:
            name, message, _ = answer["error"]
            self.stop(f"{name}: {message}", _KINDS.get(name, Kind.EXCEPTION))

    def lookup(self, name: str) -> object:
        """Return another name that the completion defines."""
        if name.startswith("__"):  # `import *` would take all that __all__ names
            raise AttributeError(name)
        try:
            return self.ask(self._names, "getitem", name)
        except KeyError:
            raise AttributeError(name) from None

    def ask(self, known: _StandIn, do: str, *args: object, **kwargs: object) -> object:
        """Have the candidate do something with one of its objects."""
        prints = sys.stdout is not sys.__stdout__
        call: dict[str, object] = {"on": known._stand_in[1], "do": do, "prints": prints}
        try:
            call["args"] = [wire.dump(value, self._keep) for value in args]
            call["kwargs"] = {name: wire.dump(value, self._keep) for name, value in kwargs.items()}
        except (wire.NotPlain, RecursionError) as error:
            # Later arguments may hold answers, so that the completion may be the cause.
            kind = Kind.REFUSED if self.questions else Kind.BROKEN_TEST
            self.stop(f"refused: the test passes what cannot be sent: {error}", kind)
        self.questions += 1  # now, as even reading the answer may fail
        self.was_called |= known is not self._names
        with contextlib.suppress(wire.PeerGone):  # no answer will come either
            wire.send(self._calls, call)
        answer = self._receive("value")
        if prints:
            sys.stdout.write(str(answer.get("printed", "")))
        # Objects of the class under test are what a row is about; others could pose as a value.
        is_made = self._is_class and known is self.entry and do == "call"
        find = partial(self._find, is_known=is_made)
        try:
            value = wire.load(answer.get("value"), find)
            for position, data in answer.get("changed", ()):
                _refill([*args, *kwargs.values()][position], wire.load(data, find))
        except (wire.NotPlain, TypeError, ValueError, LookupError) as error:
            self.stop(f"{type(error).__name__}: {error}")
        if "error" in answer:
            self.raised = self._exception(*answer["error"], ends=do == "next")
            raise self.raised
        return value

    def _keep(self, value: object) -> list[object]:
        """Encode an object of the candidate, or one of a class that the prompt defines."""
        if type(value) is _StandIn:
            return [value._stand_in[1]]
        if type(value).__module__ == "test" and hasattr(value, "__dict__"):
            return [type(value).__name__, wire.dump(vars(value), self._keep)]
        wire.refuse(value)

    def _find(self, number: int, kind: str, *, is_known: bool) -> _StandIn:
        if (type(number), type(kind)) != (int, str):
            raise ValueError("not a number and a type")
        return self.objects.setdefault(number, _StandIn(self, number, is_known=is_known))

    def _receive(self, kind: str) -> dict[str, Any]:
        """Receive the next answer, which has to be of this kind or an error."""
        if self.failure:
            raise _NoAnswer
        try:
            answer = wire.receive(self._calls, limit=MAX_ANSWER)
        except wire.TooLong as error:
            self.stop(f"refused: the completion's process {error}")
        except wire.PeerGone as error:
            self.stop(f"the completion's process {error}", Kind.CRASH)
        if type(answer) is not dict or not answer.keys() & {kind, "error"}:
            self.stop("malformed answer")
        parts = answer.get("error", ["", "", None])
        if type(parts) is not list or [type(part) for part in parts[:-1]] != [str, str]:
            self.stop("malformed error")
        return answer

    def _exception(self, name: str, message: str, arguments: object, *, ends: bool) -> Exception:
        """Make the builtin exception of that name, with the arguments if they fit its message."""
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            self.stop(f"{name}: {message}", _KINDS.get(name, Kind.EXCEPTION))
        raised: Exception = RuntimeError(f"the function raised {name}: {message}")
        if kind in (StopIteration, StopAsyncIteration) and not ends:
            return raised  # as generators do: the test's own loop must not take it for the end
        with contextlib.suppress(Exception):  # it may want other arguments
            raised = kind(message)
        with contextlib.suppress(Exception):
            same = kind(*wire.load(arguments))
            raised = same if str(same) == message else raised
        return raised

    def stop(self, why: str, kind: Kind = Kind.REFUSED) -> NoReturn:
        """End the test, whatever it catches: no more answers come."""
        self.failure = kind, why
        raise _NoAnswer(why)


class _StandIn:
    """Stand-in for an object that stays with the candidate."""

    __slots__ = ("_stand_in",)
    _stand_in: tuple[_CandidateProcess, int, bool]

    def __init__(self, candidate: _CandidateProcess, number: int, *, is_known: bool) -> None:
        object.__setattr__(self, "_stand_in", (candidate, number, is_known))

    def _do(self, name: str, *args: object, **kwargs: object) -> object:
        return self._stand_in[0].ask(self, name, *args, **kwargs)

    def _refuse(self, name: str, *_: object) -> NoReturn:
        self._stand_in[0].stop(f"refused: {name} of an object that is not plain data")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        if name in _OF_PLAIN and not self._stand_in[2]:
            self._refuse(name)
        return self._do("getattr", name)


for _name in _DONE_THERE:
    setattr(_StandIn, f"__{_name}__", partialmethod(_StandIn._do, _name))
for _name in _REFUSED:
    setattr(_StandIn, f"__{_name}__", partialmethod(_StandIn._refuse, _name))


def _refill(argument: Any, changed: Any) -> None:
    """Apply the function's changes to a list, dict or set that was passed to it."""
    if type(changed) not in (list, dict, set) or not isinstance(argument, type(changed)):
        raise wire.NotPlain("malformed")
    argument.clear()
    (argument.extend if isinstance(argument, list) else argument.update)(changed)
