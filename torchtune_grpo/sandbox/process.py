"""The owner's side of a server process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtune_grpo.sandbox.wire import PeerGone, receive

_PACKAGES = str(Path(__file__).parents[2])
# The import path ends up without this package's folder, which holds nothing for a completion.
_BOOT = (
    "import sys; sys.path.insert(0, {path!r}); from torchtune_grpo.sandbox.server import main; "
    "sys.path.remove({path!r}); main({role!r}, {fd})"
)
_START_SECONDS = 60.0  # on a busy machine; it takes 0.1
_STOP_SECONDS = 10.0

# What a launcher such as torchrun says about its ranks.
_RANK_PREFIXES = ("TORCHELASTIC_", "NCCL_", "TORCH_NCCL_")
_RANK_NAMES = frozenset(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME "
    "ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
)

# For processes that run foreign code: nothing of this process's environment, folder or output.
_APART: dict[str, Any] = {
    "env": {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
    "cwd": "/",
    "stdout": subprocess.DEVNULL,
    "stderr": subprocess.DEVNULL,
}


class ServerLost(Exception):
    """A server process does not answer."""


def _rankless_environment() -> dict[str, str]:
    """Copy this process's environment without its rank and its GPUs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


class ServerProcess:
    """A process that runs :func:`torchtune_grpo.sandbox.server.main`, and the ``facts`` it sent."""

    def __init__(self, role: str) -> None:
        ours, theirs = socket.socketpair()
        trusted = role == "function"
        boot = _BOOT.format(path=_PACKAGES, role=role, fd=theirs.fileno())
        isolated = [] if trusted else ["-I", "-S"]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *isolated, "-c", boot],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                **({"env": _rankless_environment()} if trusted else _APART),
            )
        self._control = ours
        with self._talking(_START_SECONDS):
            self.facts = receive(ours)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def start(self, sock: socket.socket) -> None:
        """Fork a task there, which talks to the socket's other end without the server."""
        with self._talking(_STOP_SECONDS):
            socket.send_fds(self._control, [b"+"], [sock.fileno()])

    def stop(self) -> None:
        """End all tasks there, and return when no process of theirs is left."""
        with self._talking(_STOP_SECONDS):
            self._control.send(b"-")
            if not self._control.recv(1):
                raise PeerGone("ended")

    def kill(self) -> None:
        """Have the server end itself and all tasks, while another thread may wait for one."""
        with contextlib.suppress(OSError):  # closed already
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the server and all tasks, and leave no zombie."""
        self._control.close()  # the server kills its tasks and ends
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def _talking(self, seconds: float) -> Iterator[None]:
        try:
            self._control.settimeout(seconds)
            yield
        except (OSError, PeerGone) as error:
            self.close()
            raise ServerLost(f"a sandbox server does not answer: {error!r}") from error
