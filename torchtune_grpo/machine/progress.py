"""Progress of something long: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from threading import Event, Thread

from tqdm import autonotebook, std
from tqdm.auto import tqdm

from torchtune_grpo.machine.parallel import rank

LINE_SECONDS = 30.0  # a file, which has no bar, gets a line at least so often
# tqdm.auto is the notebook's bar where ipywidgets is installed; without it there are lines.
_IN_NOTEBOOK = autonotebook.tqdm is not std.tqdm
# In a run of 1,000 steps all of it fits into 80 columns.
BAR_FORMAT = "{desc}{n_fmt}/{total_fmt} {bar} <{remaining}{postfix}"


class Meter(AbstractContextManager["Meter"]):
    """Shows on the first rank how much of a total is done, and what is going on.

    Without a bar, a line says so about every half minute, whatever the process is busy with. Of
    meters within each other, the innermost speaks. That of a whole run, ``is_run``, stays on the
    terminal at the end.
    """

    _open: list[Meter] = []

    def __init__(self, title: str, *, total: int, done: int = 0, is_run: bool = False) -> None:
        self._title, self._total, self._first = title, total, done
        self.done, self.tokens = done, 0  # tokens sampled since the start
        self._text = ""
        self._bar = tqdm(
            desc="" if is_run else f"{title} ",
            total=total,
            initial=done,
            leave=is_run,
            bar_format=BAR_FORMAT,
            dynamic_ncols=True,
            disable=rank() > 0 or (False if _IN_NOTEBOOK else None),
        )
        self._start = self._said = time.monotonic()
        self._is_over = Event()
        Meter._open.append(self)
        self.has_lines = bool(self._bar.disable) and rank() == 0
        if self.has_lines:
            Thread(target=self._keep_talking, daemon=True).start()

    def show(self, text: str = "", *, done: int | None = None, tokens: int = 0) -> None:
        """Note how much is done; tokens are shown as a rate."""
        if tokens:
            self.tokens = tokens
            rate = tqdm.format_sizeof(tokens / (time.monotonic() - self._start))
            text = f"{text}, {rate} tok/s".removeprefix(", ")
        self._text = text
        self._bar.set_postfix_str(text, refresh=done is None)
        if done is not None:
            self._bar.update(done - self.done)
            self.done = done

    def skip(self, count: int) -> None:
        """Note that so much was done before, which says nothing about the time left."""
        self._first += count
        self.show(done=self.done + count)

    def line(self) -> str:
        """Return a line that says how much is done, and the time left; the next one can wait."""
        self._said = time.monotonic()
        left = ""
        if done := self.done - self._first:
            seconds = (self._said - self._start) / done * (self._total - self.done)
            left = f", {tqdm.format_interval(seconds)} left"
        return f"{self._title} {self.done}/{self._total}: {self._text or 'begins'}{left}"

    def _keep_talking(self) -> None:
        while not self._is_over.wait(self._said + LINE_SECONDS - time.monotonic()):
            if time.monotonic() >= self._said + LINE_SECONDS:
                line = self.line()
                if Meter._open[-1:] == [self]:
                    # Not by the log, which a plan silences.
                    print(line, file=sys.stderr, flush=True)

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._bar.close()
        Meter._open.remove(self)
