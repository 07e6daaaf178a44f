"""A run as one page that can be mailed: data, curves, style and script in one file.

The page runs no other script and fetches nothing. All data passes through ``script_json``.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from torchtune_grpo.config.text import flat, visible, write_text
from torchtune_grpo.monitor.record import COMPLETIONS_FILE, Record, RunRecord, read_lines
from torchtune_grpo.monitor.report.panels import MAX_POINTS, panels
from torchtune_grpo.monitor.report.verdict import verdict

_MAX_BYTES = 4_500_000  # for all groups: with bokeh (1.4 MB) and the curves, a page is below 8 MB
_LONG_TEXT, _SHORT_TEXT = 4000, 600  # characters of a completion; of a column or an extra
_NUM_GAPS = 20  # completions that count as the largest gaps
_FILTERS = (
    ("mixed", "informative", "In groups whose advantages differ: these teach."),
    ("ill", "right, ill-formed", "The answer is right, the format's reward is not full."),
    ("wrong", "well-formed, wrong", "The format's reward is full, the answer is wrong."),
    ("cut", "cut off", "Ended by a limit on their tokens or by the deadline."),
    ("failed", "failed reward", "A reward raised, timed out or returned no number."),
    ("gap", "sampler and trainer differ most", "Their log-probs do; rounding makes 0.01 to 0.03."),
)

Table = dict[str, Any]  # title, head, rows; what an empty one says; whether it is folded


def main() -> None:
    """Write a run's page, and print its headline and path: ``torchtune-grpo report``."""
    parser = argparse.ArgumentParser(description="Writes a run as one HTML page.")
    parser.add_argument("folder", type=Path, help="a run's output_dir")
    parser.add_argument("--output", type=Path, help="default: FOLDER/run.html")
    args = parser.parse_args()
    path = args.output or args.folder / "run.html"
    print(f"{write_page(args.folder, path)}\n{path}")


def write_page(folder: Path, path: Path | None = None) -> str:
    """Write the page of a run, to ``run.html`` in its folder, and return its headline."""
    run = RunRecord.read(folder)
    found, name = verdict(run), run.folder.resolve().name
    every = -(-run.steps_done // MAX_POINTS)
    data = {
        "name": name,
        "verdict": found,
        "panels": panels(run),
        "resumes": [start["step"] for start in run.starts if start["step"] > 0],
        "thinned": f"One step in {every} is drawn." if every > 1 else "",
        **_completions(run),
        "setup": _setup(run),
    }
    _write(path or folder / "run.html", name, data)
    return str(found["headline"])


def script_json(value: object) -> str:
    """Return JSON fit for a script element: with visible texts, and no "<", ">" or "&"."""
    text = json.dumps(_clean(value), ensure_ascii=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _clean(value: object) -> object:
    """Make invisible characters in texts visible, and round numbers to five digits."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {visible(str(key)): _clean(item) for key, item in value.items()}
    return [*map(_clean, value)] if isinstance(value, (list, tuple)) else value


# ---- Completions


def _completions(run: RunRecord) -> dict[str, object]:
    """Groups for the page, how many were recorded, and the filters."""
    groups: list[list[Record]] = []
    for row in read_lines(run.folder / COMPLETIONS_FILE):
        last = groups[-1][-1] if groups else {}
        same = all(row[key] == last.get(key) for key in ("step", "prompt_index"))
        if not same or row["sample"] <= last["sample"]:
            groups.append([])
        groups[-1].append(row)
    _mark(groups, decider=run.decider, form=run.form)
    return {"groups": _fitting(groups), "recorded": len(groups), "filters": _FILTERS}


def _mark(groups: list[list[Record]], *, decider: str | None, form: str | None) -> None:
    """Give each row ``is``, the names of the filters that match it."""
    rows = [row for group in groups for row in group]
    best = max((row["rewards"].get(form or "") or 0 for row in rows), default=0)
    largest = {id(row) for row in sorted(rows, key=_gap)[-_NUM_GAPS:] if _gap(row) > 0}
    for group in groups:
        mixed = len({row["advantage"] for row in group}) > 1
        for row in group:
            right, formed = row["rewards"].get(decider or ""), row["rewards"].get(form or "")
            is_right, is_formed = (right or 0) >= 1, best > 0 and (formed or 0) >= best
            marks = {
                "mixed": mixed,
                "ill": is_right and formed is not None and not is_formed,
                "wrong": right is not None and not is_right and is_formed,
                "cut": row["ended"] in ("length", "deadline", "max_tokens", "context"),
                "failed": bool(row["failed"]),
                "gap": id(row) in largest,
            }
            row["is"] = [name for name, holds in marks.items() if holds]


def _gap(row: Record) -> float:
    sampler, trainer = row["sampler_logprob"], row["trainer_logprob"]
    return 0.0 if sampler is None or trainer is None else abs(sampler - trainer)


def _fitting(groups: list[list[Record]]) -> list[Record]:
    """Return all groups, or, if they take too many bytes, one of each step, of every second, ...

    At least one is left, however large.
    """
    shown = [_for_page(group) for group in groups]
    sizes = {id(group): len(script_json(group).encode()) for group in shown}
    first = {group["step"]: group for group in reversed(shown)}  # of a step, where most is learnt
    every = 1
    while len(shown) > 1 and sum(sizes[id(group)] for group in shown) > _MAX_BYTES:
        shown = [*first.values()][::every][::-1]
        every *= 2
    return shown


def _for_page(group: list[Record]) -> Record:
    first = group[0]
    kept = ("tokens", "reward", "advantage", "sampler_logprob", "trainer_logprob", "failed", "is")
    rows = [
        {
            **{name: row[name] for name in kept},
            "text": _shortened(_transcript(row), _LONG_TEXT),
            "ended": row["ended"].replace("_", " "),
            "rewards": [*row["rewards"].items()],
            "extra": _texts(row["extra"]),
        }
        for row in group
    ]
    return {
        "step": first["step"],
        "index": first["prompt_index"],
        "prompt": _shortened(first["prompt"], _LONG_TEXT),
        "columns": _texts(first["columns"]),
        "rows": rows,
    }


def _transcript(row: Record) -> str:
    """Return a completion, or the turns of a conversation, with its calls and their results."""
    parts = []
    for turn in () if row.get("inline") else row.get("messages", ()):
        if thought := turn.get("reasoning_content"):
            parts.append(f"[thinking] {thought}")
        if turn["content"] or not turn.get("tool_calls"):
            name = turn.get("name", "")
            parts.append(f"[{turn['role']}{name and ' '}{name}] {turn['content']}")
        for call in turn.get("tool_calls", ()):
            function = call["function"]
            parts.append(f"[call] {function['name']}({_as_text(function['arguments'])})")
    text, marked = str(row["completion"]), ""
    for reply in row.get("inline", ()):  # what an environment has written into the response
        before, found, text = text.partition(reply)
        marked += f"{before}\n[environment] {found.strip()}\n"
    return "\n".join(parts) or marked + text


def _texts(values: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(name, _shortened(_as_text(value), _SHORT_TEXT)) for name, value in values.items()]


def _shortened(text: str, limit: int) -> str | list[str | int]:
    """Return a text; if too long, its beginning, how many characters are left out, and its end."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return [text[:head], len(text) - head - tail, text[-tail:]]


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---- Tables


def _setup(run: RunRecord) -> list[Table]:
    """Return tables of the last start, its versions, changes between starts, the whole config."""
    if not run.starts:
        return []
    last = run.starts[-1]
    elsewhere = ("kind", "config", "versions")
    facts = [(key, _as_text(value)) for key, value in last.items() if key not in elsewhere]
    configs = [{k: _as_text(v) for k, v in flat(each["config"]).items()} for each in run.starts]
    rows = [
        [key, *(each.get(key, "") for each in configs)] for key in dict.fromkeys(chain(*configs))
    ]
    changes = {
        "title": "Changed between starts",
        "head": ["key", *(f"from step {start['step']}" for start in run.starts)],
        "rows": [row for row in rows if len(set(row[1:])) > 1],
        "empty": "Nothing.",
    }
    return [
        {"title": "Last start", "rows": facts},
        {"title": "Versions", "rows": [*last["versions"].items()]},
        *([changes] if len(configs) > 1 else []),
        {"title": "Whole config", "rows": [*configs[-1].items()], "folded": True},
    ]


# ---- File


def _write(path: Path, title: str, data: Record) -> None:
    """Write the page; a browser that reloads sees the old or the new one."""
    parts = _parts()
    scripts = (parts[name].encode() for name in ("bokeh", "bokeh_api", "curves", "script"))
    hashes = (base64.b64encode(hashlib.sha256(each).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    filled = {
        **parts,
        "policy": policy,
        "title": html.escape(visible(title)),
        "verdict": _static(data["verdict"]),
        "data": script_json({**data, "written": written}),
    }
    # In one pass, so that inserted text is not searched again.
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], parts["page"])
    write_text(path, text)


def _static(found: Record) -> str:
    """Return the verdict and the open findings as HTML, which the script replaces."""
    said = [("h1", found["headline"]), *(("p", each) for each in found["why"])]
    for each in found["findings"]:
        if each["until"] is None:
            since = f"{each['name']} since step {each['since']}"
            said.append(("p", f"{since}: {each['evidence']} {each['remedy']}"))
    return "".join(f"<{tag}>{html.escape(visible(text))}</{tag}>" for tag, text in said)


@cache
def _parts() -> dict[str, str]:
    """The page's own files, and bokeh without its widgets, tables and WebGL."""
    from bokeh.util.paths import static_path  # half a second, for a run's first page only

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
