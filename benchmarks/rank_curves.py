"""The demo on one rank and on two, with the same global batch and seed: do the curves agree?

    python benchmarks/rank_curves.py --work-dir /tmp/rank_curves --picture docs/two_ranks.png

Runs ``tiny_arithmetic_grpo`` with the single-device recipe, and twice with ``tune run
--nproc_per_node 2 grpo_full_finetune_distributed``: as it is, which shards the model, and with
``distributed.sharding=never``. ``batch_size`` is halved there, since it is that of a rank. All
start from one checkpoint, made in ``--work-dir`` by a warm-up of about a minute. A run that has
ended there is not repeated.

Draws training reward and held-out pass@1, and prints one JSON line: for each run where it ends, and
against the first run the first step with another reward or completion, the largest difference of a
step's reward, and of a weight at the end. One completion that differs moves a step's reward by
0.0004 or more; less is taken for the order of a sum.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchtune_grpo.monitor.jsonl import read_jsonl

CONFIG = "tiny_arithmetic_grpo"
PROMPTS, SAMPLES = 16, 16  # of the config: all ranks together, in a group
SINGLE, DISTRIBUTED = "grpo_full_finetune_single_device", "grpo_full_finetune_distributed"
TWO_RANKS = ["--nproc_per_node", 2, DISTRIBUTED]
HALF = f"batch_size={PROMPTS // 2}"
# name -> arguments of `tune run`, overrides
RUNS = {
    "one rank": ([SINGLE], []),
    "two ranks, sharded": (TWO_RANKS, [HALF]),
    "two ranks, replicated": (TWO_RANKS, [HALF, "distributed.sharding=never"]),
}
LOOKS = {"lw": 4, "alpha": 0.4}, {"lw": 1.5}, {"lw": 1.5, "ls": "--", "color": "black"}
TOLERANCE = 1e-9  # of a mean reward


def series(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    found = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def train(name: str, args: argparse.Namespace) -> Path:
    """One run in a process of its own, unless it has ended already; returns its folder."""
    launch, overrides = RUNS[name]
    folder = args.work_dir / name.replace(" ", "_").replace(",", "")
    if any(folder.glob("step_*")):
        return folder
    command = [Path(sys.executable).parent / "tune", "run", *launch, "--config", CONFIG]
    command += [f"output_dir={folder}", f"seed={args.seed}", *overrides]
    command += [f"model_dir={args.work_dir / 'tiny_llama'}"]
    command += [f"log_groups={PROMPTS}"]  # all, to see the first that differs
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=environment)
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return folder


def completions(folder: Path) -> dict[int, list[tuple[str, str]]]:
    """Prompts and completions by step, in an order that does not depend on the ranks."""
    by_step: dict[int, list[tuple[str, str]]] = {}
    for record in read_jsonl(folder / "completions.jsonl"):
        by_step.setdefault(record["step"], []).append((record["prompt"], record["completion"]))
    return {step: sorted(texts) for step, texts in by_step.items()}


def weight_gap(folder: Path, first: Path) -> float:
    """The largest difference of a weight in the two runs' checkpoints."""
    mine, theirs = (
        load_file(next(run.glob("step_*/model*.safetensors"))) for run in (folder, first)
    )
    return max((mine[name] - theirs[name]).abs().max().item() for name in theirs)


def compare(folder: Path, first: Path) -> dict[str, Any]:
    """Where a run leaves the first one, and how far it gets from it."""
    steps, rewards = series(read_jsonl(folder / "metrics.jsonl"), "reward")
    others = series(read_jsonl(first / "metrics.jsonl"), "reward")[1]
    gaps = [abs(reward - other) for reward, other in zip(rewards, others, strict=True)]
    said, expected = completions(folder), completions(first)
    changed = {
        step: sum(one != other for one, other in zip(said[step], expected[step], strict=True))
        for step in steps
    }
    differs = [step for step in steps if changed[step]]
    return {
        "first step with another completion": differs[0] if differs else None,
        "completions that differ there": changed[differs[0]] if differs else 0,
        "first step with another reward": next(
            (step for step, gap in zip(steps, gaps, strict=True) if gap > TOLERANCE), None
        ),
        "largest difference of a step's reward": round(max(gaps), 4),
        "largest difference of a final weight": weight_gap(folder, first),
    }


def summary(folder: Path) -> dict[str, float]:
    """What a run has reached."""
    records = read_jsonl(folder / "metrics.jsonl")
    names = ("reward", "eval/accuracy", "eval/pass@1")
    return {name: round(series(records, name)[1][-1], 4) for name in names}


def draw(folders: dict[str, Path], picture: Path) -> None:
    """All runs in one picture: training reward, held-out accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for (name, folder), look in zip(folders.items(), LOOKS, strict=True):
        records = read_jsonl(folder / "metrics.jsonl")
        left.plot(*series(records, "reward"), label=name, **look)
        right.plot(*series(records, "eval/pass@1"), marker="o", ms=4, label=name, **look)
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
    first = folders["one rank"]
    results = {
        name: summary(folder) | (compare(folder, first) if folder != first else {})
        for name, folder in folders.items()
    }
    settings = {"config": CONFIG, "seed": args.seed, "threads a rank": 1, "runs": RUNS}
    name = {"benchmark": "rank_curves", "torch": torch.__version__}
    print(json.dumps({**name, "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
