"""A small process that forks tasks on demand, and ends them with all that they started.

It reads single bytes from its socket. One with an open socket forks a task, which talks to the
server's owner there; one without kills every descendant and is answered when none is left. When its
socket closes, because the owner closed it or died, the server kills them and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from torchtune_grpo.sandbox import kernel
from torchtune_grpo.sandbox.wire import send

Task = Callable[[socket.socket], None]


def main(role: str, fd: int) -> None:
    """Serve the other end of the socket ``fd`` with tasks of one role: ``function`` (a worker that
    calls one), ``code`` or ``code_without_namespaces``."""
    control = socket.socket(fileno=fd)
    task: Task
    if role == "function":
        from torchtune_grpo.sandbox.worker import run_worker as task

        facts = {}
    else:
        from torchtune_grpo.sandbox.checker import run_checker
        from torchtune_grpo.sandbox.fences import Fences

        try:
            fences = Fences(namespaces=role == "code")
        except OSError as error:
            send(control, {"refusal": str(error)})
            return
        task, facts = partial(run_checker, fences=fences), fences.facts
    send(control, facts)
    _serve(control, task)


def _serve(control: socket.socket, task: Task) -> None:
    kernel.adopt_orphans()
    tasks: list[int] = []
    while True:
        request, fds, _, _ = socket.recv_fds(control, 1, 1)
        if fds:
            tasks.append(_fork(control, task, fds[0]))
            os.close(fds[0])
            continue
        _end_all(tasks)
        if not request:
            return
        control.send(request)


def _fork(control: socket.socket, task: Task, fd: int) -> int:
    process = os.fork()
    if process:
        return process
    try:
        kernel.die_with_parent()
        os.setsid()
        control.close()
        task(socket.socket(fileno=fd))
    finally:
        os._exit(0)


def _end_all(tasks: list[int]) -> None:
    for process in tasks:  # not yet reaped, so that the ids are still theirs
        os.kill(process, signal.SIGKILL)
    tasks.clear()
    for attempt in itertools.count():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # also whatever a task has left behind
                pass
            # Usually what is left dies with its parent, and in a namespace always does.
            if attempt > 2 and os.path.isdir("/proc"):
                if not (killer := os.fork()):  # reading /proc must not grow the server's memory
                    _kill_others(os.getppid())
                os.waitpid(killer, 0)
            time.sleep(0.0005)
            continue
        return


def _kill_others(server: int) -> NoReturn:
    # Stopped first, so that none forks while the others are killed.
    for action in (signal.SIGSTOP, signal.SIGKILL):
        for process in {*kernel.processes_of(server)} - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, action)
    os._exit(0)
