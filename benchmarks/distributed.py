"""A step of the demo on one and two CPU ranks, replicated and sharded: its seconds by stage.

    python benchmarks/distributed.py --runs 1x1 1x2 2x1

Runs ``tiny_arithmetic_grpo`` for each RANKSxTHREADS of ``--runs`` and each of ``--sharding``, with
the same global batch and a KL term, and takes medians over the steps but the first. The checkpoint
is made once, in ``--work-dir``, by a warm-up of about a minute. Prints one JSON line.
"""

import argparse
import shutil
import statistics
from pathlib import Path

from common import DEMO, report, tune_run

from torchtune_grpo.monitor.record import read

MODELS = {"full": "hf_model", "lora": "lora_hf_model"}


def measure(args: argparse.Namespace, run: str, model: str, sharding: str) -> dict[str, float]:
    """Medians of one run's steps."""
    ranks, threads = map(int, run.split("x"))
    folder = args.work_dir / "run"
    shutil.rmtree(folder, ignore_errors=True)
    keys = [
        f"model_dir={args.work_dir / 'tiny_llama'}",
        f"model=torchtune_grpo.models.{MODELS[model]}",
        f"distributed.sharding={sharding}",
        f"batch_size={args.prompts // ranks}",
        f"num_steps={args.steps}",
        "loss.kl_coeff=0.04",  # so that there is a reference pass
        "eval_dataset=null",
        *args.overrides,
    ]
    tune_run(DEMO, folder, keys, ranks=ranks, threads=threads)
    steps = read(folder, "step")[1:]
    names = [name for name in steps[0] if name.startswith("time/") and name.count("/") == 1]
    names += ["step_time", "tokens_per_second"]
    return {name: round(statistics.median(step[name] for step in steps), 3) for name in names}


def main() -> None:
    """Runs all combinations; one rank alone shards nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    parser.add_argument("--runs", nargs="+", default=["1x1", "1x2", "2x1"], help="ranks x threads")
    parser.add_argument("--sharding", nargs="+", default=["never", "always"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["full", "lora"])
    parser.add_argument("--prompts", type=int, default=16, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/distributed_benchmark"))
    args = parser.parse_intermixed_args()
    args.work_dir = args.work_dir.resolve()
    results = {
        f"{model}, {sharding}, {run}": measure(args, run, model, sharding)
        for model in args.models
        for sharding in args.sharding
        for run in args.runs
        if not run.startswith("1x") or sharding == args.sharding[0]
    }
    report("distributed", args, results=results)


if __name__ == "__main__":
    main()
