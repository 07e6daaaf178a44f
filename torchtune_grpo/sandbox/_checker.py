"""The side that runs a test. It never runs a line of the completion.

The test's function is a stand-in that sends its arguments to the candidate's process and gets plain
data back. So the expected values, the checker, its interpreter, and the secret that proves a
verdict are all where the completion is not.
"""

from __future__ import annotations

import builtins
import os
import socket
import types
from typing import Any, NoReturn

from torchtune_grpo.sandbox import _kernel
from torchtune_grpo.sandbox._values import MAX_CALL_DEPTH, NotPlain, TooDeep, dump, load
from torchtune_grpo.sandbox._wire import PeerGone, receive, send

MAX_ANSWER = 2**20  # bytes


class CandidateError(Exception):
    """The candidate raised something that is no builtin exception."""


class _Broken(BaseException):
    """No answer will come. No ``except Exception`` of a test catches it."""


class _StandIn:
    """Calls the candidate in its own process."""

    def __init__(self, calls: socket.socket) -> None:
        self._calls = calls
        self.answers = 0
        self.broken = ""
        self.unsendable = ""

    def start(self) -> None:
        """Waits until the completion is loaded."""
        self._receive("ready")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = {"args": dump(list(args), MAX_CALL_DEPTH), "kwargs": dump(kwargs)}
        except NotPlain as error:
            if self.answers and isinstance(error, TooDeep):
                self._break("an argument that is made of its answers is nested too deep", error)
            self.unsendable = str(error)
            raise _Broken from error
        try:
            send(self._calls, call)
        except PeerGone as error:
            self._break("the completion's process ended", error)
        answer = self._receive("value")
        try:
            value = load(answer)
        except (NotPlain, RecursionError) as error:
            self._break(f"malformed value: {error}", error)
        self.answers += 1
        return value

    def _receive(self, wanted: str) -> Any:
        if self.broken:
            raise _Broken
        try:
            answer = receive(self._calls, limit=MAX_ANSWER)
        except PeerGone as error:
            self._break(f"the completion's process ended or wrote nonsense ({error})", error)
        if type(answer) is dict and set(answer) == {wanted}:
            return answer[wanted]
        if type(answer) is dict and set(answer) == {"error"}:
            self._raise(answer["error"], fatal=wanted == "ready")
        self._break("malformed answer")

    def _raise(self, error: Any, *, fatal: bool) -> None:
        if type(error) is not list or [type(part) for part in error] != [str, str]:
            self._break("malformed error")
        name, message = error
        if fatal or name == "NotPlain":
            self._break(f"{name}: {message}")
        self.answers += 1
        kind = getattr(builtins, name, None)
        raised: Exception = CandidateError(f"{name}: {message}")
        # As a generator does it: a loop of the test's must not end as if it had been through.
        if kind in (StopIteration, StopAsyncIteration):
            raised = RuntimeError(f"the function raised {name}")
        elif isinstance(kind, type) and issubclass(kind, Exception):
            try:
                raised = kind(message)
            except Exception:  # such as UnicodeDecodeError, which wants more arguments
                pass
        raise raised

    def _break(self, why: str, error: BaseException | None = None) -> NoReturn:
        self.broken = why
        raise _Broken(why) from error


def run_checker(request: dict[str, Any], fds: list[int]) -> None:
    """Runs a test on a stand-in for the completion's function, and sends the verdict.

    Args:
        request (dict[str, Any]): ``setup`` and ``test`` (source code), ``entry_point``, ``limits``
            and ``secret``.
        fds (list[int]): the candidate's socket, and the socket for the verdict.
    """
    _kernel.refuse_debuggers()
    _kernel.set_limits(request["limits"])
    calls, verdict = (socket.socket(fileno=fd) for fd in fds)
    stand_in = _StandIn(calls)
    why = ""
    try:
        stand_in.start()
        _run_test(request, stand_in)
        if not stand_in.answers:
            why = "the test never called the function"
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"[:500]
    # A test's own `except:` may have swallowed it.
    why = stand_in.broken or why
    send(
        verdict,
        {
            "secret": request["secret"],
            "passed": not why and not stand_in.unsendable,
            "why": why,
            "unsendable": stand_in.unsendable,
        },
    )
    os._exit(0)


def _run_test(request: dict[str, Any], stand_in: _StandIn) -> None:
    module = types.ModuleType("test")
    exec(compile(request["setup"], "<setup>", "exec"), module.__dict__)
    module.__dict__[request["entry_point"]] = stand_in
    exec(compile(request["test"], "<test>", "exec"), module.__dict__)
    check = module.__dict__.get("check")
    if check is not None:
        check(stand_in)
