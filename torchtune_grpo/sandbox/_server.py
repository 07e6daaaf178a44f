"""A small process that forks tasks on demand, and ends them with all that they started.

It reads two requests from its socket: ``start`` forks a task, ``stop`` kills every descendant and
answers when none is left. When the socket closes, because its owner closed it or died, it kills
them all and ends. What a task is to do comes in an open file that only the task reads.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from torchtune_grpo.sandbox import _kernel
from torchtune_grpo.sandbox._wire import PeerGone, parse, receive_bytes, send

MAX_FDS = 4

# A task gets its request and the open files that came with it.
Task = Callable[[dict[str, Any], list[int]], None]


def serve(control: socket.socket, task: Task, *, pid_namespace: int | None = None) -> None:
    """Serves until the socket closes; never returns in the processes that it forks.

    Args:
        control (socket.socket): the owner's requests.
        task (Task): what a forked process does.
        pid_namespace (int | None): the open file of the pid namespace whose first process this is;
            each task gets another one below it. None = there are none.
    """
    tasks: list[int] = []
    if pid_namespace is None:
        _kernel.adopt_orphans()

    def sweep() -> None:
        if pid_namespace is None:
            _sweep_descendants(tasks)
        else:
            _sweep_namespace()
        tasks.clear()

    while True:
        try:
            data, fds = receive_bytes(control, max_fds=MAX_FDS)
            request = parse(data)
        except PeerGone:
            sweep()
            return
        if request["do"] == "start":
            if pid_namespace is not None:
                _kernel.renew_pid_namespace(pid_namespace)
            tasks.append(_fork(control, task, *fds))
            for fd in fds:
                os.close(fd)
        else:
            sweep()
            send(control, {"stopped": True})


def _fork(control: socket.socket, task: Task, request: int, *fds: int) -> int:
    server = os.getpid()
    process = os.fork()
    if process:
        return process
    try:
        _kernel.die_with_parent()
        if os.getppid() not in (server, 0):  # 0 from a pid namespace, which ends with the server
            os._exit(1)  # the server died in between
        os.setsid()
        control.close()
        with open(request, "rb") as file:
            file.seek(0)
            content = parse(file.read())
        task(content, list(fds))
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


def _sweep_descendants(tasks: list[int]) -> None:
    for process in tasks:  # not yet reaped, so that the ids are still theirs
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    # Whatever a task has left behind is this process's child now. Mostly there is nothing, and no
    # need to look through the whole machine's processes.
    while not _has_no_child():
        # Stopped first, so that none forks while the others are killed.
        for action in (signal.SIGSTOP, signal.SIGKILL):
            for process in _kernel.processes_of(os.getpid()):
                try:
                    os.kill(process, action)
                except ProcessLookupError:
                    pass
        time.sleep(0.001)
        _reap(os.WNOHANG)


def _has_no_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _reap(options: int = 0) -> None:
    """Waits for all children; orphans of killed ones become children on the way."""
    while True:
        try:
            process, _ = os.waitpid(-1, options)
        except ChildProcessError:
            return
        if not process:
            return  # WNOHANG, and none has ended
