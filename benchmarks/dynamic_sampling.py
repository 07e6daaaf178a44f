"""Where dynamic sampling pays: on the demo's task, from a model that is often right and a rare one.

    python benchmarks/dynamic_sampling.py --work-dir FOLDER --picture docs/dynamic_sampling.png

Trains the demo at a constant learning rate from two models, which are warmed up in ``--work-dir``
where they are missing: the demo's own, right one time in four at first and soon nearly always; and
one that works out its answers so rarely that it is right one time in eight. A run that has ended is
not repeated. Prints one JSON line: for each run, at each evaluation, the step, the completions
sampled and the seconds of all steps so far, and the held-out pass@1; and the share of the sampled
groups that had an advantage. Seconds are of a machine that does nothing else.
"""

import argparse
import json
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtune_grpo import tiny as _warmup
from torchtune_grpo.monitor.record import read
from torchtune_grpo.tiny import make_tiny_checkpoint

# Of a warm-up, at its end: share of answers that are guessed.
MODELS = {"often right": 0.8, "rarely right": 0.985}
STEPS = {0: 60, 3: 24}  # by max_resamples; about as many completions
COMMON = ["lr_scheduler=null", "optimizer.lr=3e-4"]
COMMON += ["evaluation.every_n_steps=4", "dynamic_sampling.reward=correctness"]


def model_dir(model: str, work: Path) -> Path:
    """The folder of a model, which is made if it is missing."""
    folder = work / model.replace(" ", "_")
    if not folder.exists():
        _warmup.GUESSES = MODELS[model]
        make_tiny_checkpoint(folder)
    return folder


def train(model: str, resamples: int, seed: int, work: Path) -> dict[str, Any]:
    """One run, in a process of its own."""
    folder = work / f"{model.replace(' ', '_')}_{resamples}_{seed}"
    if not any(folder.glob("step_*")):
        command = [Path(sys.executable).parent / "tune", "run", "grpo_full_finetune_single_device"]
        command += ["--config", "tiny_arithmetic_grpo", f"output_dir={folder}", f"seed={seed}"]
        command += [f"model_dir={model_dir(model, work)}", "prepare.seed=0", *COMMON]
        command += [f"num_steps={STEPS[resamples]}"]
        command += [f"dynamic_sampling.max_resamples={resamples}"]
        subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)
    steps = read(folder, "step")
    sampled = [16 * len(event["prompts"]["prompt_index"]) for event in steps]
    seconds = [0.0, *accumulate(record["step_time"] for record in steps)]
    samples = [0, *accumulate(sampled)]
    names = ("step", "samples", "seconds", "pass@1")
    rows = [
        (s := r["step"], samples[s], round(seconds[s], 1), round(r["eval/pass@1"], 4))
        for r in read(folder, "evaluation")
    ]
    kept = [record["frac_informative_groups"] for record in steps]
    return {
        "model": model,
        "max_resamples": resamples,
        "seed": seed,
        "informative": round(sum(kept) / len(kept), 3),
        **{name: [*column] for name, column in zip(names, zip(*rows, strict=True), strict=True)},
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Pass@1 against the completions sampled, from each model."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, model in zip(axes, MODELS, strict=True):
        for run in (run for run in runs if run["model"] == model):
            resamples, label = run["max_resamples"], None
            if run["seed"] == runs[0]["seed"]:
                label = f"max_resamples: {resamples}"
            axis.plot(run["samples"], run["pass@1"], f"C{resamples > 0:d}", lw=1.2, label=label)
        axis.set(xlabel="completions sampled", title=model, ylim=(0.6, 1.0))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out pass@1")
    axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Runs what has not run yet, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--picture", type=Path, help="PNG to draw; needs matplotlib")
    args = parser.parse_args()
    arms = [(model, resamples) for model in MODELS for resamples in STEPS]
    runs = [train(*arm, seed, args.work_dir) for seed in args.seeds for arm in arms]
    if args.picture:
        draw(runs, args.picture)
    print(json.dumps({"benchmark": "dynamic_sampling", "runs": runs}))


if __name__ == "__main__":
    main()
