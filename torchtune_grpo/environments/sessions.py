"""Sessions: one environment for each conversation, whose methods are called side by side."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torchtune_grpo.environments.results import call, text_of
from torchtune_grpo.rewards.workers import FunctionWorker


class SessionLost(RuntimeError):
    """A session that cannot go on: its process was killed, or it does not answer."""


@dataclass(frozen=True)
class Kind:
    """A kind of environment: how sessions with it are made, and what the policy may do.

    ``make`` makes the user's object, None if there are tools alone. ``hosted`` holds the arguments
    of ``Hosted`` if that is to be in a process of its own.
    """

    name: str
    make: Callable[[], Any] | None
    functions: Mapping[str, Callable[..., Any]]  # tools that are not methods
    schemas: Sequence[Mapping[str, Any]]  # of all tools
    timeout: float
    methods: Sequence[str] = ()  # that are tools
    has_step: bool = False
    has_reward: bool = False
    hosted: Mapping[str, Any] | None = None
    idle: list[Session] = field(default_factory=list)

    def session(self) -> Session:
        """Take a session that is not in use, or make a new one."""
        return self.idle.pop() if self.idle else Session(self)

    def close(self) -> None:
        """End the sessions; there are none in use."""
        while self.idle:
            self.idle.pop().close()


class Session:
    """An environment that is in use by one conversation at a time; ``reset`` begins the next.

    ``environment`` is what rewards get: the user's object or, if that is in a process of its own, a
    stand-in with its methods.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind, self._worker = kind, None
        if kind.hosted is not None:
            path = "torchtune_grpo.environments.hosted.Hosted"
            self._worker = FunctionWorker(path, kind.hosted, makes=True, timeout=kind.timeout)
            self.environment: Any = _StandIn(self)
        else:
            self.environment = None if kind.make is None else kind.make()

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method or a tool and wait for what it returns."""
        if self._worker is None:
            return call(self.kind.functions, self.environment, name, arguments, wait=_awaited)
        try:
            answer = self._worker(name=name, arguments=dict(arguments))
        except Exception as error:  # at its time limit; or it has ended
            raise SessionLost(str(error)) from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin a conversation about a row of the data; return the observation."""
        return None if self.kind.make is None else self.call("reset", row)

    def step(self, text: str) -> tuple[Any, float, bool]:
        """Pass a turn to the environment."""
        result: tuple[Any, float, bool] = self.call("step", {"text": text})
        return result

    def use_tools(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a message with the result of each call, or its error, as TRL gives them."""
        return [self._result(call) for call in calls]

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            if "error" in call:
                raise ValueError(call["error"])
            if name not in self.kind.functions and name not in self.kind.methods:
                raise ValueError(f"Tool {name} not found.")
            content = text_of(self.call(name, arguments))
        except SessionLost:
            raise
        except Exception as error:
            content = str({"error": str(error)})
            return {"role": "tool", "name": name, "content": content, "failed": True}
        return {"role": "tool", "name": name, "content": content}

    def close(self) -> None:
        """End the session, in the background if it does not end by itself."""

        def end() -> None:
            with suppress(Exception):
                if self._worker is None and callable(getattr(self.environment, "close", None)):
                    _awaited(self.environment.close())
            if self._worker is not None:
                self._worker.close()

        with suppress(Exception):
            in_thread(end).result(timeout=5.0)


class _StandIn:
    """Stands in for an environment in another process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, **arguments: Any) -> Any:
        return self._session.call(name, arguments)


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a thread of its own, which a process need not wait for when it ends."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # including sys.exit
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop that runs all async methods, whose connections outlive a call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _awaited(value: Any) -> Any:
    """Wait for what is awaitable, on the common loop."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return asyncio.run_coroutine_threadsafe(wait(), _loop()).result()
