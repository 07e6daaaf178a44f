"""The process that runs a completion. It knows only the completion and what is asked of it.

Whatever the completion does to this process, only answers leave it, and the checker rebuilds them
as plain data. Other objects, such as generators, stay here, and the checker asks for their parts.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import operator
import os
import socket
import sys
import traceback
import types
from functools import partial
from typing import Any

from torchtune_grpo.sandbox.cases import Program, run_case
from torchtune_grpo.sandbox.fences import LIBRARY_FD, Fences
from torchtune_grpo.sandbox.wire import NotPlain, dump, load, receive, send


def run_candidate(calls: socket.socket, fences: Fences) -> None:
    """Confine this process, run a completion, and answer calls of its function.

    The program comes first: ``code``, ``entry_point``, ``takes_input`` (it is run on an exam's
    cases), ``folder``, ``limits`` and ``megabytes``.
    """
    program = receive(calls)
    try:
        user = fences.leave_machine(program["folder"], megabytes=program["megabytes"])
        calls = _keep_only(calls)
        fences.give_up_rights(user, program["limits"])
    except BaseException:
        send(calls, {"fault": traceback.format_exc(limit=-3)})
        return
    send(calls, {"begins": True})  # failures from here on are the completion's
    try:
        names = ("code", "entry_point", "takes_input")
        completion = _Completion(*(program[name] for name in names))
    except BaseException as error:
        send(calls, {"error": _describe(error)})
        return
    send(calls, {"ready": True})
    while True:
        send(calls, completion.answer(receive(calls)))


def _keep_only(calls: socket.socket) -> socket.socket:
    """Keep only one socket open, as descriptor 3, with nothing to read from or print to."""
    # Opened here, as flags of a file shared by all would carry over to the next completion.
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(calls.detach(), 3)
    os.closerange(4, LIBRARY_FD)
    os.closerange(LIBRARY_FD + 1, 65536)
    return socket.socket(fileno=3)


ENTRY, NAMES = 0, 1  # numbers of a completion's function or class, and of its namespace


class _Completion:
    """A completion that has run, and those of its objects that the checker knows by number."""

    def __init__(self, code: str, entry_point: str, takes_input: bool) -> None:
        module = types.ModuleType("completion")
        sys.modules["completion"] = module  # dataclasses and typing look it up
        names = vars(module)
        names["__file__"] = "completion.py"
        self._objects: dict[Any, Any] = {NAMES: names}
        if not entry_point:
            self._objects[ENTRY] = Program(code)
            return
        exec(compile(code, "<completion>", "exec"), names)
        entry = partial(run_case, names, entry_point) if takes_input else eval(entry_point, names)
        if not callable(entry):
            raise TypeError(f"{entry_point} is not a function")
        self._objects[ENTRY] = entry

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """Perform one call: return its value or error, what it printed, and changed arguments."""
        printed = io.StringIO()
        sent = [*call["args"], *call["kwargs"].values()]
        try:
            args = [load(data, self._find) for data in call["args"]]
            kwargs = {name: load(data, self._find) for name, data in call["kwargs"].items()}
            try:
                with contextlib.redirect_stdout(printed if call["prints"] else sys.stdout):
                    value = self._operation(call["do"], call["on"])(*args, **kwargs)
                    # A subclass of dict, say, that the completion defines is more than a dict.
                    own = call["do"] == "call" and type(value) is self._objects[call["on"]]
                    is_plain = not own or type(value).__module__ != "completion"
                    kept = dump(value, self._keep) if is_plain else ["object", *self._keep(value)]
                    answer = {"value": kept}
            except NotPlain:
                raise
            except BaseException as error:
                answer = {"error": _describe(error)}
            answer["changed"] = [
                [position, data]
                for position, value in enumerate([*args, *kwargs.values()])
                if isinstance(value, (list, dict, set))
                and (data := dump(value, self._keep)) != sent[position]
            ]
        except (NotPlain, RecursionError) as error:
            answer = {"error": ["NotPlain", str(error), None]}
        return {**answer, "printed": printed.getvalue()}

    def _operation(self, name: str, number: int) -> Any:
        known = self._objects[number]
        if name == "call":
            return known
        return partial(getattr(builtins, name, None) or getattr(operator, name), known)

    def _keep(self, value: object) -> list[object]:
        """Give an object a number, always the same one."""
        self._objects[id(value)] = value
        return [id(value), type(value).__name__]

    def _find(self, known: object, attributes: object = None) -> object:
        """Return the object of a number, or rebuild one that the test made of a prompt's class."""
        if attributes is None:
            return self._objects[known]
        kind = self._objects[NAMES][known]
        made = kind.__new__(kind)
        made.__dict__.update(load(attributes, self._find))
        return made


def _describe(error: BaseException) -> list[object]:
    """Return the nearest builtin exception's name, the message, and the arguments."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    message, arguments = "", None
    with contextlib.suppress(BaseException):
        message = str(error)[:500]
        arguments = dump(list(error.args))
    return [names[0], message, arguments]
