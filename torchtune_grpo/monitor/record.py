"""A run's record: the events in ``run.jsonl``, one per line, and how to read them. No torch.

The page, the findings, the model card and the rules that end a run read these lines.
``completions.jsonl`` in the same folder holds whole groups of completions.
"""

from __future__ import annotations

import json
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from torchtune_grpo.config.text import naming, replacing, to_json
from torchtune_grpo.machine import lock

log = logging.getLogger("torchtune.utils._logging")  # torchtune's, by name

RUN_FILE, COMPLETIONS_FILE = "run.jsonl", "completions.jsonl"
_PACKAGES = "torchtune_grpo torch torchtune torchao transformers datasets triton".split()
# Bytes that completions.jsonl may gain over a whole run, and that it may take at once.
_MAX_BYTES, _HEAD_START = 64 * 2**20, 2**20

Record = dict[str, Any]


class Event(TypedDict):
    """Keys that all events have."""

    kind: Literal["start", "step", "evaluation", "finding"]
    step: int


class Start(Event):
    """A start or a resume."""

    time: str
    command: str
    config: dict[str, object]
    versions: dict[str, str]
    device: str
    ranks: int
    seed: int
    decider: str | None  # the reward that is known to tell right from wrong
    forms: list[str]  # rewards that declare to be 0 or more beside it, such as for a format


class Measured(Event):
    """A step or an evaluation; ``metric`` reads its metrics, which are keys like these."""

    # By name, a value for each prompt: prompt_index; of a step pass_rate and reward, of an
    # evaluation accuracy, pass@1, ...
    prompts: NotRequired[dict[str, list[Any]]]
    # Of a step without a right answer: one of its answers, and what it should have been.
    wrong: NotRequired[str]


class Finding(TypedDict):
    """A finding; ``torchtune_grpo.monitor.findings`` makes them."""

    name: str
    since: int  # step
    evidence: str  # a sentence
    key: str  # of the config
    remedy: str  # a sentence


class FindingEvent(Event, Finding):
    """A finding that begins or ends."""

    event: Literal["begins", "ends"]


STILL_THE_BASE = "Nothing was learned: no step had a gradient, or the learning rate was 0."


def changes_weights(step: Measured) -> bool:
    """Whether a step had a gradient and a learning rate, as far as its metrics say.

    Without a gradient, weight decay may still move weights, where a loss needs all rows.
    """
    return metric(step, "grad_norm") != 0 and metric(step, "learning_rate") != 0


def metric(event: Measured, name: str) -> float | None:
    """Return a metric; None if the event has none of this name, or no finite number."""
    value = cast(Record, event).get(name)
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return value if is_finite else None


def read(folder: Path, *kinds: str) -> list[Record]:
    """Return the events of a run, or only some kinds, in order; none if there is no record."""
    path = folder / RUN_FILE
    return [event for event in read_lines(path) if not kinds or event.get("kind") in kinds]


def read_metrics(folder: Path) -> list[Record]:
    """Return ``step`` and the metrics of each step and each evaluation, in order."""
    return [metrics_of(event) for event in read(folder, "step", "evaluation")]


def metrics_of(event: Mapping[str, object]) -> Record:
    """Return an event without what is no metric."""
    others = ("kind", "prompts", "measure", "trained_on", "wrong")
    return {name: value for name, value in event.items() if name not in others}


@dataclass(frozen=True)
class RunRecord:
    """The events of a run in its folder, by kind."""

    folder: Path
    starts: list[Start]
    steps: list[Measured]
    evaluations: list[Measured]
    findings: list[FindingEvent]

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Read a run's record; a ValueError if the folder holds none."""
        if not (folder / RUN_FILE).is_file():
            what = f"has no {RUN_FILE}" if folder.is_dir() else "is not a folder"
            raise ValueError(f"{folder} {what}; give the output_dir of a run.")
        kinds: dict[str, list[Any]] = {"start": [], "step": [], "evaluation": [], "finding": []}
        for event in read(folder, *kinds):
            kinds[event["kind"]].append(event)
        return cls(folder, *kinds.values())

    @property
    def steps_done(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def config(self) -> Record:
        return self.starts[-1]["config"] if self.starts else {}

    @property
    def decider(self) -> str | None:
        """The reward that is known to tell right from wrong."""
        return self.starts[-1].get("decider") if self.starts else None

    @property
    def form(self) -> str | None:
        """The reward for the form of a response, such as a format."""
        return next(iter(self.starts[-1].get("forms", ())), None) if self.starts else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def read_lines(path: Path) -> list[Record]:
    """Return the records in a file, none if it is missing; torn lines are counted in the log."""
    return [record for _, record in _lines(path)] if path.exists() else []


def append(folder: Path, kind: str, step: int, values: Mapping[str, object]) -> Record:
    """Record an event, and return it as it reads back."""
    named = {"kind": kind, "step": step}
    event: Record = to_json(named | dict(values) | named)
    _append(folder / RUN_FILE, _encoded([event]))
    return event


def append_groups(folder: Path, groups: Sequence[Sequence[Record]], *, done: float) -> None:
    """Record whole groups of completions, as plain values, while there is room for them.

    ``done`` is the share of the run that is over: 1 MiB and that share of 64 MiB may be filled.
    """
    path = folder / COMPLETIONS_FILE
    room = _HEAD_START + done * _MAX_BYTES - (path.stat().st_size if path.exists() else 0)
    for group in groups:
        lines = _encoded(group)
        room -= len(lines)
        if room < 0:
            break
        _append(path, lines)


def keep_until(folder: Path, step: int) -> None:
    """Drop what was recorded after ``step``: a resumed run does those steps again.

    A kill at any moment leaves either the old file or the new one, and the next call works.
    """
    for path in filter(Path.exists, (folder / RUN_FILE, folder / COMPLETIONS_FILE)):
        with replacing(path) as file:
            for line, record in _lines(path):
                if record["step"] <= step:
                    file.write(line.rstrip(b"\n") + b"\n")


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Yield each line and its content, except lines that a kill or a full disk has torn."""
    left_out = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield line, record
            else:
                left_out += 1
    if left_out:
        log.warning(f"{path}: left out {left_out} line(s) that are torn or have no step.")


def _encoded(records: Sequence[Record]) -> bytes:
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return text.encode(errors="backslashreplace")


def _append(path: Path, lines: bytes) -> None:
    with lock.writing(path.parent), naming(path), path.open("ab") as file:
        file.write(lines)
