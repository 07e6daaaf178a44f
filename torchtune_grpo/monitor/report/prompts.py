"""How often a group's answers are right: over all prompts, and prompt by prompt."""

from __future__ import annotations

from typing import Any

from torchtune_grpo.monitor.report.panels import Panel, coloured, thinned
from torchtune_grpo.monitor.report.run import Run, number

MAX_PROMPTS, MAX_CELLS = 40, 200  # rows of the map, and cells of a row
_KINDS = ("none right", "few: up to 1/3", "some: up to 2/3", "most", "all right")
_FIRST_COLOUR = 11  # of page.css, none right; then four more


def pass_rate_panel(run: Run) -> list[Panel]:
    """The share of groups by how many of their answers are right, at each step."""
    records = [record for record in thinned(run.prompts) if record.get("pass_rate")]
    steps, shares = [record["step"] for record in records], []
    for record in records:
        rates = [rate for rate in map(number, record["pass_rate"]) if rate is not None]
        kinds = [0 if r <= 0 else 4 if r >= 1 else 1 + (r > 1 / 3) + (r > 2 / 3) for r in rates]
        shares.append([kinds.count(kind) / max(1, len(kinds)) for kind in range(len(_KINDS))])
    lines = [
        {"label": label, "steps": steps, "values": values}
        for label, values in zip(_KINDS, zip(*shares))
    ]
    if not lines:
        return []
    what = (
        "Share of groups at each step. Only the three in the middle teach: where none or all are "
        "right, the answers cannot be told apart. Good: a broad middle that moves to the right "
        "answers."
    )
    return [
        {
            "title": "How many of a group's answers are right",
            "what": what,
            "axis": "share",
            "kind": "stack",
            "lines": coloured(lines, stack=True, first=_FIRST_COLOUR),
        }
    ]


def prompt_map(run: Run) -> dict[str, Any] | None:
    """Cells of prompts that were seen at least twice; None if no prompt was.

    Returns:
        dict[str, Any] | None: ``prompts``, the index of each row's prompt, the lowest mean pass
        rate first; ``num_repeated``, how many there are, with those that have no row; and of each
        cell ``rows``, ``starts`` (its step), ``ends`` (when the prompt came again) and ``rates``.
    """
    seen: dict[int, list[tuple[int, float]]] = {}
    for record in run.prompts:
        for index, rate in zip(record.get("prompt_index") or [], record.get("pass_rate") or []):
            if number(rate) is not None:
                seen.setdefault(index, []).append((record["step"], rate))
    means = {index: sum(r for _, r in at) / len(at) for index, at in seen.items() if len(at) > 1}
    hardest_first = sorted(means, key=lambda index: (means[index], index))
    shown = hardest_first[:: -(-len(hardest_first) // MAX_PROMPTS) or 1]
    cells = []
    for row, index in enumerate(shown):
        kept = seen[index][:: -(-len(seen[index]) // MAX_CELLS)]
        ends = [step for step, _ in kept[1:]] + [run.steps_done + 1]
        cells += [(row, step, end, rate) for (step, rate), end in zip(kept, ends, strict=True)]
    if not cells:
        return None
    columns = dict(zip(("rows", "starts", "ends", "rates"), zip(*cells)))
    return {"prompts": shown, "num_repeated": len(means), **columns}
