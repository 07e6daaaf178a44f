"""Ctrl-C and SIGTERM: a run ends soon and with a checkpoint, on all ranks at the same point.

A rollout stops between two tokens, and a reward is broken off, even one that hangs; their step is
done again when the run is resumed, with the same samples. An update and a save are waited for.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import torch

from torchtune_grpo.machine.parallel import Bulletin, gather_over_ranks, rank

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun and a scheduler may both hand on the same signal, one after the other.
ECHO_SECONDS = 1.0
POLL_SECONDS = 0.2

_active: Interrupts | None = None  # signals, too, are the whole process's


class Interrupted(KeyboardInterrupt):
    """The run was asked to end. As a KeyboardInterrupt, it is no failure of a reward."""


def exit_on_signals() -> None:
    """Lets signals end this process at once, by exit code (128 + signal), without a traceback."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    _install(leave)
    atexit.register(_install, signal.SIG_DFL)  # no exit any more, only a traceback


def is_interrupted() -> bool:
    """Whether the run is to end; what a rollout still makes is for nothing."""
    return _active is not None and _active.signal is not None


def check() -> None:
    """Raises on all ranks if one of them is to end; every rank has to call it.

    Raises:
        Interrupted: if so.
    """
    if _active is not None:
        _active.check()


def breakable(function: Callable[[], T]) -> T:
    """Calls a function that may hang. A signal breaks it off; it must not speak to other ranks.

    Raises:
        Interrupted: on all ranks, if one of them is to end.
    """
    return function() if _active is None else _active.breakable(function)


class Interrupts:
    """What signals do to a run; ``signal`` is the first that came."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._ended = False
        self._since = 0.0
        self._breaks = False  # the handler may raise
        self._told = False  # the next signal is another rank's, handed on
        self._random_state = torch.get_rng_state()
        # What a second Ctrl-C does.
        self.leave: Callable[[int], None] = lambda number: os._exit(128 + number)

    @property
    def exit_code(self) -> int:
        """0, or if a signal ended the run, 128 + its number, as shells and schedulers know it."""
        return 128 + self.signal if self.signal and self._ended else 0

    @contextmanager
    def handled(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within it, a signal ends the block at the next point where it may end.

        Torch's random state is then what it was at the last :meth:`boundary`. Off the main thread,
        where Python knows no handlers, only a signal to another rank does so.

        Args:
            stop (Callable[[], None]): called on all ranks when the block was ended; signals wait.
        """
        global _active
        self.signal, self._ended, _active = None, False, self
        before = _install(self._on_signal)
        left = threading.Event()
        bulletin = Bulletin.of_all_ranks()
        with ExitStack() as stack:
            if bulletin is not None:
                arrived = stack.enter_context(_arrivals())
                arguments = (bulletin, left, arrived, frozenset(before))
                listener = threading.Thread(target=self._listen, args=arguments, daemon=True)
                listener.start()
                stack.callback(listener.join)
            try:
                yield
            except Interrupted:
                self._ended = True
                torch.set_rng_state(self._random_state)
                stop()
            finally:
                _active = None
                left.set()
                for number, handler in before.items():
                    signal.signal(number, handler)

    def boundary(self) -> None:
        """What follows, up to the next update, may be dropped and done again.

        Raises:
            Interrupted: on all ranks, if one of them is to end.
        """
        self._random_state = torch.get_rng_state()
        self.check()

    def check(self) -> None:
        """See :func:`check`."""
        asked = [number for number in gather_over_ranks(self.signal) if number is not None]
        if asked:
            self.signal = asked[0]
            raise Interrupted

    def breakable(self, function: Callable[[], T]) -> T:
        """See :func:`breakable`."""
        result: Any = None
        try:
            try:
                self._breaks = True
                if self.signal is None:
                    result = function()
            finally:
                self._breaks = False
        except Interrupted:  # until all ranks know
            pass
        self.check()
        return result

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        told, self._told = self._told, False
        if self.signal is None:
            self.signal, self._since = number, time.monotonic()
            if rank() == 0:
                name = signal.Signals(number).name
                _say(f"{name}: ends soon, with a checkpoint. Ctrl-C again: at once, without one.")
        elif not told and time.monotonic() - self._since > ECHO_SECONDS:
            # Of torchrun, a second Ctrl-C arrives as SIGTERM; a scheduler may repeat its own.
            if signal.SIGINT in (number, self.signal):
                _say("")
                self.leave(number)
        if self._breaks:
            self._breaks = False
            raise Interrupted

    def _listen(
        self,
        bulletin: Bulletin,
        left: threading.Event,
        arrived: socket.socket,
        handled: frozenset[int],
    ) -> None:
        """Tells the other ranks of a signal, or hears of theirs: any may hang in a reward."""
        while not left.is_set():
            with suppress(TimeoutError):
                for number in handled.intersection(arrived.recv(64)):
                    return bulletin.post(str(number))
            if posted := bulletin.read():
                number = int(posted[0])
                if number in handled:
                    self._told = True
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
                else:
                    self.signal = number
                return None
        return None


@contextmanager
def _arrivals() -> Iterator[socket.socket]:
    """A socket with a byte for each signal, also while the main thread waits for other ranks.

    Python's own handlers run only when it does not.
    """
    ours, kernels = socket.socketpair()
    ours.settimeout(POLL_SECONDS)
    kernels.setblocking(False)
    on_main_thread = threading.current_thread() is threading.main_thread()
    with ours, kernels:
        before = signal.set_wakeup_fd(kernels.fileno()) if on_main_thread else -1
        try:
            yield ours
        finally:
            if on_main_thread:
                signal.set_wakeup_fd(before)


def _install(handler: Any) -> dict[int, Any]:
    """Sets the signals' handler, where there can be one; returns those that it replaces."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    for number, old in [*before.items()]:
        if old == signal.SIG_IGN:  # a shell's background job: Ctrl-C is meant for others
            del before[number]
        else:
            signal.signal(number, handler)
    return before


def _say(text: str) -> None:
    """A line of its own, below a progress bar; what Python buffers may be locked now."""
    begin = "\n" if sys.stderr.isatty() else ""
    os.write(2, f"{begin}{text}\n".encode() if text else begin.encode())
