"""Compares what `torchtune-grpo plan` says of a run with what the run then does.

    python benchmarks/plan.py --model tiny
    python benchmarks/plan.py --model smollm2

The settings are the shipped config's, with other seeds, and with each failure provoked. Each is
planned and then run for 30 steps, on one thread, in a folder of its own below ``--work``; a second
call continues where the first one was stopped.

Prints one JSON line: per setting the verdict, the prediction and the truth, and how many runs of
each verdict learned. A run has learned if the deciding reward's mean over the last five steps is
above that of all that the plan sampled by 0.1 or more.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

from common import BIN, report, tune_run

from torchtune_grpo.monitor.record import read_metrics

STEPS = 30
CONFIGS = {"tiny": "tiny_arithmetic_grpo", "smollm2": "smollm2_135M_grpo"}
COMMON = ["eval_dataset=null", "evaluation.every_n_steps=null", "lr_scheduler=null"]
SETTINGS = {
    "tiny": [
        *([f"seed={seed}"] for seed in range(5)),
        *([f"optimizer.lr={rate}"] for rate in (5e-9, 5e-7, 5e-6, 2e-4, 1e-3, 5e-3, 5e-2, 0.5)),
        *([f"max_generated_tokens={count}"] for count in (2, 4, 8, 16, 96)),
        *([f"temperature={value}"] for value in (0.1, 0.5, 3.0)),
        *([f"grpo_samples={count}"] for count in (2, 4, 32)),
        *([f"batch_size={count}"] for count in (4, 64)),
        ["dataset.prefill=null"],
        ["dataset.levels=[1]", "eval_dataset.levels=[1]"],
        ["loss.kl_coeff=1.0"],
    ],
    "smollm2": [
        *([f"seed={seed}"] for seed in range(3)),
        *([f"optimizer.lr={rate}"] for rate in (4e-7, 1e-4, 4e-3, 4e-2)),
        *([f"max_generated_tokens={count}"] for count in (2, 4)),
        ["grpo_samples=4"],
        ["temperature=0.1"],
        ["dataset.prefill=null"],
        ["dataset.task=product", "dataset.num_samples=80"],
        ["dataset.task=sum"],
    ],
}


def compare(config: str, keys: list[str], folder: Path) -> dict[str, Any]:
    """Plan and run a setting; return what was predicted and what happened."""
    keys = [*keys, *COMMON, f"num_steps={STEPS}"]
    if not (folder / "plan.json").exists():
        command = [BIN / "torchtune-grpo", "plan", "--config", config, f"output_dir={folder}"]
        subprocess.run(
            [*command, *keys], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=sys.stderr
        )
    plan = json.loads((folder / "plan.json").read_text())
    if len(read_metrics(folder)) < STEPS:
        tune_run(config, folder, keys)
    steps = read_metrics(folder)
    right = [step["rewards/correctness/mean"] for step in steps]
    found: dict[str, Any] = {"keys": keys[: -len(COMMON) - 1], "verdict": plan["verdict"]}
    found |= {"right": plan["pass_rate"][0], "last": mean(right[-5:]), "moved": plan["moved"]}
    found |= {"reasons": plan["reasons"]}
    for name, metric in (
        ("informative", "frac_informative_groups"),
        ("cut_off", "completions/clipped_ratio"),
    ):
        found |= {name: plan[name], f"{name}/3": mean(step[metric] for step in steps[:3])}
    seconds = [step["step_time"] for step in steps[:10]]
    found |= {"step": plan["time"]["step"], "step/10": mean(seconds[1:])}
    return found


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the runs of each verdict that learned."""
    verdicts: Counter[str] = Counter()
    for found in results:
        learned = found["last"] - found["right"] >= 0.1
        verdicts[f"{found['verdict']}: {'learned' if learned else 'did not'}"] += 1
    return {"runs": len(results), "verdicts": dict(verdicts)}


def main() -> None:
    """Plan and run every setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=CONFIGS, default="tiny")
    parser.add_argument("--work", type=Path, default=Path("plan_runs"))
    args = parser.parse_args()
    config = CONFIGS[args.model]
    results = []
    for keys in SETTINGS[args.model]:
        results.append(compare(config, keys, args.work / "_".join([args.model, *keys])))
        print(results[-1], flush=True)
    report("plan", args, results=results, **summary(results))


if __name__ == "__main__":
    main()
