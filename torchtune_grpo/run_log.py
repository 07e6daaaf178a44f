"""Where a run's numbers go: the metric logger, the profiler, and the run's own record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import config, training

from torchtune_grpo.parallel import gather_over_ranks, rank
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory


class _SilentLogger:
    """Stands for the metric logger on all ranks but the first."""

    def log_config(self, config: Any) -> None: ...

    def log_dict(self, payload: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def make_metric_logger(node: DictConfig) -> Any:
    """The config's metric logger; only the first rank's logs anything."""
    return config.instantiate(node) if rank() == 0 else _SilentLogger()


def make_profiler(node: DictConfig | None) -> Any:
    """The config's profiler, or one that does nothing."""
    return training.DummyProfiler() if node is None else config.instantiate(node)[0]


class RunLog:
    """The run's own record, in files that a report or a notebook reads back.

    ``metrics.jsonl`` has one line a step, ``completions.jsonl`` some of each step's completions.
    With several ranks the first one writes, and the completions of all are recorded.

    Args:
        folder (Path): the run's folder.
        num_completions (int): completions kept a step, of each rank.
    """

    def __init__(self, folder: Path, *, num_completions: int) -> None:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / "metrics.jsonl"
        self._completions = folder / "completions.jsonl"
        self._num_completions = num_completions

    def keep_until(self, step: int) -> None:
        """Drops what was recorded after ``step``: a resumed run does those steps again."""
        for path in (self._metrics, self._completions) if rank() == 0 else ():
            records = read_jsonl(path) if path.exists() else []
            path.write_text("", encoding="utf-8")
            _append_jsonl(path, [record for record in records if record["step"] <= step])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a step's numbers."""
        _append_jsonl(self._metrics, [{"step": step, **_finite(values)}])

    def completions(self, step: int, trajectory: Trajectory, scores: RewardScores) -> None:
        """Appends the first completions of a step, with their rewards and advantages."""
        assert trajectory.advantages is not None
        records = []
        for row in range(min(self._num_completions, trajectory.num_rows)):
            records.append(
                {
                    "step": step,
                    "prompt": trajectory.prompts[row],
                    "completion": trajectory.completions[row],
                    "reward": scores.total[row].item(),
                    "rewards": _finite(dict(zip(scores.names, scores.scores[row].tolist()))),
                    "advantage": trajectory.advantages[row].item(),
                    "tokens": int(trajectory.response_lengths[row]),
                    "truncated": bool(trajectory.truncated[row]),
                    **{name: values[row] for name, values in scores.extra.items()},
                }
            )
        _append_jsonl(self._completions, sum(gather_over_ranks(records), []))


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has null for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _append_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    if rank() != 0:
        return
    # What rewards pass to log_extra may be anything; what JSON cannot hold is written as its text.
    lines = "".join(json.dumps(r, ensure_ascii=False, default=str) + "\n" for r in records)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(lines)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file, leaving out a line that a kill cut short."""
    records = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records
