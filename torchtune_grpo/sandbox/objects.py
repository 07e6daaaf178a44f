"""Objects in processes of their own, which call their methods when the owner asks.

A small server imports what the objects need, once, and forks a process for each. When an object's
owner closes its socket or dies, the object's ``close`` is called; after ``CLOSE_SECONDS`` at most
its process ends, with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import pickle
import pkgutil
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from torchtune_grpo.sandbox import syscalls
from torchtune_grpo.sandbox.server import end_all, fork_task
from torchtune_grpo.sandbox.wire import PeerGone, dump, receive, receive_bytes, send

CLOSE_SECONDS = 5
_LOOK_SECONDS = 1.0  # between looks for objects that have ended by themselves


def serve_objects(control: socket.socket) -> None:
    """Fork a process for each socket that comes, and end those that the owner names."""
    setup = receive(control)
    os.chdir(setup["folder"])
    sys.path[:] = setup["import_path"]
    to_import = setup["dotpaths"]
    if setup["imports_once"]:
        _import(to_import)
        to_import = []
    # Threads do not survive a fork, and what they have locked stays locked. Libraries in C see to
    # their own, such as OpenBLAS.
    send(control, {"threads": threading.active_count()})
    gc.collect()
    gc.freeze()  # so that collections copy no memory that is shared
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    tasks: list[int] = []
    while True:
        if select.select([control], [], [], _LOOK_SECONDS if tasks else None)[0]:
            request, fds, _, _ = socket.recv_fds(control, 2**16, 1)
            if not request:
                break
            for fd in fds:
                tasks.append(fork_task(control, partial(_run_object, to_import=to_import), fd))
                os.close(fd)
            for task in map(int, request.replace(b"+", b" ").split()):
                if task in tasks:
                    os.kill(task, signal.SIGKILL)
                    os.waitid(os.P_PID, task, os.WEXITED | os.WNOWAIT)
        _look_after(tasks)
    end = time.monotonic() + CLOSE_SECONDS
    while tasks and time.monotonic() < end:
        _look_after(tasks)
        time.sleep(0.005)
    end_all(tasks)


def _import(dotpaths: Sequence[str]) -> None:
    for path in dotpaths:
        with contextlib.suppress(BaseException):  # an object that needs it says why it fails
            pkgutil.resolve_name(path)


def _look_after(tasks: list[int]) -> None:
    """Forget tasks that have ended, and kill what they have left behind."""
    if not _reap(tasks):
        return
    # A live task adopts its own orphans, so that all others are of tasks that have ended.
    while left := syscalls.processes_of(os.getpid(), without=tasks):
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.001)
        _reap(tasks)


def _reap(tasks: list[int]) -> bool:
    """Reap all children that have ended; return whether a task was among them."""
    before = len(tasks)
    with contextlib.suppress(ChildProcessError):  # none is left
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            if ended in tasks:
                tasks.remove(ended)
    return len(tasks) < before


# --- In an object's process -----------------------------------------------------------------------


def _run_object(requests: socket.socket, to_import: Sequence[str]) -> None:
    """Make the object with the first request's function, and answer the others with its methods.

    Requests are pickles, as the owner is trusted: a function or a method's name, and arguments.
    Answers are plain data.
    """
    requests.set_inheritable(False)  # a child that outlives the object must not hold it open
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    loop = asyncio.new_event_loop()  # one, for connections that outlive a call
    asyncio.set_event_loop(loop)

    def wait(value: object) -> object:
        return _awaited(value, loop) if inspect.isawaitable(value) else value

    _import(to_import)
    send(requests, os.getpid())
    made: object = None
    with contextlib.suppress(PeerGone):
        while True:
            data = receive_bytes(requests)
            try:
                method, arguments = pickle.loads(data)
                if made is None:
                    made, value = method(*arguments, wait), None
                else:
                    value = getattr(made, method)(*arguments)
                answer = {"value": dump(value)}
            except BaseException as error:
                text = str(error) or "".join(traceback.format_exception_only(error)).strip()
                answer = {"error": text}
            send(requests, answer)
    _close(getattr(made, "close", None))


def _awaited(awaitable: Awaitable[object], loop: asyncio.AbstractEventLoop) -> object:
    """Wait for what an awaitable returns; a task of it that raises SystemExit ends only itself."""

    async def outcome() -> tuple[object, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:
            return None, error

    task = loop.create_task(outcome())
    while not task.done():
        with contextlib.suppress(BaseException):
            loop.run_until_complete(task)
    value, error = task.result()
    if error is not None:
        raise error
    return value


def _close(close: Callable[[], object] | None) -> None:
    """Call an object's ``close``, for a limited time."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    signal.alarm(CLOSE_SECONDS)
    with contextlib.suppress(BaseException):
        if close is not None:
            close()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
