"""Runs the demo for several seeds, each with its own checkpoint made on the spot.

    python benchmarks/demo_seeds.py --jobs 2
    python benchmarks/demo_seeds.py --lora --seeds 0

Prints one JSON line: per seed the held-out pass@1 at the training temperature and the greedy
accuracy, before and after, how many of 16 samples say what 3 + 4 is, the findings (there should be
none), and the seconds and the CPU seconds that making the checkpoint and training took.
"""

import argparse
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import BIN, DEMO, report, tune_run

from torchtune_grpo.monitor.record import read

LORA = ["model=torchtune_grpo.models.lora_hf_model", "optimizer.lr=1e-3"]


def train(seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One demo run in a folder of its own."""
    start = time.perf_counter()
    usage = tune_run(DEMO, folder, [f"seed={seed}", *overrides])
    seconds = time.perf_counter() - start
    sample = [BIN / "torchtune-grpo", "sample", folder, "--prompt", "What is 3 + 4?"]
    sample += ["--samples", "16"]
    said = subprocess.run(sample, check=True, capture_output=True, text=True).stdout
    evaluated = read(folder, "evaluation")
    first, last = evaluated[0], evaluated[-1]
    return {
        "seed": seed,
        "pass@1 before": round(first["eval/pass@1"], 3),
        "pass@1 after": round(last["eval/pass@1"], 3),
        "greedy before": round(first["eval/accuracy"], 3),
        "greedy after": round(last["eval/accuracy"], 3),
        "3 + 4": said.count("<answer>7</answer>"),
        "findings": [e["name"] for e in read(folder, "finding") if e["event"] == "begins"],
        "seconds": round(seconds),
        "CPU seconds": round(usage.ru_utime + usage.ru_stime),
    }


def main() -> None:
    """Runs the seeds, as many at once as there are jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--lora", action="store_true", help="LoRA instead of full fine-tuning")
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    args = parser.parse_intermixed_args()
    overrides = (LORA if args.lora else []) + args.overrides
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(args.jobs) as pool:
        runs = pool.map(lambda seed: train(seed, overrides, Path(work) / str(seed)), args.seeds)
        report("demo_seeds", args, runs=list(runs))


if __name__ == "__main__":
    main()
