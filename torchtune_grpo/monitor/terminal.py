"""Output of a run on a terminal: a line of progress that stays in place, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torchtune import utils
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtune_grpo.evaluation.statistics import Comparison, kind_of
from torchtune_grpo.machine.progress import Meter
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, RUN_FILE, Finding, Measured
from torchtune_grpo.rollout.request import Progress

log = utils.get_logger("INFO")

_OUTPUTS = {
    "run.html": "the run's page",
    "best": "the best checkpoint",
    RUN_FILE: "its numbers",
    COMPLETIONS_FILE: "what the policy wrote",
}


class ProgressLine(ExitStack):
    """A bar for the steps from ``done`` on; as a context, it keeps the log's lines apart from it.

    ``deciding`` maps the metric of the deciding reward to its title.
    """

    def __init__(self, steps: int, *, done: int, deciding: Mapping[str, str]) -> None:
        super().__init__()
        self._shown = {"reward": "reward", **deciding, "frac_informative_groups": "informative"}
        self.enter_context(logging_redirect_tqdm(loggers=[log]))
        self._meter = self.enter_context(Meter("Step", total=steps, done=done, is_run=True))

    def rollout(self, now: Progress) -> None:
        self._meter.show(f"rollout {now}")

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        parts = [f"{title} {metrics[n]:.2f}" for n, title in self._shown.items() if n in metrics]
        parts.append(f"{tqdm.format_sizeof(metrics['tokens_per_second'])} tok/s")
        self._meter.show(", ".join(parts), done=step)
        if self._meter.has_lines:
            log.info(self._meter.line())


def summary(
    evaluations: Sequence[Measured], findings: Sequence[Finding], folder: Path
) -> list[str]:
    """Return a run's last lines: first and last evaluation, open findings, where its files are."""
    lines: list[str] = []
    if compared := Comparison.of_run(evaluations):
        columns = [f"step {each['step']}" for each in compared.ends]
        lines += [
            *compared.table(f"{kind_of(compared.after)}, 95 % interval", columns),
            *compared.reasons,
        ]
    for finding in findings:
        since = f"{finding['name']} since step {finding['since']}"
        lines.append(f"{since}: {finding['evidence']} {finding['remedy']}")
    if not findings:
        lines.append("findings: none")
    files = {path: what for name, what in _OUTPUTS.items() if (path := folder / name).exists()}
    files |= {path: "the last checkpoint" for path in sorted(folder.glob("step_*"))[-1:]}
    width = max(map(len, map(str, files)), default=0)
    return lines + [f"{str(path).ljust(width)}  {what}" for path, what in files.items()]
