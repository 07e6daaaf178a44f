"""The run's own record: the files that its page, a report or a notebook reads back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_grpo.config.text import plain
from torchtune_grpo.machine.parallel import on_first_rank, rank
from torchtune_grpo.monitor.jsonl import read_jsonl, records

METRICS_FILE = "metrics.jsonl"
COMPLETIONS_FILE = "completions.jsonl"
_OTHERS = ("prompts.jsonl", "evaluations.jsonl", "findings.jsonl")
# What completions.jsonl may grow to over a whole run, and what it may take at once.
_MAX_BYTES, _HEAD_START = 64 * 2**20, 2**20


class RunLog:
    """Files of JSON lines in the run's folder; with several ranks the first one writes.

    Args:
        folder (Path): the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        if rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_tokens = 0.0  # of the first rank's record

    def keep_until(self, step: int) -> None:
        """Drops what was recorded after ``step``: a resumed run does those steps again.

        Killed at any moment, it leaves either the old file or the new one, and next time works.
        """
        for name in (METRICS_FILE, COMPLETIONS_FILE, *_OTHERS) if rank() == 0 else ():
            path = self._folder / name
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

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of steps and evaluations so far; nothing but on the first rank."""
        path = self._folder / METRICS_FILE
        return read_jsonl(path) if rank() == 0 and path.exists() else []

    def has_evaluation(self, step: int) -> bool:
        """Whether the policy after so many steps was evaluated. Every rank has to ask."""
        return on_first_rank(self._has_evaluation, step)

    def _has_evaluation(self, step: int) -> bool:
        return any(r["step"] == step and "eval/accuracy" in r for r in self.read_metrics())

    def metrics(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Appends a line of numbers, of a step or of an evaluation.

        Returns:
            dict[str, float]: the same numbers, but ``num_tokens`` is that of the whole run.
        """
        logged = dict(values)
        if "num_tokens" in logged:
            logged["num_tokens"] = self._num_tokens = self._num_tokens + logged["num_tokens"]
        self.append(METRICS_FILE, step, [logged])
        return logged

    def groups(
        self, step: int, groups: Sequence[Sequence[Mapping[str, Any]]], *, share: float
    ) -> None:
        """Appends whole groups of a step to the completions, while there is room for them.

        Args:
            step (int): the step.
            groups (Sequence[Sequence[Mapping[str, Any]]]): a record for each completion.
            share (float): of the run that is done; so much of 64 MiB may be filled, and 1 MiB more.
        """
        path = self._folder / COMPLETIONS_FILE
        size = path.stat().st_size if path.exists() else 0
        for group in groups if rank() == 0 else ():
            lines = _lines(step, group)
            size += len(lines)
            if size > _HEAD_START + share * _MAX_BYTES:
                break
            _append(path, lines)

    def append(self, name: str, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines to a file of the folder."""
        if rank() == 0:
            _append(self._folder / name, _lines(step, records))


def _lines(step: int, records: Sequence[Mapping[str, Any]]) -> bytes:
    lines = (plain({"step": step} | dict(record) | {"step": step}) for record in records)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    return text.encode(errors="backslashreplace")


def _append(path: Path, lines: bytes) -> None:
    with path.open("ab") as file:
        file.write(lines)
