"""What a run's folder holds, read for the page. Files that are missing are empty."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_grpo.jsonl import read_jsonl
from torchtune_grpo.plain import visible

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's record.

    Attributes:
        folder (Path): its ``output_dir``.
        steps (list[Record]): lines of metrics.jsonl, of steps.
        evaluations (list[Record]): lines of metrics.jsonl, of evaluations.
        scores (list[Record]): of evaluations.jsonl.
        findings (list[Record]): of findings.jsonl.
        prompts (list[Record]): of prompts.jsonl.
        starts (list[Record]): of starts.jsonl.
    """

    folder: Path
    steps: list[Record]
    evaluations: list[Record]
    scores: list[Record]
    findings: list[Record]
    prompts: list[Record]
    starts: list[Record]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads all but the completions.

        Raises:
            ValueError: if the folder is missing or holds no run.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give the output_dir of a run.")
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "starts.jsonl")):
            raise ValueError(f"{folder} has no metrics.jsonl; give the output_dir of a run.")
        metrics = _lines(folder, "metrics")
        return cls(
            folder=folder,
            steps=[each for each in metrics if not _is_evaluation(each)],
            evaluations=[each for each in metrics if _is_evaluation(each)],
            scores=_lines(folder, "evaluations"),
            findings=_lines(folder, "findings"),
            prompts=_lines(folder, "prompts"),
            starts=_lines(folder, "starts"),
        )

    @property
    def name(self) -> str:
        """The folder's name, as text."""
        return visible(self.folder.resolve().name)

    @property
    def steps_done(self) -> int:
        """Steps of training."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def config(self) -> Record:
        """Of the last start; empty if that is not known."""
        config = self.starts[-1].get("config") if self.starts else None
        return config if isinstance(config, dict) else {}

    def completions(self) -> list[Record]:
        """Lines of completions.jsonl."""
        return _lines(self.folder, "completions")


def number(value: object) -> float | None:
    """A finite number to five digits, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.5g}")


def flat(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each value of a config, under its key as one writes it on the command line."""
    children: Iterator[tuple[object, object]]
    if isinstance(node, Mapping) and node:
        children = iter(node.items())
    elif isinstance(node, list) and any(isinstance(item, (Mapping, list)) for item in node):
        children = iter(enumerate(node))
    else:
        yield visible(prefix), as_text(node)
        return
    for key, value in children:
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def as_text(value: object) -> str:
    """A text as it is, anything else as JSON; nothing that is invisible."""
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def script_json(value: object) -> str:
    r"""JSON as it may stand in a script element: without any "<", ">" or "&"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _lines(folder: Path, name: str) -> list[Record]:
    path = folder / f"{name}.jsonl"
    return read_jsonl(path) if path.is_file() else []


def _is_evaluation(record: Record) -> bool:
    return any(key.startswith("eval/") for key in record)
