"""The numbers of the page's curves; panels.toml says which there are and what they mean."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any

from torchtune_grpo.evaluation.statistics import scores_of
from torchtune_grpo.monitor.record import Record, RunRecord

MAX_POINTS = 1000  # of a curve; of a longer run, every k-th step is drawn
_NUM_COLOURS = 7  # of page.css
_MAX_PROMPTS, _MAX_CELLS = 40, 200  # rows of the map, and cells of a row
_RIGHT = ("none right", "few: up to 1/3", "some: up to 2/3", "most", "all right")
_RIGHT_COLOUR = 11  # of page.css, none right; then four more

Line = dict[str, Any]  # label, colour, steps, values; low and high, if there is a band
Panel = dict[str, Any]  # title, what, axis, kind, lines


def panels(run: RunRecord) -> list[Panel]:
    """The curves of one run; those without any number are left out."""
    steps, drawn = thinned(run.steps), []
    for panel in _panels():
        if panel["curves"] == "evaluations":
            names = dict.fromkeys(name for each in run.evaluations for name in scores_of(each))
            lines = [_score(run.evaluations, name) for name in names]
        else:
            means = _reward_means(steps) if panel["curves"] == "rewards" else panel["curves"]
            lines = [_line(steps, name, label) for name, label in means.items()]
            _add_band(lines, steps, panel)
        lines = [each for each in lines if any(value is not None for value in each["values"])]
        if lines:
            drawn.append({**panel, "lines": _coloured(lines, stack=panel.get("kind") == "stack")})
    return drawn


def compared_panels(runs: Sequence[RunRecord], names: Sequence[str]) -> list[Panel]:
    """The first curve of each panel, of all runs over each other; a run keeps its colour."""
    of_runs = [{panel["title"]: panel["lines"][0] for panel in panels(run)} for run in runs]
    together = []
    for panel in _panels():
        if panel["curves"] == "rewards" or panel.get("kind") == "stack":
            continue
        lines = []
        for place, (first, name) in enumerate(zip(of_runs, names, strict=True)):
            if line := first.get(panel["title"]):  # without its band: those of runs hide each other
                colour = 1 + place % _NUM_COLOURS
                kept = {key: line[key] for key in ("steps", "values")}
                lines.append({"label": name, "colour": colour, **kept})
        if lines:
            together.append({**panel, "lines": lines})
    return together


def thinned(steps: list[Record]) -> list[Record]:
    """At most ``MAX_POINTS`` steps, evenly; the last one stays."""
    every = -(-len(steps) // MAX_POINTS) or 1
    return steps[::-1][::every][::-1]


def pass_rate_panels(run: RunRecord) -> list[Panel]:
    """The share of groups by how many of their answers are right, at each step."""
    steps, shares = [], []
    for event in thinned(run.steps):
        rates = [rate for rate in event.get("prompts", {}).get("pass_rate", []) if rate is not None]
        if rates:
            kinds = [0 if r <= 0 else 4 if r >= 1 else 1 + (r > 1 / 3) + (r > 2 / 3) for r in rates]
            shares.append([kinds.count(kind) / len(kinds) for kind in range(len(_RIGHT))])
            steps.append(event["step"])
    lines = [
        {"label": label, "steps": steps, "values": values}
        for label, values in zip(_RIGHT, zip(*shares))
    ]
    if not lines:
        return []
    panel = {
        "title": "How many of a group's answers are right",
        "what": "Share of groups at each step. Only the three in the middle teach: where none or "
        "all are right, the answers cannot be told apart. Good: a broad middle that moves to the "
        "right answers.",
        "axis": "share",
        "kind": "stack",
    }
    return [{**panel, "lines": _coloured(lines, stack=True, first=_RIGHT_COLOUR)}]


def prompt_map(run: RunRecord) -> dict[str, Any] | None:
    """Cells of prompts that were seen at least twice; None if no prompt was.

    ``prompts`` has the index of each row's prompt, the lowest mean pass rate first;
    ``num_repeated`` counts those without a row, too. Of each cell there are ``rows``, ``starts``
    (its step), ``ends`` (when the prompt came again) and ``rates``.
    """
    seen: dict[int, list[tuple[int, float]]] = {}
    for event in run.steps:
        prompts = event.get("prompts", {})
        for index, rate in zip(prompts.get("prompt_index", []), prompts.get("pass_rate", [])):
            if rate is not None:
                seen.setdefault(index, []).append((event["step"], rate))
    means = {index: sum(r for _, r in at) / len(at) for index, at in seen.items() if len(at) > 1}
    hardest_first = sorted(means, key=lambda index: (means[index], index))
    shown = hardest_first[:: -(-len(hardest_first) // _MAX_PROMPTS) or 1]
    cells = []
    for row, index in enumerate(shown):
        kept = seen[index][:: -(-len(seen[index]) // _MAX_CELLS)]
        ends = [step for step, _ in kept[1:]] + [run.steps_done + 1]
        cells += [(row, step, end, rate) for (step, rate), end in zip(kept, ends, strict=True)]
    if not cells:
        return None
    columns = dict(zip(("rows", "starts", "ends", "rates"), zip(*cells)))
    return {"prompts": shown, "num_repeated": len(means), **columns}


@cache
def _panels() -> list[Panel]:
    text = (files("torchtune_grpo.monitor.report") / "panels.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["panels"]


def _line(events: list[Record], name: str, label: str) -> Line:
    """One metric over the steps."""
    steps = [event["step"] for event in events]
    return {"label": label, "steps": steps, "values": [event.get(name) for event in events]}


def _reward_means(steps: list[Record]) -> Mapping[str, str]:
    names = sorted({name for event in steps for name in event})
    found = (re.fullmatch("rewards/(.+)/mean", name) for name in names)
    return {match[0]: match[1] for match in found if match}


def _score(evaluations: list[Record], name: str) -> Line:
    low, high = ([e.get(f"eval/{name}/{end}") for e in evaluations] for end in ("low", "high"))
    return {**_line(evaluations, f"eval/{name}", name), "low": low, "high": high}


def _add_band(lines: list[Line], steps: list[Record], panel: Panel) -> None:
    if "band" in panel:
        lines[0]["low"], lines[0]["high"] = ([e.get(name) for e in steps] for name in panel["band"])
    elif "spread" in panel:
        ends = []
        for mean, event in zip(lines[0]["values"], steps, strict=True):
            spread = event.get(panel["spread"])
            is_known = mean is not None and spread is not None
            ends.append((mean - spread, mean + spread) if is_known else (None, None))
        lines[0]["low"], lines[0]["high"] = zip(*ends) if ends else ((), ())


def _coloured(lines: list[Line], *, stack: bool, first: int = 1) -> list[Line]:
    """The lines in colours from ``first`` on; in a stack each on top of those before it."""
    lines = [{**each, "colour": first + n % _NUM_COLOURS} for n, each in enumerate(lines)]
    if stack:
        columns = zip(*(each["values"] for each in lines), strict=True)
        tops = [*zip(*(accumulate(value or 0 for value in column) for column in columns))]
        low: Sequence[float] = [0] * len(tops[0])
        for each, high in zip(lines, tops, strict=True):
            each["low"], each["high"], low = low, high, high
    return lines
