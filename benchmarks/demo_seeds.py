"""Runs the demo for several seeds, as it is or with the presets of docs/objectives.md.

    python benchmarks/demo_seeds.py --jobs 2
    python benchmarks/demo_seeds.py model_dir=FOLDER --presets --seeds 0

Each run makes a checkpoint of its own on the spot; with `model_dir` all start from that folder's,
which is made where it is missing. Prints one JSON line: per run the held-out pass@1 at the training
temperature before and after, the share of tokens that were clipped, the findings (there should be
none), and the CPU seconds of all of it.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from common import DEMO, report, tune_run

from torchtune_grpo.monitor.record import read

PAGE = Path(__file__).parents[1] / "docs" / "objectives.md"
CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")


def presets() -> dict[str, list[str]]:
    """Name -> the keys of each YAML block of the page, as on tune's command line."""
    blocks = re.findall(r"```yaml\n# ([^:]+):.*\n((?:.|\n)*?)```", PAGE.read_text())
    return {name: list(overrides(yaml.safe_load(text))) for name, text in blocks}


def overrides(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a nested config with dots."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def train(keys: list[str]) -> dict[str, Any]:
    """One demo run in a folder of its own."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        usage = tune_run(DEMO, folder, keys)
        passes = [event["eval/pass@1"] for event in read(folder, "evaluation")]
        clipped = [step[name] for step in read(folder, "step") for name in CLIPPED if name in step]
        findings = [e["name"] for e in read(folder, "finding") if e["event"] == "begins"]
    return {
        "pass@1 before": round(passes[0], 3),
        "pass@1 after": round(passes[-1], 3),
        "clipped": round(mean(clipped or [0.0]), 4),
        "findings": findings,
        "CPU seconds": round(usage.ru_utime + usage.ru_stime),
    }


def main() -> None:
    """Runs the seeds, as many at once as there are jobs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--presets", action="store_true", help="each of them, for each seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    args = parser.parse_intermixed_args()
    variants = presets() if args.presets else {"as it is": []}

    def run(variant: str, seed: int) -> dict[str, Any]:
        keys = [*variants[variant], f"seed={seed}", *args.overrides]
        return {"preset": variant, "seed": seed} | train(keys)

    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run, variant, seed) for variant in variants for seed in args.seeds]
        report("demo_seeds", args, runs=[each.result() for each in runs])


if __name__ == "__main__":
    main()
