"""Signals end a run soon and with a checkpoint, on all ranks at the same point.

Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) set a flag. A rollout checks it between two
tokens and stops; a reward, which may hang, is interrupted by the signal itself. The ranks then
agree on whether to end. A resumed run repeats what was dropped, with the same samples. Updates and
saves are never interrupted. Outside a run, a signal kills the process.

torchrun passes a signal on to all of its ranks. If only one rank gets it, all end together, but a
reward that hangs on another rank delays them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from torchtune_grpo.machine.parallel import gather_over_ranks, rank

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 1.0  # torchrun and a scheduler may both pass on the same signal

_active: Interrupts | None = None  # one per process, as signal handlers are


class Interrupted(KeyboardInterrupt):
    """The run was asked to end; not an Exception, so that no reward counts as failed."""


def is_interrupted() -> bool:
    """Whether this rank was asked to end, so that a rollout would be dropped."""
    return _active is not None and _active.signal is not None


def check() -> None:
    """Raise Interrupted on all ranks if one of them was asked to end; every rank has to call it."""
    if _active is None:
        return
    signals = [number for number in gather_over_ranks(_active.signal) if number is not None]
    if signals:
        _active.signal = signals[0]
        raise Interrupted


def breakable(function: Callable[[], T]) -> T:
    """Call a function that a signal may interrupt, then ``check``.

    The function must not communicate with other ranks.
    """
    if _active is None:
        return function()
    result: Any = None
    with suppress(Interrupted):  # check() raises it on all ranks
        try:
            _active.breaks = True
            if _active.signal is None:
                result = function()
        finally:
            _active.breaks = False
    check()
    return result


class Interrupts:
    """A run's reaction to signals; ``signal`` is the first that arrived."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.breaks = False  # the handler may raise
        self.leave: Callable[[int, FrameType | None], object] = _leave  # called on a second Ctrl-C
        self._since = 0.0
        self._ended = False

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal that ended the run."""
        return 128 + self.signal if self.signal and self._ended else 0

    @contextmanager
    def handled(self, stop: Callable[[], None]) -> Iterator[None]:
        """End the block on a signal, where it may end, then call ``stop`` on all ranks."""
        global _active
        self.signal, self._ended, _active = None, False, self
        before = _install(self._on_signal)
        try:
            yield
        except Interrupted:
            self._ended = True
            stop()
        finally:
            if self.signal is not None:  # its echo would kill the process
                time.sleep(max(self._since + ECHO_SECONDS - time.monotonic(), 0.0))
            _active = None
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if rank() == 0:
                name = signal.Signals(number).name
                _say(
                    f"{name}: saving a checkpoint and stopping. Press Ctrl-C again to quit now "
                    "without saving."
                )
        elif time.monotonic() - self._since > ECHO_SECONDS:
            # torchrun passes a second Ctrl-C on as SIGTERM; a scheduler may repeat its SIGTERM, and
            # a user who has pressed Ctrl-C may close the terminal.
            if signal.SIGINT in (number, self.signal) and number != signal.SIGHUP:
                _say("")
                self.leave(number, frame)
        if self.breaks:
            self.breaks = False
            raise Interrupted


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def _install(handler: Any) -> dict[int, Any]:
    """Set the signals' handler and return the old handlers; only the main thread can do so.

    Ignored signals stay ignored: a shell's background jobs ignore Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    known: dict[int, object] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: old for number, old in known.items() if old != signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    return before


def _say(text: str) -> None:
    """Write a line below a progress bar, without Python's buffers, which may be locked now."""
    begin = "\n" if sys.stderr.isatty() else ""
    with suppress(OSError):  # the terminal is closed
        os.write(2, f"{begin}{text}\n".encode() if text else begin.encode())
