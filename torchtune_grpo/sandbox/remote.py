"""Objects in processes of their own, from their owner's side; objects.py is the other."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torchtune_grpo.sandbox.server import ServerLost, ServerProcess
from torchtune_grpo.sandbox.syscalls import seconds_waited
from torchtune_grpo.sandbox.wire import PeerGone, load, receive, send_bytes, talking

_IMPORT_SECONDS = 120.0  # importing torch on a busy machine can take long


class ObjectError(Exception):
    """An error that an object's code raised, with its message."""


class ObjectLost(RuntimeError):
    """Raised for a lost object: it did not answer in time, or its process has ended."""

    def __init__(self, text: str, *, is_late: bool = False) -> None:
        super().__init__(text)
        self.is_late = is_late


class ObjectServer:
    """The process that imports what objects need, once, and forks one for each of them."""

    def __init__(self, dotpaths: Sequence[str] = ()) -> None:
        self._dotpaths = [*dotpaths]
        self._lock = threading.Lock()
        self._server: ServerProcess | None = None

    def start(self) -> tuple[socket.socket, ServerProcess]:
        """Fork a process for an object; start the server if there is none, or if it was lost."""
        with self._lock:
            if self._server is not None:
                with suppress(ServerLost):
                    return self._server.start(), self._server
            self._server = self._begin()
            return self._server.start(), self._server

    def _begin(self) -> ServerProcess:
        setup = {"dotpaths": self._dotpaths, "import_path": sys.path, "folder": os.getcwd()}
        server = ServerProcess("objects", setup={**setup, "imports_once": True})
        if server.facts["threads"] > 1:  # no fork has them, so each object imports for itself
            server.close()
            server = ServerProcess("objects", setup={**setup, "imports_once": False})
        return server

    def close(self) -> None:
        """Let all objects that are left close themselves; those that take too long are ended."""
        if self._server is not None:
            self._server.close()
        self._server = None


class RemoteObject:
    """An object whose process is killed, with all that it started, when a call's time is over.

    ``make(*arguments, wait)`` makes it in that process, before the first call. What the object's
    code raises becomes an ObjectError; a process that is late or has ended, an ObjectLost.
    """

    def __init__(
        self,
        server: ObjectServer,
        make: Callable[..., object],
        *arguments: object,
        timeout: float,
    ) -> None:
        self._objects, self._make, self._timeout = server, (make, arguments), timeout
        self._socket: socket.socket | None = None
        self._server: ServerProcess | None = None
        self._pid = 0
        self.is_over = False
        self._end = "it was closed"

    def call(self, method: str, *arguments: Any, times: int = 1) -> Any:
        """Return what a method returns; it may take ``times`` the time of a call."""
        try:
            self.start()
            return self._ask((method, arguments), self._timeout * times)
        except (TimeoutError, PeerGone, ServerLost) as error:
            raise self._lost(error) from None

    def start(self) -> None:
        """Make the object, if that was not done yet."""
        if self.is_over:
            raise ObjectLost(self._end)
        if self._socket is not None:
            return
        try:
            self._socket, self._server = self._objects.start()
            self._socket.settimeout(_IMPORT_SECONDS)
            self._pid = receive(self._socket)
            self._ask(self._make, self._timeout)
        except (TimeoutError, PeerGone, ServerLost) as error:
            raise self._lost(error) from None

    def _ask(self, request: tuple[object, Sequence[object]], seconds: float) -> object:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        send_bytes(self._socket, pickle.dumps(request))
        self._wait_for_answer(self._socket, seconds)
        answer = receive(self._socket)
        if "error" in answer:
            raise ObjectError(answer["error"])
        return load(answer["value"])

    def _wait_for_answer(self, sock: socket.socket, seconds: float) -> None:
        """Wait until an answer begins to come; the process's waits for a CPU do not count."""
        begun, before, left = time.monotonic(), seconds_waited(self._pid), seconds
        while left > 0:
            with suppress(TimeoutError), talking():
                sock.settimeout(left)
                sock.recv(1, socket.MSG_PEEK)
                return
            waited = seconds_waited(self._pid) - before
            left = seconds - (time.monotonic() - begun - waited)
        raise TimeoutError

    def _lost(self, error: Exception) -> ObjectLost:
        self.kill()
        is_late = isinstance(error, TimeoutError)
        self._end = f"its process ended ({error})"
        if is_late:
            self._end = f"no answer within {self._timeout:g} s; its processes were killed"
        return ObjectLost(self._end, is_late=is_late)

    def kill(self) -> None:
        """End the process with all that it started; another thread may be waiting for a call."""
        if self._server is not None and self._pid and not self.is_over:  # then it closes itself
            self._server.end(self._pid)
        self.close()

    def close(self) -> None:
        """Let the object close itself; its server waits for its end."""
        self.is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # another thread may be waiting for it
            self._socket.close()
