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
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchtune_grpo.monitor.record import COMPLETIONS_FILE, read_lines, read_metrics

CONFIG = "tiny_arithmetic_grpo"
PROMPTS = 16  # of the config: all ranks together
SINGLE, DISTRIBUTED = "grpo_full_finetune_single_device", "grpo_full_finetune_distributed"
TWO_RANKS = ["--nproc_per_node", "2", DISTRIBUTED]
HALF = f"batch_size={PROMPTS // 2}"
# name -> arguments of `tune run`, overrides
RUNS = {
    "one rank": ([SINGLE], []),
    "two ranks, sharded": (TWO_RANKS, [HALF]),
    "two ranks, replicated": (TWO_RANKS, [HALF, "distributed.sharding=never"]),
}
LOOKS = {"lw": 4, "alpha": 0.4}, {"lw": 1.5}, {"lw": 1.5, "ls": "--", "color": "black"}


def train(name: str, args: argparse.Namespace) -> Path:
    """One run in a process of its own, unless it has ended already; returns its folder."""
    launch, overrides = RUNS[name]
    folder = args.work_dir / name.replace(" ", "_").replace(",", "")
    if not any(folder.glob("step_*")):
        command = [str(Path(sys.executable).parent / "tune"), "run", *launch, "--config", CONFIG]
        command += [f"output_dir={folder}", f"model_dir={args.work_dir / 'tiny_llama'}"]
        command += [f"seed={args.seed}", f"log_groups={PROMPTS}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    return folder


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
    """Where a run leaves the first one, and how far it gets from it."""
    said, expected = completions(folder), completions(first)
    rewards = zip(series(folder, "reward")[1], series(first, "reward")[1], strict=True)
    mine, theirs = (
        load_file(next(run.glob("step_*/model*.safetensors"))) for run in (folder, first)
    )
    gaps = ((mine[name] - theirs[name]).abs().max().item() for name in theirs)
    return {
        "first step with another completion": next(
            (step for step in sorted(expected) if said[step] != expected[step]), None
        ),
        "largest difference of a step's reward": max(abs(a - b) for a, b in rewards),
        "largest difference of a final weight": max(gaps),
    }


def draw(folders: dict[str, Path], picture: Path) -> None:
    """All runs in one picture: training reward, held-out accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for (name, folder), look in zip(folders.items(), LOOKS, strict=True):
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
    parser.add_argument("--picture", type=Path, default=Path("two_ranks.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    folders = {name: train(name, args) for name in RUNS}
    draw(folders, args.picture)
    ends = ("reward", "eval/accuracy", "eval/pass@1")
    results = {
        name: {end: round(series(folder, end)[1][-1], 4) for end in ends}
        | compare(folder, folders["one rank"])
        for name, folder in folders.items()
    }
    settings = {"config": CONFIG, "seed": args.seed, "threads a rank": 1, "runs": RUNS}
    name = {"benchmark": "rank_curves", "torch": torch.__version__}
    print(json.dumps({**name, "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
