"""The process that runs a completion. It knows only the completion and the calls made to it.

Whatever the completion does to this process, only answers to calls leave it, which the checker
rebuilds as plain data.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import traceback
import types
from typing import Any

from torchtune_grpo.sandbox.fences import LIBRARY_FD, Fences
from torchtune_grpo.sandbox.wire import NotPlain, dump, load, receive, send


def run_candidate(calls: socket.socket, fences: Fences) -> None:
    """Confine this process, run a completion, and answer calls of its function.

    First comes the program: ``code``, ``entry_point``, ``folder``, ``limits`` and ``megabytes``.
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
        function = _load_function(program["code"], program["entry_point"])
    except BaseException as error:
        send(calls, {"error": _describe(error)})
        return
    send(calls, {"ready": True})
    while True:
        send(calls, _answer(function, receive(calls)))


def _keep_only(calls: socket.socket) -> socket.socket:
    """Leave one socket, as descriptor 3, and nothing to read from or to print to."""
    # Opened here: flags of a file that is opened once for all would stay for the next completion.
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(calls.detach(), 3)
    os.closerange(4, LIBRARY_FD)
    os.closerange(LIBRARY_FD + 1, 65536)
    return socket.socket(fileno=3)


def _load_function(code: str, entry_point: str) -> Any:
    module = types.ModuleType("completion")
    sys.modules[module.__name__] = module  # dataclasses and typing look their module up
    exec(compile(code, "<completion>", "exec"), module.__dict__)
    function = module.__dict__[entry_point]
    if not callable(function):
        raise TypeError(f"{entry_point} is not a function")
    return function


def _answer(function: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Call the function: its value or error, what it printed, and its changed arguments."""
    printed = io.StringIO()
    sent = [*call["args"], *call["kwargs"].values()]
    try:
        args = [load(data) for data in call["args"]]
        kwargs = {name: load(data) for name, data in call["kwargs"].items()}
        try:
            with contextlib.redirect_stdout(printed if call["prints"] else sys.stdout):
                answer = {"value": dump(function(*args, **kwargs))}
        except NotPlain:
            raise
        except BaseException as error:
            answer = {"error": _describe(error)}
        answer["changed"] = [
            [position, data]
            for position, value in enumerate([*args, *kwargs.values()])
            if isinstance(value, (list, dict, set)) and (data := dump(value)) != sent[position]
        ]
    except NotPlain as error:
        answer = {"error": ["NotPlain", str(error), None]}
    return {**answer, "printed": printed.getvalue()}


def _describe(error: BaseException) -> list[Any]:
    """Return the nearest builtin exception's name, the message, and the arguments."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    message, arguments = "", None
    with contextlib.suppress(BaseException):
        message = str(error)[:500]
        arguments = dump(list(error.args))
    return [names[0], message, arguments]
