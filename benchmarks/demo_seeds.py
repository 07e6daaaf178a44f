"""Runs the demo for several seeds, each with its own checkpoint made on the spot.

    python benchmarks/demo_seeds.py --jobs 2
    python benchmarks/demo_seeds.py --lora --seeds 0

Prints one JSON line: per seed the held-out pass@1 at the training temperature and the greedy
accuracy, before and after, how many of 16 samples say what 3 + 4 is, the findings (there should be
none), and the seconds and the CPU seconds that making the checkpoint and training took.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchtune_grpo.monitor.record import read

LORA = ["model=torchtune_grpo.models.lora_hf_model", "optimizer.lr=1e-3"]


def run(seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    """One demo run in a folder of its own."""
    command = [Path(sys.executable).parent / "tune", "run", "grpo_full_finetune_single_device"]
    command += ["--config", "tiny_arithmetic_grpo", f"output_dir={folder}", f"seed={seed}"]
    start = time.perf_counter()
    process = subprocess.Popen(list(map(str, command + overrides)), stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, f"seed {seed} ended with status {status}"
    seconds = time.perf_counter() - start
    sample = [
        sys.executable,
        "-m",
        "torchtune_grpo",
        "sample",
        "What is 3 + 4?",
        "--samples",
        "16",
    ]
    sample += ["--config", str(folder / "torchtune_config.yaml")]
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
    args = parser.parse_args()
    overrides = (LORA if args.lora else []) + args.overrides
    with tempfile.TemporaryDirectory() as work:

        def run_seed(seed: int) -> dict[str, Any]:
            return run(seed, overrides, Path(work) / str(seed))

        with ThreadPoolExecutor(max_workers=args.jobs) as pool:
            rows = list(pool.map(run_seed, args.seeds))
    settings = {"jobs": args.jobs, "overrides": overrides}
    result = {"benchmark": "demo_seeds", **settings}
    print(json.dumps(result | {"runs": rows}))


if __name__ == "__main__":
    main()
