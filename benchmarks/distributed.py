"""The distributed recipe on one and two CPU ranks: its speed, and the bytes that cross the wire.

    python benchmarks/distributed.py time --runs 1x1 1x2 2x1
    python benchmarks/distributed.py bytes --steps 2

``time`` runs ``tiny_arithmetic_grpo`` for each RANKSxTHREADS of ``--runs`` and each of
``--sharding``, with the same global batch, and takes medians from ``run.jsonl``, without the
first step. ``bytes`` counts the tensors of every collective operation that torch dispatches, by the
stage of the step that the recipe's own timers name. The checkpoint is made once, in ``--work-dir``,
by a warm-up of about a minute. Prints one JSON line.

Sent is what each of n ranks sends in a ring: (n - 1)/n of the whole tensor (the result of an
all-gather, the input of a reduce-scatter), and twice that for an all-reduce.
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
    """Adds up calls and sent bytes of collective operations, by the innermost stage that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = ["outside"]
        # stage -> operation -> [calls, bytes sent]
        self.counts = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # what it does to the parts of the tensor comes here next
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.strip("_")
            if any(word in name for word in MOVES):  # not waits, barriers and wrappers
                entry = self.counts[self.stages[-1]][name]
                entry[0] += 1
                entry[1] += sent(name, func, args)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def stage(self, name: str):
        """Counts what happens within it under ``name``."""
        self.stages.append(name)
        try:
            yield
        finally:
            self.stages.pop()


def sent(name: str, func, args) -> float:
    """What one rank sends: a ring's share of the larger of an operation's input and output."""
    sizes = [
        sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor))
        for arg in args[:2]
    ]
    whole = max(sizes)
    if func.namespace == "_c10d_functional" and "all_gather" in name:
        whole = sizes[0] * args[1]  # (input, group size, ...)
    ranks = torch.distributed.get_world_size()
    return whole * (ranks - 1) / ranks * (2 if name.replace("_", "").startswith("allreduce") else 1)


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


def launch(args, command: list, *, ranks: int, threads: int, model: str, sharding: str) -> Path:
    """Runs the demo with a command's launcher; what it prints is shown only if it fails."""
    folder = args.work_dir / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command += [
        f"output_dir={folder}",
        f"model_dir={args.work_dir / 'tiny_llama'}",
        f"model=torchtune_grpo.models.{MODELS[model]}",
        f"distributed.sharding={sharding}",
        f"batch_size={args.prompts // ranks}",
        f"num_steps={args.steps}",
        "loss.kl_coeff=0.04",  # so that there is a reference pass
        "eval_dataset=null",
        *args.overrides,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return folder


def measure_time(args, model: str, sharding: str) -> dict:
    """Medians over steps, by ranks and threads."""
    results = {}
    for run in args.runs:
        ranks, threads = map(int, run.split("x"))
        if ranks == 1 and sharding != args.sharding[0]:
            continue  # one rank shards nothing
        tune = [BIN / "tune", "run", "--nproc_per_node", ranks, RECIPE, "--config", CONFIG]
        how = dict(ranks=ranks, threads=threads, model=model, sharding=sharding)
        events = (launch(args, tune, **how) / "run.jsonl").read_text().splitlines()
        steps = [e for e in map(json.loads, events) if e["kind"] == "step"][1:]
        names = [name for name in steps[0] if name.startswith("time/") and name.count("/") == 1]
        names += ["step_time", "tokens_per_second"]
        results[run] = {n: round(statistics.median(s[n] for s in steps), 3) for n in names}
    return results


def measure_bytes(args, model: str, sharding: str) -> dict:
    """Calls and bytes of each stage a step, and of what lies outside steps."""
    torchrun = [BIN / "torchrun", "--standalone", "--nproc_per_node", 2, __file__]
    torchrun += ["count", args.work_dir / "run"]
    folder = launch(args, torchrun, ranks=2, threads=1, model=model, sharding=sharding)
    results = {}
    for stage, operations in json.loads((folder / "counts.json").read_text()).items():
        steps = 1 if stage == "outside" else args.steps  # setup and saving: once
        results[stage] = {
            "sent": round(sum(size for _, size in operations.values()) / steps),
            "calls": {name: calls / steps for name, (calls, _) in operations.items()},
        }
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
    measure = {"time": measure_time, "bytes": measure_bytes}[args.benchmark]
    results = {
        f"{model}, {sharding}": measure(args, model, sharding)
        for model in args.models
        for sharding in args.sharding
    }
    name = {"benchmark": f"distributed {args.benchmark}", "torch": torch.__version__}
    print(json.dumps({**name, "settings": {**vars(args), "work_dir": ""}, "results": results}))


if __name__ == "__main__":
    main()
