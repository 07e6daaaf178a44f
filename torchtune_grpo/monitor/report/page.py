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

from torchtune_grpo.config.text import visible
from torchtune_grpo.monitor.report.groups import groups_of
from torchtune_grpo.monitor.report.panels import MAX_POINTS, compared, panels
from torchtune_grpo.monitor.report.prompts import pass_rate_panel, prompt_map
from torchtune_grpo.monitor.report.run import Run, as_text, flat, script_json
from torchtune_grpo.monitor.report.verdict import changed_by, scores, tested, verdict

Table = dict[str, Any]  # title, head, rows; what an empty one says; whether it is folded


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
    found, curves = verdict(run), panels(run)
    every = -(-run.steps_done // MAX_POINTS)
    data = {
        "name": run.name,
        "verdict": found,
        "panels": curves + pass_rate_panel(run),
        "curves": len(curves),
        "resumes": [start["step"] for start in run.starts if start["step"] > 0],
        "thinned": f"Drawn is every {every}th step." if every > 1 else "",
        **groups_of(run),
        "map": prompt_map(run),
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
    curves, headline = compared(runs, names), f"{len(runs)} runs compared"
    data = {
        "name": "Comparison",
        "headline": headline,
        "comparison": _comparison(runs, names),
        "panels": curves,
        "curves": len(curves),
        "resumes": [],
        "thinned": "",
        "setup": [_differences("Where their configs differ", names, [run.config for run in runs])],
    }
    return _page(headline, headline, data)


def write(path: Path, page: Page) -> Path:
    """Writes beside ``path``, then renames: a browser that reloads sees one page or the other."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(page.text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def _setup(run: Run) -> list[Table]:
    """Tables: the last start, its versions, what differs between starts, the whole config."""
    if not run.starts:
        return []
    last, configs = run.starts[-1], [start.get("config") or {} for start in run.starts]
    facts = [
        (name, as_text(last.get(name))) for name in ("command", "time", "device", "ranks", "seed")
    ]
    names = [f"from step {start['step']}" for start in run.starts]
    return [
        {"title": "Last start", "rows": facts},
        {"title": "Versions", "rows": [*flat(last.get("versions"))]},
        *([_differences("Changed between starts", names, configs)] if len(names) > 1 else []),
        {"title": "Whole config", "rows": [*flat(run.config)], "folded": True},
    ]


def _differences(title: str, names: list[str], configs: Sequence[dict[str, Any]]) -> Table:
    """Keys with several values. The run's own folder is no difference."""
    of_each = [
        {
            key: text.replace(config.get("output_dir") or "\0", "OUTPUT_DIR")
            for key, text in flat(config)
        }
        for config in configs
    ]
    keys = dict.fromkeys(key for config in of_each for key in config)
    rows = [[key, *(config.get(key, "") for config in of_each)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    return {"title": title, "head": ["key", *names], "rows": differing, "empty": "Nowhere."}


def _comparison(runs: Sequence[Run], names: list[str]) -> Table:
    columns = []
    for run in runs:
        found, accuracy = verdict(run), [*map(str, scores(run, "accuracy"))]
        open_findings = [each["name"] for each in found["findings"] if each["until"] is None]
        columns.append(
            {
                "Verdict": f"{found['headline']} {found['why'][0].partition(':')[0].rstrip('.')}.",
                "Accuracy before": "".join(accuracy[:1]),
                "Accuracy after": "".join(accuracy[1:][-1:]),
                f"After, against {names[0]}": "" if run is runs[0] else _against(runs[0], run),
                "Open findings": ", ".join(open_findings) or "none",
                **found["facts"],
            }
        )
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(column.get(key, "") for column in columns)] for key in keys]
    return {"title": "Verdicts", "head": ["", *names], "rows": rows}


def _against(first: Run, run: Run) -> str:
    """The paired test of the last evaluations, if their problems are the same."""
    same_data = first.config.get("eval_dataset") == run.config.get("eval_dataset")
    test = tested(first, run, first=-1) if same_data else None
    if test is None:
        return "no test: not evaluated on the same problems"
    return f"{100 * test.difference:+.1f} points; {changed_by(test)}"


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
    here, there = files("torchtune_grpo.monitor.report"), Path(static_path()) / "js"
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
