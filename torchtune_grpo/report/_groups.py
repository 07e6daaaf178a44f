"""The completions of a page: whole groups, bounded in size, each marked for the filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtune_grpo.plain import visible
from torchtune_grpo.report._run import Record, Run, as_text, number, script_json

MAX_BYTES = 4_500_000  # of all groups: with bokeh (1.3 MB) and curves the page stays below 8 MB
MAX_TEXT = 6000  # characters of a completion
_SMALLEST_TEXT = 1500  # before groups are left out
_MAX_SHORT_TEXT = 600  # of a column or an extra
_NUM_GAPS = 20  # completions that count as the largest gaps

Text = str | list[str | int]

FILTERS = {
    "mixed": ("informative", "Groups in which answers differ in their advantage: these teach."),
    "ill": ("right, ill-formed", "The answer is right, but the format's reward is not full."),
    "wrong": ("well-formed, wrong", "The format's reward is full, but the answer is wrong."),
    "cut": ("cut off", "Ended by max_generated_tokens or by the deadline."),
    "failed": ("failed reward", "A reward raised, timed out or returned no number."),
    "gap": ("largest gap", "Sampler and trainer disagree most about these tokens."),
}


def groups_of(run: Run, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Groups for the page, prompts apart from them, and how many were left out.

    The longest texts are shortened first. If that is not enough, groups are left out: those with
    equal advantages first, and of a run's steps every second, then every fourth.
    """
    whole = _whole_groups(run.completions())
    _mark(whole, run)
    limit, groups = MAX_TEXT, [_for_page(group, MAX_TEXT) for group in whole]
    sizes = [_size(group) for group in groups]
    while sum(sizes) > max_bytes and limit > _SMALLEST_TEXT:
        limit //= 2
        groups = [_for_page(group, limit) for group in whole]
        sizes = [_size(group) for group in groups]
    kept = _fitting(groups, sizes, max_bytes)
    return {
        "groups": [groups[each] for each in kept],
        "recorded": len(whole),
        "filters": [[name, *FILTERS[name]] for name in FILTERS],
    }


def shortened(text: str, limit: int) -> Text:
    """Visible text; of a longer one its beginning, how many characters are left out, its end."""
    if len(text) <= limit:
        return visible(text)
    head, tail = limit * 2 // 3, limit // 3
    return [visible(text[:head]), len(text) - head - tail, visible(text[-tail:])]


def _whole_groups(rows: list[Record]) -> list[list[Record]]:
    """Neighbours of one step and prompt; a sample that is not larger begins a new group."""
    groups: list[list[Record]] = []
    last: tuple[object, ...] = ()
    for row in rows:
        key = (row["step"], row.get("prompt_index"), row.get("prompt"))
        sample = row.get("sample")
        again = sample is not None and groups and sample <= groups[-1][-1].get("sample", -1)
        if key != last or again:
            groups.append([])
        groups[-1].append(row)
        last = key
    return groups


def _mark(groups: list[list[Record]], run: Run) -> None:
    """Gives each row ``is``, the names of the filters that find it."""
    decides, form = _deciding_rewards(groups, run)
    full = _reaches_best(groups, form)
    rows = [row for group in groups for row in group]
    by_gap = sorted((row for row in rows if _gap(row) > 0), key=_gap, reverse=True)
    largest = {id(row) for row in by_gap[:_NUM_GAPS]}
    for group in groups:
        mixed = len({row.get("advantage") for row in group}) > 1
        for row in group:
            right, formed = _score(row, decides), full(row)
            is_right = right is not None and right >= 1
            cut = row.get("ended") in ("length", "deadline") or row.get("truncated") is True
            marks = {
                "mixed": mixed,
                "ill": is_right and formed is False,
                "wrong": right is not None and not is_right and formed is True,
                "cut": cut,
                "failed": bool(row.get("failed")),
                "gap": id(row) in largest,
            }
            row["is"] = [name for name, holds in marks.items() if holds]


def _deciding_rewards(groups: list[list[Record]], run: Run) -> tuple[str | None, str | None]:
    """The reward that decides accuracy, and the one for format."""
    names = list((groups[0][0].get("rewards") or {}) if groups else {})
    decides = run.scores[-1].get("reward") if run.scores else None
    if decides not in names:
        decides = names[0] if names else None
    return decides, next((name for name in names if "format" in name and name != decides), None)


def _reaches_best(groups: list[list[Record]], name: str | None) -> Callable[[Record], bool | None]:
    """Whether a row has the highest score that this reward ever gave; None if it has no score."""
    found = (_score(row, name) for group in groups for row in group)
    best = max((score for score in found if score is not None), default=0)

    def full(row: Record) -> bool | None:
        score = _score(row, name)
        return None if score is None else best > 0 and score >= best

    return full


def _score(row: Record, name: str | None) -> float | None:
    scores = row.get("rewards")
    return number(scores.get(name)) if isinstance(scores, Mapping) else None


def _gap(row: Record) -> float:
    sampler, trainer = (number(row.get(f"{who}_logprob")) for who in ("sampler", "trainer"))
    return 0.0 if sampler is None or trainer is None else abs(sampler - trainer)


def _for_page(group: list[Record], limit: int) -> dict[str, Any]:
    first = group[0]
    columns = first.get("columns")
    return {
        "step": first["step"],
        "index": number(first.get("prompt_index")),
        "prompt": shortened(str(first.get("prompt", "")), limit),
        "columns": _texts(columns if isinstance(columns, Mapping) else {}),
        "rows": [_row_for_page(row, limit) for row in group],
    }


def _row_for_page(row: Record, limit: int) -> dict[str, Any]:
    extra, rewards = (row.get(key) for key in ("extra", "rewards"))
    ended = row.get("ended") or ("length" if row.get("truncated") else "")
    failed = row.get("failed")
    return {
        "text": shortened(str(row.get("completion", "")), limit),
        "tokens": number(row.get("tokens")),
        "ended": visible(str(ended)).replace("_", " "),
        "reward": number(row.get("reward")),
        "rewards": [
            [visible(name), number(score)]
            for name, score in (rewards if isinstance(rewards, Mapping) else {}).items()
        ],
        "failed": [visible(str(name)) for name in failed] if isinstance(failed, list) else [],
        "advantage": number(row.get("advantage")),
        "logprobs": [number(row.get("sampler_logprob")), number(row.get("trainer_logprob"))],
        "extra": _texts(extra if isinstance(extra, Mapping) else {}),
        "is": row["is"],
    }


def _texts(values: Mapping[str, object]) -> list[tuple[str, Text]]:
    return [
        (visible(key), shortened(as_text(each), _MAX_SHORT_TEXT)) for key, each in values.items()
    ]


def _size(group: dict[str, Any]) -> int:
    return len(script_json(group).encode())


def _fitting(groups: list[dict[str, Any]], sizes: list[int], max_bytes: int) -> list[int]:
    """Numbers of the groups that fit, in order: informative ones first, spread over the steps."""
    steps = sorted({group["step"] for group in groups})
    turn = {step: _turn(len(steps) - 1 - place) for place, step in enumerate(steps)}
    informative = ["mixed" in group["rows"][0]["is"] for group in groups]
    order = sorted(
        range(len(groups)), key=lambda each: (not informative[each], turn[groups[each]["step"]])
    )
    kept, size = [], 0
    for each in order:
        if size + sizes[each] <= max_bytes:
            kept.append(each)
            size += sizes[each]
    return sorted(kept)


def _turn(number: int) -> float:
    """Its binary digits mirrored at the point: 0, 1/2, 1/4, 3/4, ...; any first few are spread.

    Turned by the number of digits, so that the numbers of a long row are taken in coarse steps
    first.
    """
    mirrored, digit = 0.0, 0.5
    while number:
        mirrored += digit * (number & 1)
        number, digit = number >> 1, digit / 2
    return mirrored
