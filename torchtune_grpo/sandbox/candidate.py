"""The side that runs a completion. It knows the completion and the calls made to it, nothing else.

Whatever the completion does to this process, all that leaves it is an answer to a call, which the
checker rebuilds as plain data and compares with what it expects.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import traceback
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from torchtune_grpo.sandbox.fences import Fences
from torchtune_grpo.sandbox.kernel import LIBRARY_FD
from torchtune_grpo.sandbox.values import MAX_CALL_DEPTH, Copies, NotPlain
from torchtune_grpo.sandbox.wire import receive, send


def run_candidate(calls: socket.socket, fences: Fences) -> None:
    """Confines this process, runs a completion, and answers calls of its function.

    Args:
        calls (socket.socket): the checker's. First comes the program: ``code``, ``entry_point``,
            ``folder``, ``limits`` and ``megabytes``.
        fences (Fences): of this server.
    """
    program = receive(calls)
    try:
        user = fences.leave_machine(program["folder"], megabytes=program["megabytes"])
        calls = _keep_only(calls)
        fences.give_up_rights(user, program["limits"])
    except BaseException:
        send(calls, {"fault": traceback.format_exc(limit=-3)})
        return
    send(calls, {"begins": True})  # what fails from here on is the completion's
    try:
        function = _load(program["code"], program["entry_point"])
    except BaseException as error:
        send(calls, {"error": _describe(error)})
        return
    send(calls, {"ready": True})
    iterators: list[Iterator[Any]] = []
    while True:
        send(calls, _answer(function, iterators, receive(calls)))


def _keep_only(calls: socket.socket) -> socket.socket:
    """Leaves one socket, as descriptor 3, and nothing to read from or to print to."""
    # Its own: flags of a file that is opened once for all would stay for the next completion.
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(calls.detach(), 3)
    os.closerange(4, LIBRARY_FD)
    os.closerange(LIBRARY_FD + 1, 65536)
    return socket.socket(fileno=3)


def _load(code: str, entry_point: str) -> Any:
    module = types.ModuleType("completion")
    sys.modules[module.__name__] = module  # dataclasses and typing look their module up
    exec(compile(code, "<completion>", "exec"), module.__dict__)
    function = module.__dict__[entry_point]
    if not callable(function):
        raise TypeError(f"{entry_point} is no function")
    return function


def _answer(function: Any, iterators: list[Iterator[Any]], call: dict[str, Any]) -> dict[str, Any]:
    """What became of a call, or of a step of the iterator that an earlier one returned."""
    if "next" in call:
        function = partial(next, iterators[call["next"]])
    printed, copies = io.StringIO(), Copies()
    answer: dict[str, Any] = {}
    try:
        args, kwargs = copies.load(call["arguments"], MAX_CALL_DEPTH)
        before = copies.contents()
        try:
            with contextlib.redirect_stdout(printed if call["prints"] else sys.stdout):
                returned = function(*args, **kwargs)
        except BaseException as error:
            answer = {"error": _describe(error)}
        else:
            if isinstance(returned, Iterator):
                iterators.append(returned)
                answer = {"iterator": len(iterators) - 1}
            else:
                answer = {"value": copies.dump(returned)}
        after = enumerate(copies.contents(len(before)))
        answer["changed"] = [(n, data) for n, data in after if data != before[n]]
    except NotPlain as error:
        answer = {"error": ["NotPlain", str(error), {}]}
    return {**answer, "printed": printed.getvalue()}


def _describe(error: BaseException) -> list[Any]:
    """The name of the nearest builtin exception, the message, and attributes of plain data."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    message, attributes = "", {}
    with contextlib.suppress(BaseException):
        message = str(error)
    for name in dir(error):
        with contextlib.suppress(BaseException):
            if not name.startswith("_") and getattr(error, name) is not None:
                attributes[name] = Copies().dump(getattr(error, name))
    return [names[0], message[:500], attributes]
