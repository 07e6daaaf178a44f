"""Trains a config with several settings and seeds, and reports how far each one gets.

    python benchmarks/learning.py --vary optimizer.lr=1e-4,4e-4,1e-3 --vary model.lora_rank=1,8,32
    python benchmarks/learning.py --config tiny_arithmetic_grpo --vary algorithm=dapo,gspo --seeds 0
    python benchmarks/learning.py --vary full optimizer.lr=2e-5

Settings are combined with each other and with the seeds. ``full`` instead of a key trains all
weights. Every run keeps its record in a folder of its own below ``--work``, so that a second call
continues where the first one was stopped.

Prints one JSON line: per run the held-out accuracy of each evaluation with the lower end of its
95 % interval, pass@1 and pass@k, the clipped share of tokens, the findings, and the seconds of the
command, of the clock and of CPUs, and of its evaluations.
"""

import argparse
import json
import re
import shutil
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

from common import report, tune_run

from torchtune_grpo.monitor.record import RunRecord

CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")
FULL = "model=torchtune_grpo.models.hf_model"


def choices(text: str) -> list[list[str]]:
    """Split ``key=a,b`` into the overrides of each choice."""
    if text == "full":
        return [["# full", FULL]]
    key, _, values = text.partition("=")
    return [[f"{key}={value}"] for value in values.split(",")]


def train(config: str, keys: list[str], folder: Path, *, threads: int) -> dict[str, Any]:
    """Do one run, unless its folder holds it already."""
    done = folder / "seconds.json"
    if not done.exists():
        given = [*(k for k in keys if not k.startswith("#")), "saving.adapter_weights_only=True"]
        began = time.monotonic()
        usage = tune_run(config, folder, given, threads=threads)
        took = {"seconds": time.monotonic() - began, "CPU seconds": usage.ru_utime + usage.ru_stime}
        done.write_text(json.dumps({name: round(value) for name, value in took.items()}))
        for checkpoint in folder.glob("step_*"):
            shutil.rmtree(checkpoint)
    return json.loads(done.read_text()) | curves(RunRecord.read(folder))


def curves(run: RunRecord) -> dict[str, Any]:
    """Return what a record says about learning."""
    metrics = {
        name.removeprefix("eval/"): [round(event[name], 3) for event in run.evaluations]
        for name in run.evaluations[0]
        if re.fullmatch(r"eval/(accuracy(/low)?|pass@\d+)", name)
    }
    clipped = [step[name] for step in run.steps for name in CLIPPED if name in step] or [0.0]
    return {
        "of them evaluations": round(sum(event["time/eval"] for event in run.evaluations)),
        "steps": [event["step"] for event in run.evaluations],
        **metrics,
        "clipped": round(mean(clipped), 4),
        "findings": [event["name"] for event in run.findings if event["event"] == "begins"],
    }


def main() -> None:
    """Train all combinations, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="smollm2_135M_grpo")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=VALUE,VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/torchtune-grpo-learning"))
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    args = parser.parse_intermixed_args()
    axes = [[[f"seed={seed}"] for seed in args.seeds], *map(choices, args.vary)]

    def run(parts: tuple[list[str], ...]) -> dict[str, Any]:
        keys = [*args.overrides, *(key for part in parts for key in part)]
        name = " ".join(part[0] for part in parts if part)
        words = re.sub(r"[^\w.=-]+", "_", " ".join([args.config, *args.overrides, name]))
        folder = args.work / f"{words[:200]}_{crc32(words.encode()):08x}"
        return {"run": name} | train(args.config, keys, folder, threads=args.threads)

    report("learning", args, runs=[*map(run, product(*axes))])


if __name__ == "__main__":
    main()
