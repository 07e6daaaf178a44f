"""Hosts: where an adapter lives with its user's object, and how it is called.

A ``RemoteObject`` calls it in the main thread of a process of its own, as its author did; a
``ThreadHost`` in a thread of this process, for what no other process can import. Both give the same
results, keep the same time limit, and hand over copies.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from torchtune_grpo.environments.adapters import Adapter, Recipe
from torchtune_grpo.machine import loop
from torchtune_grpo.sandbox.remote import ObjectLost


class _Turns:
    """Lets one host at a time run its code, which then has the process's generators to itself.

    What they hold is the host's own while its code runs. A host whose time is over loses its turn.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder: ThreadHost | None = None
        self._outside: dict[str, object] = {}

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


def _states() -> dict[str, object]:
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

    def __init__(self, method: str, arguments: Sequence[object]) -> None:
        self.method, self.arguments = method, arguments
        self.begun, self.result = threading.Event(), Future[object]()


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
        self.states: dict[str, object] = {}  # of its generators

    @property
    def is_over(self) -> bool:
        """Whether it has closed itself, or never will."""
        return self._is_lost or (self._is_closing and not self._thread.is_alive())

    @property
    def environment(self) -> object:
        """The user's object."""
        return None if self._adapter is None else self._adapter.environment

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method returns, or raise what it raises; after its time, an ObjectLost."""
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
            raise ObjectLost(f"no answer within {self._timeout:g} s") from None

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

    def _wait(self, value: object) -> object:
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
        """Let the adapter close itself, and return at once."""
        self._calls.put(None)

    def wait_closed(self, until: float) -> None:
        if self._thread.is_alive() and not self._is_lost:
            self._thread.join(max(0.0, until - time.monotonic()))
