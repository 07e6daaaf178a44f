"""The side that runs a test. It never runs a line of the completion.

The test's function is a stand-in that sends its arguments to the candidate's process and gets plain
data back. So the expected values, the checker, its interpreter and the socket for its verdict are
all where the completion is not.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import os
import signal
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from torchtune_grpo.sandbox import kernel as _kernel
from torchtune_grpo.sandbox.candidate import run_candidate
from torchtune_grpo.sandbox.fences import Fences
from torchtune_grpo.sandbox.values import MAX_CALL_DEPTH, Copies, NotPlain, TooDeep
from torchtune_grpo.sandbox.wire import PeerGone, receive, send

MAX_ANSWER = 2**20  # bytes


_END = object()
_SETUP, _TEST = "<setup>", "<test>"  # the names of their files


class _Broken(BaseException):
    """No answer will come. No ``except Exception`` of a test catches it."""


class _StandIn:
    """Calls the candidate in its own process."""

    def __init__(self, calls: socket.socket) -> None:
        self._calls = calls
        self._gave_iterators = False
        self.answers = 0
        self.broken = ""
        self.fault = ""  # of the test

    def start(self) -> None:
        """Waits until the completion is loaded."""
        answer = self._receive("ready", "error")
        if "error" in answer:
            self._break("{}: {}".format(*answer["error"]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask({}, [list(args), kwargs])

    def _iterate(self, number: int) -> Iterator[Any]:
        """The items of an iterator that lives in the candidate's process, one by one."""
        while (item := self._ask({"next": number}, [[], {}])) is not _END:
            yield item

    def _ask(self, call: dict[str, Any], arguments: list[Any]) -> Any:
        copies = Copies()
        try:
            call["arguments"] = copies.dump(arguments, MAX_CALL_DEPTH)
        except NotPlain as error:
            if self._gave_iterators or (self.answers and isinstance(error, TooDeep)):
                self._break(f"an answer is passed on, and cannot be: {error}", error)
            self.fault = f"the test passes what cannot be sent: {error}"
            raise _Broken from error
        call["prints"] = sys.stdout is not sys.__stdout__
        try:
            send(self._calls, call)
        except PeerGone as error:
            self._break(f"the completion's process {error}", error)
        answer = self._receive("value", "iterator", "error")
        self.answers += 1
        if call["prints"]:
            sys.stdout.write(str(answer.get("printed", "")))
        try:
            value = copies.load(answer.get("value"))
            for number, data in answer.get("changed", ()):
                copies.refill(number, data)
        except (NotPlain, TypeError, ValueError) as error:
            self._break(f"{type(error).__name__}: {error}", error)
        name, message, attributes = answer.get("error", ("", "", {}))
        if name == "NotPlain":
            self._break(f"{name}: {message}")
        if name:
            if name == "StopIteration" and "next" in call:
                return _END
            raise self._exception(name, message, attributes)
        if "iterator" in answer:
            self._gave_iterators = True
            return self._iterate(answer["iterator"])
        return value

    def _receive(self, *kinds: str) -> dict[str, Any]:
        if self.broken:
            raise _Broken
        try:
            answer = receive(self._calls, limit=MAX_ANSWER)
        except PeerGone as error:
            self._break(f"the completion's process {error}", error)
        if type(answer) is not dict or not answer.keys() & {*kinds}:
            self._break("malformed answer")
        parts = answer.get("error", ["", "", {}])
        if type(parts) is not list or [type(part) for part in parts] != [str, str, dict]:
            self._break("malformed error")
        return answer

    def _exception(self, name: str, message: str, attributes: dict[str, Any]) -> Exception:
        kind, raised = getattr(builtins, name, None), None
        described = RuntimeError(f"the function raised {name}: {message}")
        if kind in (StopIteration, StopAsyncIteration):
            # As generators do it: a loop of the test's must not end as if it had been through.
            return described
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            self._break(f"{name}: {message}")
        for arguments in (self._plain(attributes.pop("args", None)), [message]):
            if raised is None or str(raised) != message:
                with contextlib.suppress(Exception):  # it may want others
                    raised = kind(*arguments)
        for attribute, data in attributes.items():
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                if not attribute.startswith("_"):
                    setattr(raised, attribute, self._plain(data))
        return raised or described

    def _plain(self, data: Any) -> Any:
        try:
            return Copies().load(data)
        except NotPlain as error:
            self._break(str(error), error)

    def _break(self, why: str, error: BaseException | None = None) -> NoReturn:
        self.broken = why
        raise _Broken(why) from error


def run_checker(judge: socket.socket, *, fences: Fences) -> None:
    """Forks a candidate, runs a test on a stand-in for its function, and sends the verdict.

    Args:
        judge (socket.socket): there come ``program`` (see :func:`run_candidate`), ``setup`` and
            ``test`` (source code), ``entry_point`` and ``limits``. Either a verdict goes back, or a
            ``fault``: why the completion was not even begun.
        fences (Fences): of this server.
    """
    _kernel.refuse_debuggers()
    calls, theirs = socket.socketpair()
    candidate = fences.fork()  # before anything is here that it should not find in its memory
    if not candidate:
        _kernel.die_with_parent()
        os.setsid()  # or its signals to its group would be to this process as well
        calls.close()
        judge.close()
        run_candidate(theirs, fences)
        return
    theirs.close()
    exam = receive(judge)
    _kernel.set_limits(exam["limits"])
    try:
        send(calls, exam["program"])
        begins = receive(calls)
    except PeerGone as error:
        begins = {"fault": f"its process {error}"}
    if "fault" in begins:
        send(judge, begins)
        return
    report = _verdict(exam, _StandIn(calls))
    # Stopped, so that all that it has used can still be read.
    os.kill(candidate, signal.SIGSTOP)
    if not os.WIFSTOPPED(os.waitpid(candidate, os.WUNTRACED)[1]):
        report["why"] = report["why"] or "the completion's process ended before its test did"
    send(judge, report)
    signal.pause()


def _verdict(exam: dict[str, Any], stand_in: _StandIn) -> dict[str, Any]:
    why = fault = ""
    try:
        _run_test(exam, stand_in)
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        if stand_in.answers and _is_of_test(error, exam):
            fault = f"the test itself failed: {why}"
    if not stand_in.answers:  # nothing of the completion's can have caused it
        fault = f"the test itself failed before it called the function: {why or 'it never did'}"
    # A test's own `except:` may have swallowed what broke.
    fault = stand_in.fault or (fault if not stand_in.broken else "")
    why = (fault or stand_in.broken or why)[:500]
    return {"why": why, "calls": stand_in.answers, "test_failed": bool(fault)}


def _run_test(exam: dict[str, Any], stand_in: _StandIn) -> None:
    module = types.ModuleType("test")
    exec(compile(exam["setup"], _SETUP, "exec"), module.__dict__)
    stand_in.start()
    module.__dict__[exam["entry_point"]] = stand_in
    exec(compile(exam["test"], _TEST, "exec"), module.__dict__)
    check = module.__dict__.get("check")
    if check is not None:
        check(stand_in)


def _is_of_test(error: BaseException, exam: dict[str, Any]) -> bool:
    """Whether an error is the test's whatever was answered: an import statement of its own that
    failed, or a name in it that nothing ever binds. A TypeError, say, may be a wrong answer's.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_code.co_filename not in (_SETUP, _TEST):
        return False  # it was raised by what the test called, perhaps by the completion
    step = dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]]
    if step.startswith("IMPORT_"):
        return isinstance(error, ImportError)
    if step not in ("LOAD_NAME", "LOAD_GLOBAL") or not isinstance(error, NameError):
        return False
    programs = [compile(exam[part], "", "exec") for part in ("setup", "test")]
    return not any(_binds(program, error.name) for program in programs)


def _binds(code: types.CodeType, name: str | None) -> bool:
    """Whether some statement of a program gives the name a value, be it reached or not."""
    parts = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return any(
        step.argval == name and step.opname.startswith("STORE_")
        for step in dis.get_instructions(code)
    ) or any(_binds(part, name) for part in parts)
