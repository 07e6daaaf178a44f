"""The process that runs a test. It never runs a line of the completion.

The test calls a stand-in, which sends its arguments to the candidate's process and gets plain data
back. So the completion reaches neither expected values nor the interpreter that compares them.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import socket
import sys
import types
from typing import Any, NoReturn

from torchtune_grpo.sandbox import kernel
from torchtune_grpo.sandbox.candidate import run_candidate
from torchtune_grpo.sandbox.fences import Fences
from torchtune_grpo.sandbox.wire import NotPlain, PeerGone, dump, load, receive, send

MAX_ANSWER = 2**20  # bytes


def run_checker(judge: socket.socket, *, fences: Fences) -> None:
    """Fork a candidate, run a test on a stand-in for its function, and send the verdict.

    ``judge`` sends ``program`` (see :func:`run_candidate`), ``setup``, ``test`` and ``limits``. It
    gets a verdict, or a ``fault``: why the completion was not even begun.
    """
    kernel.refuse_debuggers()
    calls, theirs = socket.socketpair()
    candidate = fences.fork()  # before anything is here that it should not find in its memory
    if not candidate:
        kernel.die_with_parent()
        os.setsid()  # or its signals to its group would reach this process as well
        calls.close()
        judge.close()
        run_candidate(theirs, fences)
        return
    theirs.close()
    exam = receive(judge)
    kernel.set_limits(exam["limits"])
    try:
        send(calls, exam["program"])
        begins = receive(calls)
    except PeerGone as error:
        begins = {"fault": f"its process {error}"}
    if "fault" in begins:
        send(judge, begins)
        return
    verdict = _examine(exam, _StandIn(calls))
    # Stopped, so that all that it has used can still be read.
    os.kill(candidate, signal.SIGSTOP)
    if not os.WIFSTOPPED(os.waitpid(candidate, os.WUNTRACED)[1]):
        verdict["why"] = verdict["why"] or "the completion's process ended before its test did"
    send(judge, verdict)
    signal.pause()


class _NoAnswer(BaseException):
    """No answer will come; a test's ``except Exception`` does not catch it."""


class _StandIn:
    """A function that calls the candidate's in its own process."""

    def __init__(self, calls: socket.socket) -> None:
        self._calls = calls
        self.answers = 0
        self.broken = ""  # why no more answers come; a test's own `except:` may have swallowed it
        self.test_failed = False

    def start(self) -> None:
        """Wait until the completion is loaded."""
        answer = self._receive("ready", "error")
        if "error" in answer:
            self._break("{}: {}".format(*answer["error"]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: dict[str, Any] = {"prints": sys.stdout is not sys.__stdout__}
        try:
            call["args"] = [dump(value) for value in args]
            call["kwargs"] = {name: dump(value) for name, value in kwargs.items()}
        except NotPlain as error:
            # Later ones may hold answers, so that a completion could have caused it.
            self.test_failed = not self.answers
            self._break(f"the test passes what cannot be sent: {error}")
        try:
            send(self._calls, call)
        except PeerGone as error:
            self._break(f"the completion's process {error}")
        answer = self._receive("value", "error")
        self.answers += 1
        if call["prints"]:
            sys.stdout.write(str(answer.get("printed", "")))
        try:
            value = load(answer.get("value"))
            for position, data in answer.get("changed", ()):
                _refill([*args, *kwargs.values()][position], load(data))
        except (NotPlain, TypeError, ValueError, LookupError) as error:
            self._break(f"{type(error).__name__}: {error}")
        if "error" in answer:
            raise self._exception(*answer["error"])
        return value

    def _receive(self, *kinds: str) -> dict[str, Any]:
        if self.broken:
            raise _NoAnswer
        try:
            answer = receive(self._calls, limit=MAX_ANSWER)
        except PeerGone as error:
            self._break(f"the completion's process {error}")
        if type(answer) is not dict or not answer.keys() & {*kinds}:
            self._break("malformed answer")
        parts = answer.get("error", ["", "", None])
        if type(parts) is not list or [type(part) for part in parts[:-1]] != [str, str]:
            self._break("malformed error")
        return answer

    def _exception(self, name: str, message: str, arguments: Any) -> Exception:
        """Make the builtin exception of that name, with the arguments if they fit its message."""
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            self._break(f"{name}: {message}")
        raised: Exception = RuntimeError(f"the function raised {name}: {message}")
        if kind in (StopIteration, StopAsyncIteration):
            # As generators do: the test's own loop must not take it for the end.
            return raised
        with contextlib.suppress(Exception):  # it may want other arguments
            raised = kind(message)
        with contextlib.suppress(Exception):
            same = kind(*load(arguments))
            raised = same if str(same) == message else raised
        return raised

    def _break(self, why: str) -> NoReturn:
        self.broken = why
        raise _NoAnswer(why)


def _refill(argument: Any, changed: Any) -> None:
    """Change a list, dict or set that was passed as the function has changed it."""
    if type(changed) not in (list, dict, set) or not isinstance(argument, type(changed)):
        raise NotPlain("malformed")
    argument.clear()
    (argument.extend if isinstance(argument, list) else argument.update)(changed)


def _examine(exam: dict[str, Any], function: _StandIn) -> dict[str, Any]:
    """Run the test. Failures before the first answer are its own, later ones the completion's."""
    why, module = "", types.ModuleType("test")
    try:
        _run_test(exam, function, module)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    if function.broken:
        why = function.broken
    elif not function.answers:
        why = f"the test itself failed before it called the function: {why or 'it never did'}"
        function.test_failed = True
    found = {"why": why[:500], "calls": function.answers, "test_failed": function.test_failed}
    return found | {"share": module.__dict__.get("share")}


def _run_test(exam: dict[str, Any], function: _StandIn, module: types.ModuleType) -> None:
    exec(compile(exam["setup"], "<setup>", "exec"), module.__dict__)
    function.start()
    module.__dict__[exam["program"]["entry_point"]] = function
    exec(compile(exam["test"], "<test>", "exec"), module.__dict__)
    check = module.__dict__.get("check")
    if check is not None:
        check(function)
