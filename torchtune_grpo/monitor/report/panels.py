"""The numbers of the page's curves; panels.toml says which there are and what they mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from torchtune_grpo.config.text import visible
from torchtune_grpo.monitor.report.run import Record, Run, names_in, number

MAX_POINTS = 1000  # of a curve; of a longer run, every k-th step is drawn
_NUM_COLOURS = 7  # of page.css

Values = list[float | None]
Line = dict[str, Any]  # label, colour, steps, values; low and high, if there is a band
Panel = dict[str, Any]  # title, what, axis, kind, lines


def panels(run: Run) -> list[Panel]:
    """The curves of one run; those without any number are left out."""
    steps, drawn = thinned(run.steps), []
    for panel in _panels():
        if panel["curves"] == "evaluations":
            lines = [_score(run.evaluations, name) for name in run.score_names]
        else:
            names = _reward_means(steps) if panel["curves"] == "rewards" else panel["curves"]
            lines = [line(steps, name, label) for name, label in names.items()]
            _add_band(lines, steps, panel)
        lines = [each for each in lines if any(value is not None for value in each["values"])]
        if lines:
            drawn.append({**panel, "lines": coloured(lines, stack=panel.get("kind") == "stack")})
    return drawn


def compared(runs: Sequence[Run], names: Sequence[str]) -> list[Panel]:
    """The first curve of each panel, of all runs over each other; a run keeps its colour."""
    of_runs = [{panel["title"]: panel for panel in panels(run)} for run in runs]
    together = []
    for panel in _panels():
        if panel["curves"] == "rewards" or panel.get("kind") == "stack":
            continue
        lines = [
            {"label": name, "colour": 1 + place % _NUM_COLOURS, **_bare(mine[panel["title"]])}
            for place, (mine, name) in enumerate(zip(of_runs, names, strict=True))
            if panel["title"] in mine
        ]
        if lines:
            together.append({**panel, "lines": lines})
    return together


def thinned(records: list[Record]) -> list[Record]:
    """At most ``MAX_POINTS`` lines, evenly; the last one stays."""
    every = -(-len(records) // MAX_POINTS) or 1
    return records[::-1][::every][::-1]


def coloured(lines: list[Line], *, stack: bool, first: int = 1) -> list[Line]:
    """The lines in colours from ``first`` on; in a stack each on top of those before it."""
    lines = [{**each, "colour": first + n % _NUM_COLOURS} for n, each in enumerate(lines)]
    if stack:
        columns = zip(*(each["values"] for each in lines), strict=True)
        tops = [*zip(*(accumulate(value or 0 for value in column) for column in columns))]
        low: Sequence[float] = [0] * len(tops[0])
        for each, high in zip(lines, tops, strict=True):
            each["low"], each["high"], low = low, high, high
    return lines


def line(records: list[Record], name: str, label: str) -> Line:
    """One metric over the steps."""
    steps = [record["step"] for record in records]
    return {"label": visible(label), "steps": steps, "values": _values(records, name)}


@cache
def _panels() -> list[Panel]:
    text = (files("torchtune_grpo.monitor.report") / "panels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["panels"]


def _bare(panel: Panel) -> Line:
    """Its first line without band, label and colour; bands of several runs hide each other."""
    return {key: panel["lines"][0][key] for key in ("steps", "values")}


def _values(records: list[Record], name: str) -> Values:
    return [number(record.get(name)) for record in records]


def _reward_means(steps: list[Record]) -> Mapping[str, str]:
    found = (re.fullmatch("rewards/(.+)/mean", name) for name in names_in(steps))
    return {match[0]: match[1] for match in found if match}


def _score(evaluations: list[Record], name: str) -> Line:
    low, high = (_values(evaluations, f"eval/{name}/{end}") for end in ("low", "high"))
    return {**line(evaluations, f"eval/{name}", name), "low": low, "high": high}


def _add_band(lines: list[Line], steps: list[Record], panel: Panel) -> None:
    if "band" in panel:
        lines[0]["low"], lines[0]["high"] = (_values(steps, name) for name in panel["band"])
    elif "spread" in panel:
        pairs = [*zip(lines[0]["values"], _values(steps, panel["spread"]), strict=True)]
        known = [
            None if mean is None or spread is None else (mean, spread) for mean, spread in pairs
        ]
        lines[0]["low"] = [pair and pair[0] - pair[1] for pair in known]
        lines[0]["high"] = [pair and pair[0] + pair[1] for pair in known]
