"""The page: data, curves, bokeh, style and script in one file that runs nothing else."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.util.paths import static_path

from torchtune_grpo.plain import visible
from torchtune_grpo.report._groups import groups_of
from torchtune_grpo.report._panels import (
    MAX_POINTS,
    Panel,
    compared_panels,
    panels,
    pass_rate_panel,
)
from torchtune_grpo.report._prompts import prompt_map
from torchtune_grpo.report._run import Run, as_text, flat, script_json
from torchtune_grpo.report._verdict import compared, percent, points_of, scores, verdict

Table = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A page's text, and the sentence on top of it."""

    headline: str
    text: str


def run_page(folder: Path) -> Page:
    """The page of one run.

    Raises:
        ValueError: if the folder is missing or holds no run.
    """
    run = Run.read(folder)
    curves, rates, prompts = panels(run), pass_rate_panel(run), prompt_map(run)
    resumes = [start["step"] for start in run.starts if start["step"] > 0]
    found = verdict(run)
    note = f"every {-(-run.steps_done // MAX_POINTS)}th step" * (run.steps_done > MAX_POINTS)
    data = {
        "name": run.name,
        "verdict": found,
        "panels": [_panel(panel) for panel in [*curves, *rates]],
        "curves": len(curves),
        "resumes": resumes,
        "thinned": note,
        **groups_of(run),
        "map": prompts and vars(prompts),
        "setup": _setup(run),
    }
    return _page(run.name, found["headline"], data)


def comparison_page(folders: Sequence[Path]) -> Page:
    """The page that compares several runs.

    Raises:
        ValueError: if a folder is missing or holds no run.
    """
    runs = [Run.read(folder) for folder in folders]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [visible(str(folder)) for folder in folders]
    curves = compared_panels(runs, names)
    headline = f"{len(runs)} runs compared"
    data = {
        "name": "Comparison",
        "headline": headline,
        "resumes": [],
        "panels": [_panel(panel) for panel in curves],
        "curves": len(curves),
        "comparison": _comparison(runs, names),
        "setup": [_differences("Where their configs differ", names, [run.config for run in runs])],
    }
    return _page(headline, headline, data)


def write(path: Path, page: Page) -> Path:
    """Writes beside ``path``, then renames: a browser that reloads sees one page or the other."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(page.text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _panel(panel: Panel) -> dict[str, Any]:
    return {**vars(panel), "lines": [vars(line) for line in panel.lines]}


def _setup(run: Run) -> list[Table]:
    """Tables: the last start, its versions, what differs between starts, the whole config."""
    if not run.starts:
        return []
    last = run.starts[-1]
    shown = ("command", "time", "device", "ranks", "seed")
    facts = [[name, as_text(last[name])] for name in shown if name in last]
    tables: list[Table] = [
        {"title": "Last start", "rows": facts},
        {"title": "Versions", "rows": [list(pair) for pair in flat(last.get("versions") or {})]},
    ]
    if len(run.starts) > 1:
        names = [f"from step {start['step']}" for start in run.starts]
        configs = [start.get("config") or {} for start in run.starts]
        tables.append(_differences("Changed between starts", names, configs))
    whole = [list(pair) for pair in flat(run.config)]
    return [*tables, {"title": "Whole config", "rows": whole, "folded": True}]


def _differences(title: str, names: list[str], configs: Sequence[object]) -> Table:
    of_each = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for config in of_each for key in config)
    rows = [[key, *(config.get(key, "") for config in of_each)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return {"title": title, "head": ["key", *names], "rows": rows, "empty": "Nothing."}


def _comparison(runs: Sequence[Run], names: list[str]) -> Table:
    rows: dict[str, list[str]] = {}
    for run in runs:
        found, accuracy = verdict(run), scores(run, "accuracy")
        cells = {
            "Verdict": " ".join([found["headline"], *found["why"][:1]]),
            "Accuracy before": _with_interval(accuracy[:1]),
            "Accuracy after": _with_interval(accuracy[1:][-1:]),
            f"After, against {names[0]}": "" if run is runs[0] else _against(runs[0], run),
            "Open findings": ", ".join(
                each["name"] for each in found["findings"] if each["until"] is None
            ),
            **dict(found["facts"]),
        }
        for name, cell in cells.items():
            rows.setdefault(name, [""] * len(runs))[runs.index(run)] = cell
    return {"title": "Verdicts", "head": ["", *names], "rows": [[k, *v] for k, v in rows.items()]}


def _with_interval(found: Sequence[Any]) -> str:
    return f"{percent(found[0].mean)} ({found[0].interval})" if found else ""


def _against(first: Run, run: Run) -> str:
    """The paired test of both runs' last evaluations, if they are of the same problems."""
    same_data = first.config.get("eval_dataset") == run.config.get("eval_dataset")
    test = compared(first.scores[-1], run.scores[-1]) if first.scores and run.scores else None
    if test is None or not same_data:
        return "not on the same problems"
    return (
        f"{points_of(test.difference)} points ({points_of(test.low)} to {points_of(test.high)}), "
        f"p = {test.p:.3f}"
    )


def _page(title: str, headline: str, data: dict[str, Any]) -> Page:
    parts = _parts()
    allowed = " ".join(_hash(parts[name]) for name in ("bokeh", "bokeh_api", "curves", "script"))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    filled = {
        **parts,
        "policy": policy,
        "title": html.escape(title),
        "data": script_json({**data, "written": written}),
    }
    # In one pass: what is put in is not looked at again.
    return Page(headline, re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], parts["page"]))


@cache
def _parts() -> dict[str, str]:
    """The page's own files, and bokeh without its widgets, tables and WebGL."""
    here, there = files("torchtune_grpo.report"), Path(static_path()) / "js"
    paths = {
        "page": here / "page.html",
        "style": here / "page.css",
        "script": here / "page.js",
        "curves": here / "curves.js",
        "bokeh": there / "bokeh.min.js",
        "bokeh_api": there / "bokeh-api.min.js",
    }
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items()}


def _hash(script: str) -> str:
    """What the page's policy calls a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
