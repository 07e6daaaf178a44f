"""The owner's side: a server process, started when needed and replaced when lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtune_grpo.sandbox._wire import PeerGone, receive, send

_PACKAGES = str(Path(__file__).parents[2])
# The import path ends up without this package's folder, which holds nothing for a completion.
_BOOT = (
    "import sys; sys.path.insert(0, {path!r}); from torchtune_grpo.sandbox._main import main; "
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
    """This process's environment without its rank and its GPUs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_NAMES and not name.startswith(_RANK_PREFIXES)
    }
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


class ServerProcess:
    """A process that runs :func:`torchtune_grpo.sandbox._server.serve`.

    Args:
        role (str): as in :func:`torchtune_grpo.sandbox._main.main`.
    """

    def __init__(self, role: str) -> None:
        ours, theirs = socket.socketpair()
        trusted = role == "reward"
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
        self.facts = self._ask(_START_SECONDS)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def start(self, request: dict[str, Any], *, fds: Sequence[int] = ()) -> None:
        """Forks a task there. The task alone reads the request: what two of them are asked is
        never in one process's memory.

        Raises:
            ServerLost: if the server is gone; it is closed then.
        """
        with open(os.memfd_create("request"), "wb", buffering=0) as file:
            file.write(json.dumps(request).encode())
            self._send({"do": "start"}, [file.fileno(), *fds])

    def request_stop(self) -> None:
        """Asks for the end of all that runs there; :meth:`await_stop` waits for it."""
        self._send({"do": "stop"})

    def await_stop(self) -> None:
        """Returns when no process of any task is left.

        Raises:
            ServerLost: if that cannot be had; everything is killed then all the same.
        """
        self._ask(_STOP_SECONDS)

    def close(self) -> None:
        """Ends the server and all that runs there, and leaves no zombie."""
        self._control.close()  # the server kills its tasks and ends
        try:
            self._process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        try:
            send(self._control, message, fds=fds)
        except PeerGone as error:
            self.close()
            raise ServerLost(f"a sandbox server ended: {error}") from error

    def _ask(self, seconds: float) -> Any:
        try:
            return receive(self._control, deadline=time.monotonic() + seconds)
        except (PeerGone, TimeoutError) as error:
            self.close()
            raise ServerLost(f"a sandbox server did not answer: {error!r}") from error
