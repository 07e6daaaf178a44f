"""Closing what a process holds when it ends: by a return, an error or a signal.

What is left at the exit of Python, or at a signal that nobody handles, is closed here; a run closes
its own earlier.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterable
from typing import Protocol

CLOSE_SECONDS = 5.0  # for all together

_open: list[Closing] = []


class Closing(Protocol):
    """Something that takes time to close."""

    def begin_close(self) -> None:
        """Begin to close, and return at once."""
        ...

    def wait_closed(self, until: float) -> None:
        """Wait until it is closed, or until a time of ``time.monotonic``."""
        ...


def close_at_end(part: Closing) -> None:
    """Close a part when this process ends, unless ``close`` does so before."""
    if not _open:
        atexit.register(close_all)
        _handle_signals()
    _open.append(part)


def close(parts: Iterable[Closing]) -> None:
    """Close parts, all at once, in at most ``CLOSE_SECONDS``."""
    parts, until = list(parts), time.monotonic() + CLOSE_SECONDS
    for part in parts:
        if part in _open:
            _open.remove(part)
        part.begin_close()
    for part in parts:
        part.wait_closed(until)


def close_all() -> None:
    """Close all parts that are left."""
    close([*_open])


def _handle_signals() -> None:
    """Close all before a signal ends this process, where nothing else handles it."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # again, and it ends at once
    close_all()
    os.kill(os.getpid(), number)
