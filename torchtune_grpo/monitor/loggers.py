"""A logger for Trackio, beside torchtune's loggers, and tables of completions in those with any."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig
from torchtune.training.metric_logging import MetricLoggerInterface, save_config

from torchtune_grpo.config.text import visible


class TrackioLogger(MetricLoggerInterface):
    """Log to Trackio (``pip install trackio``); ``options`` are those of ``trackio.init``."""

    def __init__(self, project: str = "torchtune-grpo", **options: Any) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=project, **{"embed": False, **options})

    def log_config(self, config: DictConfig) -> None:
        save_config(config)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self._trackio.log(dict(payload), step=step)

    def close(self) -> None:
        self._trackio.finish()


def log_completions(logger: Any, groups: Sequence[Sequence[dict[str, Any]]], step: int) -> None:
    """Show groups of completions as a table with TRL's columns, if the logger has tables."""
    rows = [row for group in groups for row in group]
    tracker = getattr(logger, "_wandb", None) or getattr(logger, "_trackio", None)
    writer: Any = getattr(logger, "_writer", None)  # TensorBoard's, which shows Markdown
    if not rows or not (tracker or writer):
        return
    columns = ["step", "prompt", "completion", *rows[0]["rewards"], "advantage"]
    data = [
        [step, str(row["prompt"]), row["completion"], *row["rewards"].values(), row["advantage"]]
        for row in rows
    ]
    if tracker:
        logger.log_dict({"completions": tracker.Table(columns=columns, data=data)}, step=step)
    else:
        lines = [columns, ["---"] * len(columns), *data]
        text = "\n".join(" | ".join(map(_cell, line)) for line in lines)
        writer.add_text("completions", text, global_step=step)


def _cell(value: Any) -> str:
    """Return a value as the cell of a Markdown table, on one line."""
    return html.escape(visible(str(value))).replace("|", "&#124;").replace("\n", "<br>")
