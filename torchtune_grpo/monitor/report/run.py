"""What a run's folder holds, read for the page. Files that are missing are empty."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_grpo.config.text import visible
from torchtune_grpo.monitor.jsonl import read_jsonl

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's record: the lines of its files, those of metrics.jsonl in two lists."""

    folder: Path  # its output_dir
    steps: list[Record]
    evaluations: list[Record]
    scores: list[Record]  # of evaluations.jsonl
    findings: list[Record]
    prompts: list[Record]
    starts: list[Record]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads all but the completions.

        Raises:
            ValueError: if the folder is missing or holds no run.
        """
        if not any((folder / name).is_file() for name in ("metrics.jsonl", "starts.jsonl")):
            what = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
            raise ValueError(f"{folder} {what}; give the output_dir of a run.")
        of_kind: tuple[list[Record], list[Record]] = ([], [])
        for record in _lines(folder, "metrics"):
            of_kind[any(key.startswith("eval/") for key in record)].append(record)
        names = ("evaluations", "findings", "prompts", "starts")
        return cls(folder, *of_kind, *(_lines(folder, name) for name in names))

    @property
    def name(self) -> str:
        """The folder's name, as text."""
        return visible(self.folder.resolve().name)

    @property
    def steps_done(self) -> int:
        """Steps of training."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def score_names(self) -> list[str]:
        """The evaluations' shares of right answers: accuracy, pass@1, pass@2, ..., maj@k."""
        found = (
            re.fullmatch(r"eval/(accuracy|pass@|maj@)(\d*)", name)
            for name in names_in(self.evaluations)
        )
        kinds = [(match[1], int(match[2] or 0)) for match in found if match]
        kinds.sort(key=lambda kind: (kind[0] != "accuracy", kind[0] == "maj@", kind[1]))
        return [f"{name}{k or ''}" for name, k in kinds]

    @property
    def config(self) -> Record:
        """Of the last start; empty if that is not known."""
        config = self.starts[-1].get("config") if self.starts else None
        return config if isinstance(config, dict) else {}

    def completions(self) -> list[Record]:
        """Lines of completions.jsonl."""
        return _lines(self.folder, "completions")


def names_in(records: Iterable[Record]) -> list[str]:
    """Each name that occurs, once, sorted."""
    return sorted({name for record in records for name in record})


def number(value: object) -> float | None:
    """A finite number to five digits, or None."""
    if type(value) is float:
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value if type(value) is int else None


def flat(node: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each value of a config, under its key as one writes it on the command line."""
    children: Iterable[tuple[object, object]] = ()
    if isinstance(node, Mapping):
        children = node.items()
    elif isinstance(node, list) and any(isinstance(item, (Mapping, list)) for item in node):
        children = enumerate(node)
    if not children:
        yield visible(prefix), as_text(node)
    for key, value in children:
        yield from flat(value, f"{prefix}.{key}" if prefix else str(key))


def as_text(value: object) -> str:
    """A text as it is, anything else as JSON; nothing that is invisible."""
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def script_json(value: object) -> str:
    """JSON as it may stand in a script element: without any "<", ">" or "&"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _lines(folder: Path, name: str) -> list[Record]:
    path = folder / f"{name}.jsonl"
    return read_jsonl(path) if path.is_file() else []
