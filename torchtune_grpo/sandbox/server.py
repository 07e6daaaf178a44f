"""A small process that forks tasks on demand, and ends them with all that they started.

A request with an open socket forks a task, which talks to the server's owner through it. A request
without one (a single byte) kills all descendants and is answered when none is left. When the owner
closes the server's socket or dies, the server kills them, removes the last task's folder and ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchtune_grpo.sandbox import syscalls
from torchtune_grpo.sandbox.wire import PeerGone, receive, send

Task = Callable[[socket.socket], None]

_PACKAGES = str(Path(__file__).parents[2])
# The import path ends up without this package's folder, which holds nothing for a completion.
_BOOT = (
    "import sys; sys.path.insert(0, {path!r}); from torchtune_grpo.sandbox.server import main; "
    "sys.path.remove({path!r}); main({role!r}, {fd}, {packages!r})"
)
_START_SECONDS = 60.0  # for a busy machine; it usually takes 0.1
_STOP_SECONDS = 10.0

# What a launcher such as torchrun tells its ranks.
_OF_RANKS = re.compile(
    "((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_ADDR|MASTER_PORT)$"
    "|TORCHELASTIC_|(TORCH_)?NCCL_"
)
# For processes that run users' code: sets have the same order in each run, and many share the CPUs.
_DEFAULTS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
# For processes that run foreign code: nothing of this process's environment, folder or output.
_APART: dict[str, object] = {
    "env": {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    "cwd": "/",
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}


class ServerLost(Exception):
    """Raised when a server process does not answer."""


class ServerProcess:
    """A process that runs ``main``, and the ``facts`` it sent."""

    def __init__(
        self, role: str, packages: Sequence[str] = (), setup: Mapping[str, object] | None = None
    ) -> None:
        ours, theirs = socket.socketpair()
        boot = _BOOT.format(path=_PACKAGES, role=role, fd=theirs.fileno(), packages=[*packages])
        if role == "objects":
            flags: list[str] = []
            env = {name: value for name, value in os.environ.items() if not _OF_RANKS.match(name)}
            settings: dict[str, Any] = {"env": {**_DEFAULTS, **env, "CUDA_VISIBLE_DEVICES": ""}}
        else:
            flags, settings = ["-I", "-S"], _APART
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", boot],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **settings,
            )
        self.pid, self._control = self._process.pid, ours
        with self._talking(_START_SECONDS):
            if setup is not None:
                send(ours, setup)
            self.facts = receive(ours)

    def start(self, folder: str = "") -> socket.socket:
        """Fork a task in the server, and return a socket to talk to it directly.

        If this process dies, the server removes the folder.
        """
        ours, theirs = socket.socketpair()
        with theirs, self._talking(_STOP_SECONDS):
            socket.send_fds(self._control, [b"+" + os.fsencode(folder)], [theirs.fileno()])
        return ours

    def end(self, task: int) -> None:
        """End a task of the role ``objects``, by its process, with all that it started."""
        with contextlib.suppress(OSError):  # the server has ended, and with it the task
            self._control.send(b"%d " % task)

    def stop(self) -> None:
        """End all tasks of the server, and return when none of their processes is left."""
        with self._talking(_STOP_SECONDS):
            self._control.send(b"-")
            if not self._control.recv(1):
                raise PeerGone("ended")

    def kill(self) -> None:
        """Have the server end itself and all tasks; another thread may be waiting for one."""
        with contextlib.suppress(OSError):  # closed already
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the server and all tasks, and leave no zombie."""
        self._control.close()  # the server kills its tasks and ends
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def _talking(self, seconds: float) -> Iterator[None]:
        try:
            self._control.settimeout(seconds)
            yield
        except (OSError, PeerGone) as error:
            self.close()
            raise ServerLost(f"a sandbox server does not answer: {error!r}") from error


# --- In the process -------------------------------------------------------------------------------


def main(role: str, fd: int, packages: Sequence[str]) -> None:
    """Serve the other end of the socket ``fd`` with tasks of one role: ``objects`` (each holds
    one), or ``code`` or ``code_without_namespaces``, where completions can import the packages in
    the folders ``packages``."""
    control = socket.socket(fileno=fd)
    if role == "objects":
        from torchtune_grpo.sandbox.objects import serve_objects

        serve_objects(control)
        return
    from torchtune_grpo.sandbox.checker import run_checker
    from torchtune_grpo.sandbox.fences import Fences

    try:
        fences = Fences(namespaces=role == "code", packages=packages)
    except OSError as error:
        send(control, {"refusal": str(error)})
        return
    send(control, fences.facts)
    _serve(control, partial(run_checker, fences=fences))


def _serve(control: socket.socket, task: Task) -> None:
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # adopts orphans, so that none gets away
    tasks: list[int] = []
    folder = b""
    while True:
        request, fds, _, _ = socket.recv_fds(control, 4097, 1)
        if fds:
            folder = request[1:]
            tasks.append(fork_task(control, task, fds[0]))
            os.close(fds[0])
            continue
        end_all(tasks)
        if not request:
            shutil.rmtree(folder, ignore_errors=True)
            return
        control.send(request)


def fork_task(control: socket.socket, task: Task, fd: int) -> int:
    """Fork a process for a task, which ends with this one and talks through a copy of ``fd``."""
    process = os.fork()
    if process:
        return process
    try:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        control.close()
        task(socket.socket(fileno=fd))
    finally:
        os._exit(0)


def end_all(tasks: list[int]) -> None:
    """Kill tasks, and all other descendants of this process."""
    for process in tasks:  # not yet reaped, so that the ids are still theirs
        os.kill(process, signal.SIGKILL)
    tasks.clear()
    for attempt in itertools.count():
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:  # also whatever a task has left behind
                pass
        except ChildProcessError:  # none is left
            return
        # Usually what is left dies with its parent, and in a namespace always does.
        if attempt > 2 and os.path.isdir("/proc"):
            if not (killer := os.fork()):  # reading /proc must not grow the server's memory
                _kill_others(os.getppid())
            os.waitpid(killer, 0)
        time.sleep(0.0005)


def _kill_others(server: int) -> NoReturn:
    # Stopped first, so that none forks while the others are killed.
    for action in (signal.SIGSTOP, signal.SIGKILL):
        for process in {*syscalls.processes_of(server)} - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, action)
    os._exit(0)
