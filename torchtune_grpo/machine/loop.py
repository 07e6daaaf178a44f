"""The one asyncio loop of a process, for all awaitables of rewards.

It runs in a thread of its own until the process ends, so that connections, locks and semaphores of
one call still work in the next. Whatever a call raises, ``SystemExit`` included, is its caller's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None


def run(awaitable: Awaitable[T]) -> T:
    """Wait for what an awaitable returns or raises."""
    value, error = asyncio.run_coroutine_threadsafe(_outcome(awaitable), _running_loop()).result()
    if error is not None:
        raise error
    return value


async def _outcome(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """Return a result or an error: raised in a loop, SystemExit and others would end it."""
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


def _running_loop() -> asyncio.AbstractEventLoop:
    """Return the process's loop; start one if there is none, or after a fork."""
    global _loop, _thread
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_serve, args=(_loop,), daemon=True)
            _thread.start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    while True:
        with suppress(BaseException):  # a task that a call left behind has raised SystemExit
            loop.run_forever()


def in_thread(function: Callable[..., T], *args: Any) -> Future[T]:
    """Call a function in a thread of its own, which a process need not wait for when it ends."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who waits may leave; its result is then dropped

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # including sys.exit
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
