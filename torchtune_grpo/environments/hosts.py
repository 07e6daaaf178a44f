"""Hosts: where an adapter lives with its user's object, and how it is called.

A ``ProcessHost`` calls it in the main thread of a process of its own, as its author did; a
``ThreadHost`` in a thread of this process, for what no other process can import. Both give the same
results, keep the same time limit, and hand over copies.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import random
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from torchtune_grpo.environments.adapters import Adapter, Recipe, UserCodeError
from torchtune_grpo.machine import loop
from torchtune_grpo.sandbox.server import ServerLost, ServerProcess
from torchtune_grpo.sandbox.syscalls import seconds_waited
from torchtune_grpo.sandbox.wire import PeerGone, load, receive, send_bytes

_IMPORT_SECONDS = 120.0  # importing torch on a busy machine can take long


class HostLost(RuntimeError):
    """An adapter that is no more: it did not answer in time, or its process has ended."""


class Host(Protocol):
    """Calls an adapter's methods, one at a time, and makes it at the first call."""

    @property
    def is_over(self) -> bool:
        """Whether it has closed itself, or something else sees to that."""
        ...

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method returns; raises a UserCodeError, or HostLost after its time."""
        ...

    def begin_close(self) -> None:
        """Let the adapter close itself, and return at once."""
        ...

    def wait_closed(self, until: float) -> None:
        """Wait until it has closed itself, or until a time of ``time.monotonic``."""
        ...


# --- In a process of its own ----------------------------------------------------------------------


class HostServer:
    """The process that imports what hosts need, once, and forks one for each of them."""

    def __init__(self, dotpaths: Sequence[str]) -> None:
        self._dotpaths = [f"{Recipe.__module__}.{Recipe.__name__}", *dotpaths]
        self._lock = threading.Lock()
        self._server: ServerProcess | None = None

    def start(self) -> tuple[socket.socket, ServerProcess]:
        """Fork a process for a host; start the server if there is none, or if it was lost."""
        with self._lock:
            if self._server is not None:
                with suppress(ServerLost):
                    return self._server.start(), self._server
            self._server = self._begin()
            return self._server.start(), self._server

    def _begin(self) -> ServerProcess:
        setup = {"dotpaths": self._dotpaths, "import_path": sys.path, "folder": os.getcwd()}
        server = ServerProcess("objects", setup={**setup, "imports_once": True})
        if server.facts["threads"] > 1:  # no fork has them, so each host imports for itself
            server.close()
            server = ServerProcess("objects", setup={**setup, "imports_once": False})
        return server

    def begin_close(self) -> None:
        """Let all hosts that are left close themselves, and end those that take too long."""
        if self._server is not None:
            self._server.kill()

    def wait_closed(self) -> None:
        """Wait until all hosts have ended."""
        if self._server is not None:
            self._server.close()
        self._server = None


class ProcessHost:
    """A host in a process, which is killed with all that it started when its time is over."""

    def __init__(self, server: HostServer, recipe: Recipe, *, seed: int, timeout: float) -> None:
        self._hosts, self._recipe, self._seed, self._timeout = server, recipe, seed, timeout
        self._socket: socket.socket | None = None
        self._server: ServerProcess | None = None
        self._pid = 0
        self.is_over = False

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._socket is None:
                self._socket, self._server = self._hosts.start()
                self._socket.settimeout(_IMPORT_SECONDS)
                self._pid = receive(self._socket)
                self._ask(self._socket, self._recipe.make, [self._seed])
            return self._ask(self._socket, method, arguments)
        except TimeoutError:
            self._kill()
            text = f"no answer within {self._timeout:g} s; its processes were killed"
            raise HostLost(text) from None
        except (PeerGone, ServerLost) as error:
            self._kill()
            raise HostLost(f"its process ended ({error})") from None

    def _ask(self, sock: socket.socket, function: Any, arguments: Sequence[Any]) -> Any:
        request = pickle.dumps((function, arguments))
        sock.settimeout(self._timeout)
        send_bytes(sock, request)
        self._wait_for_answer(sock)
        answer = receive(sock)
        if "error" in answer:
            raise UserCodeError(answer["error"])
        return load(answer["value"])

    def _wait_for_answer(self, sock: socket.socket) -> None:
        """Wait until an answer begins to come; the process's waits for a CPU do not count."""
        begun, before, left = time.monotonic(), seconds_waited(self._pid), self._timeout
        while left > 0:
            sock.settimeout(left)
            with suppress(TimeoutError):
                sock.recv(1, socket.MSG_PEEK)
                return
            waited = seconds_waited(self._pid) - before
            left = self._timeout - (time.monotonic() - begun - waited)
        raise TimeoutError

    def _kill(self) -> None:
        if self._server is not None and self._pid and not self.is_over:  # then it closes itself
            self._server.end(self._pid)
        self.begin_close()
        self.wait_closed(0.0)

    def begin_close(self) -> None:
        self.is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # another thread may be waiting for it

    def wait_closed(self, until: float) -> None:
        """Let go of the process; its server waits for its end."""
        if self._socket is not None:
            self._socket.close()


# --- In a thread of this process ------------------------------------------------------------------


class _Turns:
    """Lets one host at a time run its code, which then has the process's generators to itself.

    What they hold is the host's own while its code runs. A host whose time is over loses its turn.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder: ThreadHost | None = None
        self._outside: dict[str, Any] = {}

    def take(self, host: ThreadHost) -> None:
        with self._free:
            self._free.wait_for(lambda: self._holder is None)
            self._holder, self._outside = host, _states()
            _restore(host.states)

    def give_up(self, host: ThreadHost) -> None:
        """End a host's turn, if it has not lost it."""
        with self._free:
            if self._holder is host:
                host.states = _states()
                _restore(self._outside)
                self._holder = None
                self._free.notify_all()


def _states() -> dict[str, Any]:
    """Return the states of the global generators, as far as they are imported."""
    states: dict[str, Any] = {"random": random.getstate()}
    if hasattr(sys.modules.get("numpy"), "random"):
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if hasattr(sys.modules.get("torch"), "default_generator"):
        states["torch"] = sys.modules["torch"].default_generator.get_state()
    return states


def _restore(states: dict[str, Any]) -> None:
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].default_generator.set_state(states["torch"])


_turns = _Turns()


class _Call:
    """A call of a host's thread; ``begun`` is set when it has its turn."""

    def __init__(self, method: str, arguments: Sequence[Any]) -> None:
        self.method, self.arguments = method, arguments
        self.begun, self.result = threading.Event(), Future[Any]()


class ThreadHost:
    """A host in a thread for its whole life; its sync code takes turns with that of all others.

    Async methods run side by side, on the process's loop. Code that hangs keeps its thread, which
    nothing can end, but not its turn.
    """

    def __init__(self, recipe: Recipe, *, seed: int, timeout: float) -> None:
        self._recipe, self._seed, self._timeout = recipe, seed, timeout
        self._adapter: Adapter | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._is_closing = self._is_lost = False
        self.states: dict[str, Any] = {}  # of its generators

    @property
    def is_over(self) -> bool:
        return self._is_lost or (self._is_closing and not self._thread.is_alive())

    @property
    def environment(self) -> Any:
        """The user's object."""
        return None if self._adapter is None else self._adapter.environment

    def call(self, method: str, *arguments: Any) -> Any:
        call = _Call(method, copy.deepcopy(arguments))
        if not self._thread.is_alive():
            self._thread.start()
        self._calls.put(call)
        call.begun.wait()  # others take as long as they may
        try:
            return call.result.result(timeout=self._timeout)
        except TimeoutError:
            if call.result.done():
                raise
            self._is_lost = True
            _turns.give_up(self)
            raise HostLost(f"no answer within {self._timeout:g} s") from None

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            _turns.take(self)
            call.begun.set()
            try:
                if self._adapter is None:
                    self._adapter = self._recipe.make(self._seed, self._wait)
                call.result.set_result(getattr(self._adapter, call.method)(*call.arguments))
            except BaseException as error:
                call.result.set_exception(error)
            finally:
                _turns.give_up(self)
        self._is_closing = True
        if self._adapter is not None:
            with suppress(BaseException):
                self._adapter.close()

    def _wait(self, value: Any) -> Any:
        """Wait for what is awaitable, while others have their turns."""
        if not inspect.isawaitable(value):
            return value
        if self._is_closing:
            return loop.run(value)
        _turns.give_up(self)
        try:
            return loop.run(value, self._timeout + 1)  # cancelled after the caller has left
        finally:
            _turns.take(self)

    def begin_close(self) -> None:
        self._calls.put(None)

    def wait_closed(self, until: float) -> None:
        if self._thread.is_alive() and not self._is_lost:
            self._thread.join(max(0.0, until - time.monotonic()))
