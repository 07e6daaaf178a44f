"""The numbers behind the page's curves; panels.toml lists the curves and says what they mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

from torchtune_grpo.evaluation.statistics import full_title, scores_of, title_of
from torchtune_grpo.monitor.record import Measured, RunRecord, metric

MAX_POINTS = 1000  # in a curve; of a longer run, every k-th step is drawn
_NUM_COLOURS = 7  # in page.css
_RIGHT = ("none right", "few: up to 1/3", "some: up to 2/3", "most", "all right")

Line = dict[str, Any]  # label, colour, steps, values; low and high, if there is a band
Panel = dict[str, Any]  # title, what, axis, kind, lines
_FILE = files("torchtune_grpo.monitor.report") / "panels.toml"
_PANELS: list[Panel] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["panels"]


def panels(run: RunRecord) -> list[Panel]:
    """Return the curves of a run, leaving out those without any number."""
    steps, drawn = thinned(run.steps), []
    for panel in _PANELS:
        if panel["curves"] == "evaluations":
            names = dict.fromkeys(name for each in run.evaluations for name in scores_of(each))
            lines = [_score(run.evaluations, name) for name in names]
            if lines:
                panel = {**panel, "title": full_title("accuracy", run.evaluations[-1])}
                if lines[0]["label"] != "accuracy":
                    panel["axis"] = "free"
        elif panel["curves"] == "pass rates":
            lines = _pass_rates(steps) if run.decider else []
        else:
            means = _reward_means(steps) if panel["curves"] == "rewards" else panel["curves"]
            lines = [_line(steps, name, label) for name, label in means.items()]
            _add_band(lines, steps, panel)
        nothing = (None, 0) if panel.get("unless") == "zero" else (None,)
        lines = [each for each in lines if any(v not in nothing for v in each["values"])]
        if lines:
            drawn.append({**panel, "lines": _coloured(lines, panel)})
    return drawn


def thinned(steps: list[Measured]) -> list[Measured]:
    """Return at most ``MAX_POINTS`` steps, evenly spaced and with the last one."""
    every = -(-len(steps) // MAX_POINTS) or 1
    return steps[::-1][::every][::-1]


def _line(events: list[Measured], name: str, label: str) -> Line:
    """Return one metric over the steps."""
    steps = [event["step"] for event in events]
    return {"label": label, "steps": steps, "values": [metric(event, name) for event in events]}


def _reward_means(steps: list[Measured]) -> Mapping[str, str]:
    names = sorted({name for event in steps for name in event})
    found = (re.fullmatch("rewards/(.+)/mean", name) for name in names)
    return {match[0]: match[1] for match in found if match}


def _score(evaluations: list[Measured], name: str) -> Line:
    low, high = ([metric(e, f"eval/{name}/{end}") for e in evaluations] for end in ("low", "high"))
    title = title_of(name, evaluations[-1])
    return {**_line(evaluations, f"eval/{name}", title), "low": low, "high": high}


def _pass_rates(steps: list[Measured]) -> list[Line]:
    """The share of groups by how many of their answers are right, at each step."""
    known, shares = [], []
    for event in steps:
        rates = [rate for rate in event.get("prompts", {}).get("pass_rate", []) if rate is not None]
        if rates:
            kinds = [0 if r <= 0 else 4 if r >= 1 else 1 + (r > 1 / 3) + (r > 2 / 3) for r in rates]
            shares.append([kinds.count(kind) / len(kinds) for kind in range(len(_RIGHT))])
            known.append(event["step"])
    return [
        {"label": label, "steps": known, "values": values}
        for label, values in zip(_RIGHT, zip(*shares))
    ]


def _add_band(lines: list[Line], steps: list[Measured], panel: Panel) -> None:
    if "band" in panel:
        low, high = ([metric(step, name) for step in steps] for name in panel["band"])
        lines[0] |= {"low": low, "high": high}
    elif "spread" in panel:
        spreads = (metric(step, panel["spread"]) for step in steps)
        pairs = [*zip(lines[0]["values"], spreads, strict=True)]
        known = [mean for mean, _ in pairs if mean is not None]
        least, most = min([0.0, *known]), max([1.0, *known])  # of shares, nothing is beyond
        for end, sign in (("low", -1), ("high", 1)):
            ends = [None if mean is None or s is None else mean + sign * s for mean, s in pairs]
            lines[0][end] = [None if e is None else min(max(e, least), most) for e in ends]


def _coloured(lines: list[Line], panel: Panel) -> list[Line]:
    """Return the lines in the panel's colours, in a stack each on top of those before it."""
    first = panel.get("colour", 1)
    lines = [{**each, "colour": first + n % _NUM_COLOURS} for n, each in enumerate(lines)]
    if panel.get("kind") == "stack":
        columns = zip(*(each["values"] for each in lines), strict=True)
        tops = [*zip(*(accumulate(value or 0 for value in column) for column in columns))]
        low: Sequence[float] = [0] * len(tops[0])
        for each, high in zip(lines, tops, strict=True):
            each["low"], each["high"], low = low, high, high
    return lines
