"""The completions of a page: whole groups, bounded in size, each marked for the filters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtune_grpo.config.text import visible
from torchtune_grpo.monitor.report.run import Record, Run, as_text, number, script_json

MAX_BYTES = 4_500_000  # of all groups: with bokeh (1.4 MB) and the curves, a page is below 8 MB
_TEXTS = (6000, 3000, 1500)  # characters of a completion; fewer where the groups do not fit
_SHORT_TEXT = 600  # characters of a column or an extra
_NUM_GAPS = 20  # completions that count as the largest gaps
_FILTERS = (
    ("mixed", "informative", "In groups whose advantages differ: these teach."),
    ("ill", "right, ill-formed", "The answer is right, the format's reward is not full."),
    ("wrong", "well-formed, wrong", "The format's reward is full, the answer is wrong."),
    ("cut", "cut off", "Ended by max_generated_tokens or by the deadline."),
    ("failed", "failed reward", "A reward raised, timed out or returned no number."),
    ("gap", "largest gap", "Sampler and trainer disagree most about these."),
)

Group = dict[str, Any]
Text = str | list[str | int]


def groups_of(run: Run, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Groups for the page, how many were recorded, and the filters.

    Long texts are shortened in the middle. If that is not enough, groups are left out: of each step
    all but one, then every second step. Informative ones are kept before others of their step.
    """
    whole = _whole_groups(run.completions())
    _mark(whole, run)
    lengths = [len(str(row.get("completion"))) for group in whole for row in group]
    fit = (n for n in _TEXTS if sum(min(length, n) for length in lengths) < 0.7 * max_bytes)
    limit = next(fit, _TEXTS[-1])
    groups = _fitting(whole, limit=limit, max_bytes=max_bytes)
    return {"groups": groups, "recorded": len(whole), "filters": _FILTERS}


def _whole_groups(rows: list[Record]) -> list[list[Record]]:
    """Neighbours of one step and prompt; a sample that is not larger begins a new group."""
    groups: list[list[Record]] = []
    last: Record = {}
    for row in rows:
        same = all(row.get(key) == last.get(key) for key in ("step", "prompt_index", "prompt"))
        if not same or row.get("sample", 1) <= last.get("sample", 0):
            groups.append([])
        groups[-1].append(row)
        last = row
    return groups


def _mark(groups: list[list[Record]], run: Run) -> None:
    """Gives each row ``scores``, its rewards, and ``is``, the names of the filters that find it."""
    rows = [row for group in groups for row in group]
    for row in rows:
        rewards = _mapping(row, "rewards").items()
        row["scores"] = {visible(name): number(score) for name, score in rewards}
        row["ended"] = row.get("ended") or ("length" if row.get("truncated") else "")
    names = [*rows[0]["scores"]] if rows else []
    decides = run.scores[-1].get("reward") if run.scores else None
    decides = decides if decides in names else next(iter(names), None)
    form = next((name for name in names if "format" in name and name != decides), None)
    best = max((row["scores"].get(form) or 0 for row in rows), default=0)
    largest = {id(row) for row in sorted(rows, key=_gap)[-_NUM_GAPS:] if _gap(row) > 0}
    for group in groups:
        mixed = len({row.get("advantage") for row in group}) > 1
        for row in group:
            right, formed = row["scores"].get(decides), row["scores"].get(form)
            is_right, is_formed = (right or 0) >= 1, best > 0 and (formed or 0) >= best
            marks = {
                "mixed": mixed,
                "ill": is_right and formed is not None and not is_formed,
                "wrong": right is not None and not is_right and is_formed,
                "cut": row["ended"] in ("length", "deadline"),
                "failed": bool(row.get("failed")),
                "gap": id(row) in largest,
            }
            row["is"] = [name for name, holds in marks.items() if holds]


def _mapping(row: Record, key: str) -> Mapping[str, Any]:
    found = row.get(key)
    return found if isinstance(found, Mapping) else {}


def _gap(row: Record) -> float:
    sampler, trainer = row.get("sampler_logprob"), row.get("trainer_logprob")
    return 0.0 if sampler is None or trainer is None else abs(sampler - trainer)


def _for_page(group: list[Record], limit: int) -> Group:
    first = group[0]
    return {
        "step": first["step"],
        "index": number(first.get("prompt_index")),
        "prompt": shortened(str(first.get("prompt", "")), limit),
        "columns": _texts(first, "columns"),
        "rows": [_row(row, limit) for row in group],
    }


def _row(row: Record, limit: int) -> dict[str, Any]:
    numbers = ("tokens", "reward", "advantage", "sampler_logprob", "trainer_logprob")
    return {
        **{name: number(row.get(name)) for name in numbers},
        "text": shortened(str(row.get("completion", "")), limit),
        "ended": visible(str(row["ended"])).replace("_", " "),
        "rewards": [*row["scores"].items()],
        "failed": [visible(str(name)) for name in row.get("failed") or []],
        "extra": _texts(row, "extra"),
        "is": row["is"],
    }


def _texts(row: Record, key: str) -> list[tuple[str, Text]]:
    texts = ((visible(name), as_text(value)) for name, value in _mapping(row, key).items())
    return [(name, shortened(text, _SHORT_TEXT)) for name, text in texts]


def shortened(text: str, limit: int) -> Text:
    """Visible text; of a longer one its beginning, how many characters are left out, its end."""
    if len(text) <= limit:
        return visible(text)
    head, tail = limit * 2 // 3, limit // 3
    return [visible(text[:head]), len(text) - head - tail, visible(text[-tail:])]


def _fitting(whole: list[list[Record]], *, limit: int, max_bytes: int) -> list[Group]:
    """Those that fit, in order: of each step one, coarsely spread over the run first.

    Of a step's groups, informative ones come first.
    """
    of_steps: dict[int, list[int]] = {}
    for each, group in enumerate(whole):
        of_steps.setdefault(group[0]["step"], []).append(each)
    rank: dict[int, tuple[int, float]] = {}
    for place, step in enumerate(sorted(of_steps, reverse=True)):
        best_first = sorted(of_steps[step], key=lambda each: "mixed" not in whole[each][0]["is"])
        rank |= {each: (number, _turn(place)) for number, each in enumerate(best_first)}
    kept: dict[int, Group] = {}
    left = max_bytes
    for each in sorted(rank, key=rank.__getitem__):
        shown = _for_page(whole[each], limit)
        size = len(script_json(shown).encode(errors="backslashreplace"))
        if size <= left:
            kept[each] = shown
            left -= size
        if left < max_bytes / 100:  # full: the others need not be looked at
            break
    return [kept[each] for each in sorted(kept)]


def _turn(place: int) -> float:
    """Its binary digits mirrored at the point; in this order, any first few places are spread."""
    return sum((place >> digit & 1) / 2 ** (digit + 1) for digit in range(place.bit_length()))
