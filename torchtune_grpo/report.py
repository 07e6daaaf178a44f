"""The run as a picture and a few lines: ``python -m torchtune_grpo.report OUTPUT_DIR``.

Draws ``reward_curve.png`` from the run's ``metrics.jsonl`` and prints held-out accuracy before and
after. Needs matplotlib: ``pip install matplotlib``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtune_grpo.jsonl import read_jsonl

Series = tuple[list[int], list[float]]


def series(records: list[dict[str, Any]], name: str) -> Series:
    """Steps and values of one metric, where it was recorded."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


@contextmanager
def axes_of_a_run(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yields the axes of training reward and of held-out accuracy; saves their picture after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    yield left, right
    left.set(xlabel="step", title="Training reward")
    right.set(xlabel="step", title="Held-out accuracy", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_reward_curve(records: list[dict[str, Any]], path: Path) -> None:
    """Draws reward, its spread within the groups, and held-out accuracy against the step."""
    with axes_of_a_run(path) as (left, right):
        # One of the two may be null by itself: the square of a large reward overflows.
        known = [r for r in records if None not in (r.get("reward"), r.get("reward_std_in_group"))]
        steps, rewards = series(known, "reward")
        _, spread = series(known, "reward_std_in_group")
        left.plot(steps, rewards, color="tab:blue", label="reward")
        low = [r - s for r, s in zip(rewards, spread, strict=True)]
        high = [r + s for r, s in zip(rewards, spread, strict=True)]
        left.fill_between(
            steps, low, high, color="tab:blue", alpha=0.2, label="± spread in a group"
        )
        for name in _eval_names(records):
            right.plot(*series(records, name), marker="o", label=name.removeprefix("eval/"))


def _eval_names(records: list[dict[str, Any]]) -> list[str]:
    names = {name for record in records for name in record if name.startswith("eval/")}
    return sorted(name for name in names if series(records, name)[0])


def summary(records: list[dict[str, Any]]) -> list[str]:
    """One line per evaluation metric: its first and its last value."""
    lines = []
    for name in _eval_names(records):
        steps, values = series(records, name)
        lines.append(
            f"held-out {name.removeprefix('eval/')}: {values[0]:.3f} before (step {steps[0]}), "
            f"{values[-1]:.3f} after (step {steps[-1]})"
        )
    return lines


def main() -> None:
    """Reads a run's folder, prints the summary and the picture's path."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="the run's output_dir")
    folder = parser.parse_args().output_dir
    file = folder / "metrics.jsonl"
    if not file.is_file():
        parser.error(f"{file} does not exist; give the output_dir of a run that made a step.")
    records = read_jsonl(file)
    picture = folder / "reward_curve.png"
    draw_reward_curve(records, picture)
    print("\n".join([*summary(records), f"reward curve: {picture}"]))


if __name__ == "__main__":
    main()
