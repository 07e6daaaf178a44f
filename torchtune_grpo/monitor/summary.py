"""A run in a few lines: accuracy before and after, findings, and where everything is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_grpo.monitor.findings import Finding

_PREFIX, _LOW, _HIGH = "eval/", "/low", "/high"
_OUTPUTS = {
    "run.html": "the run's page",
    "best": "the best checkpoint",
    "metrics.jsonl": "its numbers",
    "completions.jsonl": "what the policy wrote",
}


def rates(record: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of an evaluation that have an interval, as text."""
    found = {}
    for name, value in record.items():
        low, high = record.get(name + _LOW), record.get(name + _HIGH)
        if None not in (value, low, high):
            found[name.removeprefix(_PREFIX)] = f"{value:.3f} [{low:.3f}, {high:.3f}]"
    return found


def evaluation_line(record: Mapping[str, Any]) -> str:
    """One evaluation: ``accuracy 0.914 [0.859, 0.961], pass@1 0.873, ...``."""
    first, *others = rates(record).items()
    return ", ".join([" ".join(first), *(f"{name} {said.split()[0]}" for name, said in others)])


def summary(
    records: Iterable[Mapping[str, Any]], findings: Sequence[Finding], folder: Path
) -> list[str]:
    """Lines for the end of a run.

    Args:
        records (Iterable[Mapping[str, Any]]): the lines of ``metrics.jsonl``.
        findings (Sequence[Finding]): those that hold at the end.
        folder (Path): the run's.
    """
    evaluations = [record for record in records if rates(record)]
    lines = []
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        before, after = rates(first), rates(last)
        titles = f"before (step {first['step']})", f"after (step {last['step']})"
        rows = [("held-out, 95 % interval", *titles)]
        rows += [(name, before.get(name, "-"), after[name]) for name in after]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
    for finding in findings:
        lines.append(
            f"{finding.name} since step {finding.since}: {finding.evidence} {finding.remedy}"
        )
    if not findings:
        lines.append("findings: none")
    places = {path: said for name, said in _OUTPUTS.items() if (path := folder / name).exists()}
    checkpoints = sorted(folder.glob("step_*"))
    places |= {path: "the last checkpoint" for path in checkpoints[-1:]}
    width = max(map(len, map(str, places)), default=0)
    return lines + [f"{str(path).ljust(width)}  {said}" for path, said in places.items()]
