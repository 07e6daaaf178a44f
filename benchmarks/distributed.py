"""The distributed recipe on one and two CPU ranks: its speed, and the bytes that cross the wire.

    python benchmarks/distributed.py time --runs 1x1 1x2 2x1
    python benchmarks/distributed.py bytes
    python benchmarks/distributed.py bytes distributed.defer_gradients=always --sharding always

``time`` runs ``tune run --nproc_per_node RANKS grpo_full_finetune_distributed`` on
``tiny_arithmetic_grpo`` for each RANKSxTHREADS of ``--runs`` and each of ``--sharding``, with the
same global batch, and takes medians from ``metrics.jsonl``, without the first step. ``bytes`` runs
the same recipe under torchrun and counts the tensors of every collective operation that torch
dispatches, by the stage of the step that the recipe's own timers name. The checkpoint is made once,
in ``--work-dir``, by a warm-up of about a minute. Prints one JSON line.

Payload: the bytes of the whole tensor, that is of the result of an all-gather, of the input of a
reduce-scatter, of the one tensor of an all-reduce or broadcast. Sent: what each of n ranks sends
in a ring, (n - 1)/n of the payload and twice that for an all-reduce.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONFIG = Path(__file__).parents[1] / "recipes" / "configs" / "tiny_arithmetic_grpo.yaml"
RECIPE = "grpo_full_finetune_distributed"
MODELS = {"full": "hf_model", "lora": "lora_hf_model"}
MOVES = ("gather", "reduce", "scatter", "broadcast", "alltoall", "all_to_all", "send", "recv")
BIN = Path(sys.executable).parent


class CollectiveCounter(TorchDispatchMode):
    """Adds up calls and payload of collective operations, by the innermost stage that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = ["outside"]
        # stage -> operation -> [calls, payload bytes]
        self.counts = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # what it does to the parts of the tensor comes here next
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.strip("_")
            if any(word in name for word in MOVES):  # not waits, barriers and wrappers
                entry = self.counts[self.stages[-1]][name]
                entry[0] += 1
                entry[1] += payload(func, args)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def stage(self, name: str):
        """Counts what happens within it under ``name``."""
        self.stages.append(name)
        try:
            yield
        finally:
            self.stages.pop()


def payload(func, args) -> int:
    """Bytes of the larger of an operation's input and output."""
    sizes = [
        sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
        for arg in args[:2]
    ]
    if func.namespace == "_c10d_functional" and "all_gather" in func._opname:
        return sizes[0] * args[1]  # (input, group size, ...)
    return max(sizes)


def sent(name: str, payload_bytes: int, ranks: int) -> float:
    """What one rank sends of a payload, in a ring."""
    reduces = name.replace("_", "").startswith("allreduce")
    return payload_bytes * (ranks - 1) / ranks * (2 if reduces else 1)


def count(folder: Path, overrides: list[str]) -> None:
    """One rank: the recipe's own main function under the counter."""
    from torchtune_grpo.recipes.grpo_full_finetune import recipe_main

    from torchtune_grpo.monitor.metrics import StepMetrics

    counter = CollectiveCounter()
    timer, compute = StepMetrics.timer, StepMetrics.compute

    @contextmanager
    def counted_timer(self, name: str):
        with timer(self, name), counter.stage(name.removeprefix("time/").removesuffix("_time")):
            yield

    def counted_compute(self):
        with counter.stage("metrics"):
            return compute(self)

    StepMetrics.timer, StepMetrics.compute = counted_timer, counted_compute
    sys.argv = [sys.argv[0], "--config", str(CONFIG), *overrides]
    with counter, suppress(SystemExit):  # with which torchtune ends every recipe
        recipe_main()
    if os.environ["RANK"] == "0":
        (folder / "counts.json").write_text(json.dumps(counter.counts))


def settings(args, folder: Path, *, ranks: int, model: str, sharding: str) -> list[str]:
    """Overrides of the demo's config."""
    return [
        f"output_dir={folder}",
        f"model_dir={args.work_dir / 'tiny_llama'}",
        f"model=torchtune_grpo.models.{MODELS[model]}",
        f"distributed.sharding={sharding}",
        f"batch_size={args.prompts // ranks}",
        f"num_steps={args.steps}",
        "loss.kl_coeff=0.04",  # so that there is a reference pass
        "eval_dataset=null",
        "evaluation.every_n_steps=null",
        *args.overrides,
    ]


def launch(args, folder: Path, command: list, *, threads: int = 1) -> None:
    """Runs a command; what it prints is shown only if it fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout[-4000:])


def measure_time(args) -> dict:
    """Medians over steps, by model, sharding, ranks and threads."""
    results = {}
    for model in args.models:
        for run in args.runs:
            ranks, threads = map(int, run.split("x"))
            for sharding in args.sharding if ranks > 1 else ["never"]:
                folder = args.work_dir / "run"
                overrides = settings(args, folder, ranks=ranks, model=model, sharding=sharding)
                tune = [BIN / "tune", "run", "--nproc_per_node", ranks, RECIPE]
                launch(args, folder, [*tune, "--config", CONFIG, *overrides], threads=threads)
                lines = (folder / "metrics.jsonl").read_text().splitlines()
                steps = [json.loads(line) for line in lines][1:]
                names = [name for name in steps[0] if name.startswith("time/")]
                names = [name for name in names if name.count("/") == 1]
                names += ["step_time", "tokens_per_second"]
                entry = {n: round(statistics.median(s[n] for s in steps), 3) for n in names}
                results[f"{model}, {sharding}, {run}"] = entry
                print(model, sharding, run, entry, file=sys.stderr, flush=True)
    return results


def measure_bytes(args) -> dict:
    """Calls and bytes of each stage a step, and of what lies outside steps."""
    results = {}
    for model in args.models:
        for sharding in args.sharding:
            folder = args.work_dir / "run"
            overrides = settings(args, folder, ranks=2, model=model, sharding=sharding)
            torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node", 2, __file__]
            launch(args, folder, [*torchrun, "count", folder, *overrides])
            entry = {}
            for stage, operations in json.loads((folder / "counts.json").read_text()).items():
                steps = 1 if stage == "outside" else args.steps  # setup and saving: once
                entry[stage] = {
                    "sent": round(sum(sent(n, b, 2) for n, (_, b) in operations.items()) / steps),
                    "operations": {
                        name: {"calls": calls / steps, "payload": round(total / steps)}
                        for name, (calls, total) in operations.items()
                    },
                }
            results[f"{model}, {sharding}"] = entry
            print(model, sharding, entry, file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Runs one of the two benchmarks."""
    if sys.argv[1:2] == ["count"]:
        return count(Path(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=["time", "bytes"])
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    parser.add_argument("--runs", nargs="+", default=["1x1", "1x2", "2x1"], help="ranks x threads")
    parser.add_argument("--sharding", nargs="+", default=["never", "always"])
    parser.add_argument("--models", nargs="+", default=["full", "lora"])
    parser.add_argument("--prompts", type=int, default=16, help="of all ranks together")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--work-dir", type=Path, default=Path("/tmp/distributed_benchmark"))
    args = parser.parse_args()
    args.work_dir = args.work_dir.resolve()
    results = {"time": measure_time, "bytes": measure_bytes}[args.benchmark](args)
    name = {"benchmark": f"distributed {args.benchmark}", "torch": torch.__version__}
    print(json.dumps({**name, "settings": {**vars(args), "work_dir": ""}, "results": results}))


if __name__ == "__main__":
    main()
