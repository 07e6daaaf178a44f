"""The demo on one rank and on two, with the same global batch and seed: do the curves agree?

    python benchmarks/rank_curves.py --work-dir /tmp/rank_curves --picture docs/two_ranks.png

Runs ``tiny_arithmetic_grpo`` with the single-device recipe, and with two ranks, sharded and
replicated. All start from one checkpoint, made in ``--work-dir`` by a warm-up of about a minute. A
run that has ended there is not repeated.

Draws training reward and held-out pass@1, and prints one JSON line: for each run where it ends, and
against the first run the first step with another completion, the largest difference of a step's
reward, and of a weight at the end.
"""

import argparse
from pathlib import Path
from typing import Any

from common import DEMO, report, train_once
from safetensors.torch import load_file

from torchtune_grpo.monitor.record import COMPLETIONS_FILE, read_lines, read_metrics

PROMPTS = 16  # of the config: all ranks together
HALF = f"batch_size={PROMPTS // 2}"
# name -> ranks, overrides, look in the picture
RUNS = {
    "one rank": (1, [], {"lw": 4, "alpha": 0.4}),
    "two ranks, sharded": (2, [HALF, "distributed.sharding=always"], {"lw": 1.5}),
    "two ranks, replicated": (
        2,
        [HALF, "distributed.sharding=never"],
        {"lw": 1.5, "ls": "--", "color": "black"},
    ),
}


def series(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    records = [r for r in read_metrics(folder) if r.get(name) is not None]
    return [record["step"] for record in records], [record[name] for record in records]


def completions(folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Prompts and completions by step, in an order that does not depend on the ranks."""
    by_step: dict[int, list[tuple[str, str]]] = {}
    for record in read_lines(folder / COMPLETIONS_FILE):
        by_step.setdefault(record["step"], []).append((record["prompt"], record["completion"]))
    return {step: sorted(texts) for step, texts in by_step.items()}


def compare(folder: Path, first: Path) -> dict[str, Any]:
    """Where a run ends, where it leaves the first one, and how far it gets from it."""
    said, expected = completions(folder), completions(first)
    rewards = zip(series(folder, "reward")[1], series(first, "reward")[1], strict=True)
    mine, theirs = (
        load_file(next(run.glob("step_*/model*.safetensors"))) for run in (folder, first)
    )
    gaps = ((mine[name] - theirs[name]).abs().max().item() for name in theirs)
    ends = ("reward", "eval/accuracy", "eval/pass@1")
    return {end: round(series(folder, end)[1][-1], 4) for end in ends} | {
        "first step with another completion": next(
            (step for step in sorted(expected) if said[step] != expected[step]), None
        ),
        "largest difference of a step's reward": max(abs(a - b) for a, b in rewards),
        "largest difference of a final weight": max(gaps),
    }


def draw(folders: dict[str, Path], picture: Path) -> None:
    """All runs in one picture: training reward, held-out accuracy."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, folder in folders.items():
        look = RUNS[name][2]
        left.plot(*series(folder, "reward"), label=name, **look)
        right.plot(*series(folder, "eval/pass@1"), marker="o", ms=4, label=name, **look)
    left.set(xlabel="step", title="Training reward")
    right.set(xlabel="step", title="Held-out accuracy", ylim=(-0.02, 1.02))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Runs what is missing, compares, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/rank_curves"))
    parser.add_argument("--picture", type=Path, help="PNG to draw; needs matplotlib")
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    args = parser.parse_intermixed_args()
    work = args.work_dir.resolve()
    folders = {name: work / name.replace(" ", "_").replace(",", "") for name in RUNS}
    for name, (ranks, overrides, _) in RUNS.items():
        keys = [f"model_dir={work / 'tiny_llama'}", f"log_groups={PROMPTS}", *overrides]
        train_once(DEMO, folders[name], [*keys, *args.overrides], ranks=ranks, threads=1)
    if args.picture:
        draw(folders, args.picture)
    first = folders["one rank"]
    report("rank_curves", args, runs={name: compare(f, first) for name, f in folders.items()})


if __name__ == "__main__":
    main()
