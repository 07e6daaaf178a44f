"""The side that runs a completion. It knows the completion and the calls made to it, nothing else.

Whatever the completion does to this process, all that leaves it is an answer to a call, which the
checker rebuilds as plain data and compares with what it expects.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torchtune_grpo.sandbox import _kernel
from torchtune_grpo.sandbox._landlock import restrict_files
from torchtune_grpo.sandbox._seccomp import restrict_calls
from torchtune_grpo.sandbox._values import MAX_CALL_DEPTH, NotPlain, dump, load
from torchtune_grpo.sandbox._wire import PeerGone, receive, send

# Imported before the first fork, so that no completion has to wait for them.
PRELOADED = (
    "bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib "
    "heapq itertools json math numbers operator random re statistics string typing"
).split()

MODULE = "completion"


def run_candidate(request: dict[str, Any], fds: list[int], *, paths: list[tuple[int, int]]) -> None:
    """Confines this process, runs a completion, and answers calls of its function.

    Args:
        request (dict[str, Any]): ``code``, ``entry_point``, ``folder``, ``limits``, ``megabytes``,
            ``uid``, ``namespaces`` and ``filter``.
        fds (list[int]): the checker's socket.
        paths (list[tuple[int, int]]): of :func:`_landlock.open_paths`.
    """
    calls = socket.socket(fileno=fds[0])
    try:
        _leave_the_machine(request, paths)
        calls = _keep_only(calls)
        _give_up_rights(request)
        function = _load(request["code"], request["entry_point"])
    except BaseException as error:
        send(calls, {"error": _describe(error)})
        return
    send(calls, {"ready": True})
    iterators: list[Iterator[Any]] = []
    while True:
        try:
            call = receive(calls)
        except PeerGone:
            return
        send(calls, _answer(function, iterators, call))


def _leave_the_machine(request: dict[str, Any], paths: list[tuple[int, int]]) -> None:
    folder, namespaces = request["folder"], request["namespaces"]
    if namespaces:
        _kernel.isolate(folder, megabytes=request["megabytes"])
    os.chdir(folder)
    random.seed()
    os.umask(0o077)
    _kernel.refuse_privileges()
    restrict_files(paths, writable=folder, folders=namespaces)


def _give_up_rights(request: dict[str, Any]) -> None:
    server, namespaces = os.getppid(), request["namespaces"]
    _kernel.set_limits(request["limits"])
    _kernel.drop_privileges(request["uid"], new_user_namespace=namespaces)
    _kernel.die_with_parent()  # once more: a change of the user undoes it
    if os.getppid() != server:
        os._exit(1)
    if request["filter"]:
        restrict_calls(files=namespaces)


def _keep_only(calls: socket.socket) -> socket.socket:
    """Leaves one socket, as descriptor 3, and nothing to read from or to print to."""
    null = os.open("/dev/null", os.O_RDWR)
    # Moved up first, so that no target below is one of the sources.
    high, null = os.dup2(calls.fileno(), 1000), os.dup2(null, 1001)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.dup2(high, 3)
    calls.detach()
    os.closerange(4, _kernel.LIBRARY_FD)
    os.closerange(_kernel.LIBRARY_FD + 1, 65536)
    return socket.socket(fileno=3)


def _load(code: str, entry_point: str) -> Any:
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses and typing look their module up
    exec(compile(code, "<completion>", "exec"), module.__dict__)
    function = module.__dict__[entry_point]
    if not callable(function):
        raise TypeError(f"{entry_point} is no function")
    return function


def _answer(function: Any, iterators: list[Iterator[Any]], call: dict[str, Any]) -> dict[str, Any]:
    """What became of a call, or of a step of the iterator that an earlier one returned."""
    if "next" in call:
        function = partial(next, iterators[call["next"]])
    printed = io.StringIO()
    try:
        arguments = load(call["arguments"], MAX_CALL_DEPTH)
        before = dump(arguments, MAX_CALL_DEPTH)
        with contextlib.redirect_stdout(printed if call["prints"] else sys.stdout):
            answer = _outcome(partial(function, *arguments[0], **arguments[1]), iterators)
        after = dump(arguments, MAX_CALL_DEPTH)
        if after != before:
            answer["arguments"] = after
    except NotPlain as error:
        answer = {"error": ["NotPlain", str(error), {}]}
    return {**answer, "printed": printed.getvalue()}


def _outcome(function: Callable[[], Any], iterators: list[Iterator[Any]]) -> dict[str, Any]:
    try:
        returned = function()
        if isinstance(returned, Iterator):
            iterators.append(returned)
            return {"iterator": len(iterators) - 1}
        return {"value": dump(returned)}
    except NotPlain:
        raise
    except BaseException as error:
        return {"error": _describe(error)}


def _describe(error: BaseException) -> list[Any]:
    """The name of the nearest builtin exception, the message, and attributes of plain data."""
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    message, attributes = "", {}
    with contextlib.suppress(BaseException):
        message = str(error)
    for name in dir(error):
        with contextlib.suppress(BaseException):
            if not name.startswith("_") and getattr(error, name) is not None:
                attributes[name] = dump(getattr(error, name))
    return [names[0], message[:500], attributes]
