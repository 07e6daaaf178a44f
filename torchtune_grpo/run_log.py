"""Where a run's numbers go: the metric logger, the profiler, and the run's own record."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_grpo.jsonl import read_jsonl, records
from torchtune_grpo.parallel import gather_over_ranks, on_first_rank, rank
from torchtune_grpo.plain import plain
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory

METRICS_FILE = "metrics.jsonl"


class _SilentLogger:
    """Stands for the metric logger on all ranks but the first."""

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def make_metric_logger(node: DictConfig) -> Any:
    """The config's metric logger; only the first rank's logs anything.

    Raises:
        ValueError: if it cannot be made: a package is missing, or its folder cannot be written.
    """
    if rank() > 0:
        return _SilentLogger()
    # What torchtune's loggers do at their end fails if their beginning has, and Python says so.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return config.instantiate(node)
    except Exception as error:
        message = f"metric_logger={node._component_}: {str(error).rstrip('.')}. {_remedy(error)}"
    finally:
        sys.unraisablehook = hook
    raise ValueError(message)


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError):
        return "Set output_dir or metric_logger.log_dir to a folder that can be written."
    other = "take torchtune.training.metric_logging.DiskLogger"
    if isinstance(error, ImportError):
        cause = error if error.name else error.__cause__
        package = str(getattr(cause, "name", None) or "NAME").partition(".")[0]
        return f"Install the package (pip install {package}), or {other}, which needs none."
    return f"Set what it asks for, or {other}."


def make_profiler(node: DictConfig | None) -> Any:
    """The config's profiler, or one that does nothing."""
    return training.DummyProfiler() if node is None else config.instantiate(node)[0]


class RunLog:
    """The run's own record, in files that a report or a notebook reads back.

    ``metrics.jsonl`` has a line for each step and one for each evaluation, ``completions.jsonl``
    some of each step's completions.
    With several ranks the first one writes, and the completions of all are recorded.

    Args:
        folder (Path): the run's folder.
        num_completions (int): completions kept a step, of each rank.
    """

    def __init__(self, folder: Path, *, num_completions: int) -> None:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / METRICS_FILE
        self._completions = folder / "completions.jsonl"
        self._num_completions = num_completions
        self._num_tokens = 0.0  # of the first rank's record

    def keep_until(self, step: int) -> None:
        """Drops what was recorded after ``step``: a resumed run does those steps again.

        Killed at any moment, it leaves either the old file or the new one, and next time works.
        """
        for path in (self._metrics, self._completions) if rank() == 0 else ():
            if not path.exists():
                continue
            beside = path.with_name(f"{path.name}.new")
            with beside.open("wb") as file:
                for line, record in records(path):
                    if record["step"] <= step:
                        file.write(line.rstrip(b"\n") + b"\n")
                        self._num_tokens = record.get("num_tokens", self._num_tokens)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)

    def has_evaluation(self, step: int) -> bool:
        """Whether the policy after so many steps was evaluated. Every rank has to ask."""
        return on_first_rank(self._find_evaluation, step)

    def _find_evaluation(self, step: int) -> bool:
        records = read_jsonl(self._metrics) if self._metrics.exists() else []
        return any(r["step"] == step and "eval/accuracy" in r for r in records)

    def metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Appends a line of numbers, of a step or of an evaluation.

        Returns:
            dict[str, float]: the same numbers, but ``num_tokens`` is that of the whole run.
        """
        logged = dict(values)
        if "num_tokens" in logged:
            logged["num_tokens"] = self._num_tokens = self._num_tokens + logged["num_tokens"]
        self._append(self._metrics, [plain({"step": step} | logged | {"step": step})])
        return logged

    def completions(self, step: int, trajectory: Trajectory, scores: RewardScores) -> None:
        """Appends the first completions of a step, with their rewards and advantages."""
        assert trajectory.advantages is not None
        records = []
        for row in range(min(self._num_completions, trajectory.num_rows)):
            record = {
                "step": step,
                "prompt": trajectory.prompts[row],
                "completion": trajectory.completions[row],
                "reward": scores.total[row],
                "rewards": dict(zip(scores.names, scores.scores[row].tolist())),
                "advantage": trajectory.advantages[row],
                "tokens": trajectory.response_lengths[row],
                "truncated": trajectory.truncated[row],
            }
            extra = {name: values[row] for name, values in scores.extra.items()}
            records.append(plain(record | extra))
        self._append(self._completions, sum(gather_over_ranks(records), []))

    def _append(self, path: Path, records: list[dict[str, Any]]) -> None:
        if rank() == 0:
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
