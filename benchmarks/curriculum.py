"""The demo on levels 1 to 5, with each shipped sampler: does the order of the prompts matter?

    python benchmarks/curriculum.py --work-dir FOLDER --picture docs/curriculum.png

Runs ``tiny_arithmetic_grpo`` for ``--steps`` steps with ``sampler`` left out (shuffled), by level
and by difficulty, for each seed; all start from one model, warmed up in ``--work-dir`` on levels 1
to 3, as the demo's: it hardly ever solves the other two. A run that has ended there is not
repeated. Draws held-out pass@1 of levels 1 to 3 and of the others, and prints one JSON line: pass@1
at the end by level, the steps to ``--goal`` on levels 1 to 3, and the share of groups that taught
something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from torchtune_grpo.data import arithmetic_problems
from torchtune_grpo.monitor.record import read

LEVELS, HELD_OUT = [1, 2, 3, 4, 5], 200
SAMPLERS = {
    "shuffled": [],
    "by level": ["sampler._component_=torchtune_grpo.data.LevelSampler"],
    "by difficulty": ["sampler._component_=torchtune_grpo.data.DifficultySampler"],
}


def train(name: str, seed: int, args: argparse.Namespace) -> Path:
    """One run in a process of its own, unless it has ended already; returns its folder."""
    folder = args.work_dir / f"{name.replace(' ', '_')}_{seed}"
    if any(folder.glob("step_*")):
        return folder
    command = [Path(sys.executable).parent / "tune", "run", "grpo_full_finetune_single_device"]
    command += ["--config", "tiny_arithmetic_grpo", f"output_dir={folder}", f"seed={seed}"]
    command += [f"model_dir={args.work_dir / 'tiny_llama'}", "prepare.seed=0"]
    command += [f"{node}.levels={LEVELS}" for node in ("dataset", "eval_dataset")]
    command += [f"eval_dataset.num_samples={HELD_OUT}", f"num_steps={args.steps}"]
    command += [*SAMPLERS[name], *args.overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, env=environment)
    return folder


def curves(folder: Path) -> list[dict[str, Any]]:
    """Of each evaluation its step, and pass@1 of each level, of 1 to 3 and of the others."""
    rows = arithmetic_problems(levels=LEVELS, split="test", num_samples=HELD_OUT)
    points = []
    for event in read(folder, "evaluation"):
        found, prompts = defaultdict(list), event["prompts"]
        for index, share in zip(prompts["prompt_index"], prompts["pass@1"], strict=True):
            for level in (rows[index]["level"], "1 to 3" if rows[index]["level"] < 4 else "4, 5"):
                found[level].append(share)
        points.append({"step": event["step"], **{k: statistics.mean(found[k]) for k in found}})
    return points


def summary(folders: list[Path], goal: float) -> dict[str, Any]:
    """Each seed's number."""
    each = [curves(folder) for folder in folders]
    taught = [
        [event["frac_informative_groups"] for event in read(folder, "step")] for folder in folders
    ]
    return {
        "by level": {level: [round(run[-1][level], 3) for run in each] for level in LEVELS},
        f"steps to {goal}": [
            next((point["step"] for point in run if point["1 to 3"] >= goal), None) for run in each
        ],
        "informative groups": [round(statistics.mean(shares), 2) for shares in taught],
    }


def draw(folders: dict[str, list[Path]], picture: Path) -> None:
    """Left levels 1 to 3, right the others; thin lines are seeds, thick ones means."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {name: [curves(folder) for folder in each] for name, each in folders.items()}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for each, levels in zip(axes, ("1 to 3", "4, 5"), strict=True):
        for number, (name, curves_of_seeds) in enumerate(runs.items()):
            steps = [point["step"] for point in curves_of_seeds[0]]
            lines = [[point[levels] for point in run] for run in curves_of_seeds]
            for line in lines:
                each.plot(steps, line, color=f"C{number}", lw=0.7, alpha=0.5)
            mean = [statistics.mean(values) for values in zip(*lines, strict=True)]
            each.plot(steps, mean, color=f"C{number}", lw=2, label=name)
        each.set(xlabel="step", title=f"levels {levels}", ylim=(-0.02, 1.02))
        each.grid(alpha=0.3)
        each.legend(loc="lower right")
    axes[0].set(ylabel="held-out pass@1")
    figure.savefig(picture, dpi=100)


def main() -> None:
    """Runs what is missing, draws, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--overrides", nargs="*", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    folders = {name: [train(name, seed, args) for seed in args.seeds] for name in args.samplers}
    if args.picture:
        draw(folders, args.picture)
    results = {name: summary(each, args.goal) for name, each in folders.items()}
    settings = {"seeds": args.seeds, "steps": args.steps, "overrides": args.overrides}
    print(json.dumps({"benchmark": "curriculum", "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
