"""What a run shows of its progress: one line, which stays in place on a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torchtune import utils
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_grpo.machine.parallel import rank
from torchtune_grpo.rollout import Progress

log = utils.get_logger("INFO")

# And it has ipywidgets; without them there are lines.
_IN_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)

# At 80 columns there is room for all of it in a run of 1,000 steps.
_FORMAT = "{desc}{n_fmt}/{total_fmt} {bar} <{remaining}{postfix}"


def make_bar(title: str, *, total: int, done: int = 0, leave: bool = True) -> Any:
    """A bar on the first rank's terminal, or in a notebook; elsewhere it shows nothing."""
    return tqdm(
        desc=title and f"{title} ",
        total=total,
        initial=done,
        leave=leave,
        bar_format=_FORMAT,
        dynamic_ncols=True,
        disable=rank() > 0 or (False if _IN_NOTEBOOK else None),
    )


class RunProgress:
    """A run's steps. Used as a context manager, it keeps the log's lines and the bar apart.

    Args:
        steps (int): of the whole run.
        done (int): those that a resumed run begins with.
        accuracy (str): the metric that is shown as the accuracy.
    """

    def __init__(self, steps: int, *, done: int, accuracy: str) -> None:
        self._steps, self._begun = steps, done
        self._accuracy = accuracy
        self._start = time.monotonic()
        self._bar = make_bar("", total=steps, done=done)
        self._open = ExitStack()

    def __enter__(self) -> RunProgress:
        self._open.enter_context(logging_redirect_tqdm(loggers=[log]))
        self._open.callback(self._bar.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def rollout(self, now: Progress) -> None:
        """Shows how far the step's rollout is."""
        self._bar.set_postfix_str(f"rollout {now}")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step."""
        shown = self._shown(metrics)
        if self._bar.disable:
            a_step = (time.monotonic() - self._start) / (step - self._begun)
            left = tqdm.format_interval(a_step * (self._steps - step))
            utils.log_rank_zero(log, f"Step {step}/{self._steps}: {shown}, {left} left")
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def _shown(self, metrics: Mapping[str, float]) -> str:
        names = {"reward": "reward", self._accuracy: "accuracy"}
        names["frac_informative_groups"] = "informative"
        parts = [f"{said} {metrics[n]:.2f}" for n, said in names.items() if n in metrics]
        parts.append(f"{tqdm.format_sizeof(metrics['tokens_per_second'])} tok/s")
        return ", ".join(parts)
