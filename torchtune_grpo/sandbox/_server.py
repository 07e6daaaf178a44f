"""A small process that forks tasks on demand, and ends them with all that they started.

It reads two requests from its socket: ``start`` forks a task, ``stop`` kills every descendant and
answers when none is left. When the socket closes, because its owner closed it or died, it kills
them all and ends.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from torchtune_grpo.sandbox import _kernel
from torchtune_grpo.sandbox._wire import PeerGone, parse, receive_bytes, send

MAX_FDS = 4

# A task gets its request and the open files that came with it.
Task = Callable[[dict[str, Any], list[int]], None]


def serve(control: socket.socket, task: Task, *, owns_pid_namespace: bool) -> None:
    """Serves until the socket closes; never returns in the processes that it forks.

    Args:
        control (socket.socket): the owner's requests.
        task (Task): what a forked process does.
        owns_pid_namespace (bool): whether this is the first process of a pid namespace.
    """
    sweep = _sweep_namespace if owns_pid_namespace else _sweep_descendants
    if not owns_pid_namespace:
        _kernel.adopt_orphans()
    while True:
        try:
            data, fds = receive_bytes(control, max_fds=MAX_FDS)
            request = parse(data)
        except PeerGone:
            sweep()
            return
        if request["do"] == "start":
            _fork(control, task, request, fds)
            for fd in fds:
                os.close(fd)
        else:
            sweep()
            send(control, {"stopped": True})


def _fork(control: socket.socket, task: Task, request: dict[str, Any], fds: list[int]) -> None:
    server = os.getpid()
    if os.fork():
        return
    try:
        _kernel.die_with_parent()
        if os.getppid() != server:
            os._exit(1)  # the server died in between
        os.setsid()
        control.close()
        task(request, fds)
    finally:
        os._exit(0)


def _sweep_namespace() -> None:
    # From the first process of a pid namespace, kill(-1) reaches all others at once: a process
    # that is just forking is either hit itself or its child is.
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    _reap()


def _sweep_descendants() -> None:
    while True:
        # Stopped first, so that none forks while the others are killed.
        for action in (signal.SIGSTOP, signal.SIGKILL):
            for process in _kernel.processes_of(os.getpid()):
                try:
                    os.kill(process, action)
                except ProcessLookupError:
                    pass
        if not _kernel.processes_of(os.getpid()):
            break
    _reap()


def _reap() -> None:
    """Waits for all children; orphans of killed ones become children on the way."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
