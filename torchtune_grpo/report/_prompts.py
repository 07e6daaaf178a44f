"""The pass rate of each prompt at each step that it was seen at."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_grpo.report._run import Run, number

MAX_PROMPTS, MAX_CELLS = 40, 200  # rows of the map, and cells of a row


@dataclass(frozen=True)
class Map:
    """Cells of prompts that were seen at least twice.

    Attributes:
        prompts (list[int]): index of each row's prompt, the lowest mean pass rate first.
        num_repeated (int): prompts that were seen at least twice; some may have no row.
        rows (list[int]): each cell's row.
        starts (list[int]): the cell's step.
        ends (list[int]): the next step at which the prompt came, or the one after the last.
        rates (list[float]): pass rates.
    """

    prompts: list[int]
    num_repeated: int
    rows: list[int]
    starts: list[int]
    ends: list[int]
    rates: list[float]


def prompt_map(run: Run) -> Map | None:
    """None where no prompt was seen twice."""
    seen: dict[int, list[tuple[int, float]]] = {}
    for record in run.prompts:
        pairs = zip(record.get("prompt_index") or [], record.get("pass_rate") or [])
        for index, rate in pairs:
            if number(rate) is not None:
                seen.setdefault(index, []).append((record["step"], rate))
    repeated = {index: cells for index, cells in seen.items() if len(cells) > 1}
    if not repeated:
        return None
    hardest_first = sorted(
        repeated,
        key=lambda index: (sum(r for _, r in repeated[index]) / len(repeated[index]), index),
    )
    every = -(-len(hardest_first) // MAX_PROMPTS)
    shown = Map(hardest_first[::every], len(repeated), [], [], [], [])
    for row, index in enumerate(shown.prompts):
        cells = repeated[index]
        kept = cells[:: -(-len(cells) // MAX_CELLS)]
        ends = [step for step, _ in kept[1:]] + [run.steps_done + 1]
        for (step, rate), end in zip(kept, ends, strict=True):
            shown.rows.append(row)
            shown.starts.append(step)
            shown.ends.append(end)
            shown.rates.append(rate)
    return shown
