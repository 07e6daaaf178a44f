"""Trains the demo with each preset of docs/objectives.md, all from the same model's folder.

    python benchmarks/presets.py --model-dir FOLDER --seeds 0

Prints one JSON line: per preset and seed the held-out pass@1 before and after, the first evaluation
with 0.9 or more, the share of tokens that were clipped, and the CPU seconds. The folder is made,
and the model warmed up, where it is missing.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from common import DEMO, report, tune_run

from torchtune_grpo.monitor.record import read

PAGE = Path(__file__).parents[1] / "docs" / "objectives.md"
CLIPPED = ("clip_ratio/region_mean", "cispo_clip_ratio")


def presets() -> dict[str, dict[str, Any]]:
    """Name -> keys of each YAML block below the page's last heading."""
    blocks = re.findall(r"```yaml\n# ([^:]+):.*\n((?:.|\n)*?)```", PAGE.read_text())
    return {name: yaml.safe_load(text) for name, text in blocks}


def overrides(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The same keys as on tune's command line."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={value}"


def train(keys: list[str]) -> dict[str, Any]:
    """One demo run."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "run")
        usage = tune_run(DEMO, folder, keys)
        passes = [(r["step"], r["eval/pass@1"]) for r in read(folder, "evaluation")]
        clipped = [r[name] for r in read(folder, "step") for name in CLIPPED if name in r]
    return {
        "pass@1 before": round(passes[0][1], 3),
        "pass@1 after": round(passes[-1][1], 3),
        "0.9 after steps": next((step for step, value in passes if value >= 0.9), None),
        "clipped": round(sum(clipped) / max(len(clipped), 1), 4),
        "CPU seconds": round(usage.ru_utime + usage.ru_stime),
    }


def main() -> None:
    """Runs the presets one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", type=Path, required=True, help="of the warmed-up model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(presets()), help="presets' names")
    parser.add_argument("overrides", nargs="*", help="key=value, as on tune's command line")
    args = parser.parse_intermixed_args()
    common = [f"model_dir={args.model_dir}", *args.overrides]
    runs = [
        {"preset": name, "seed": seed}
        | train([*overrides(presets()[name]), f"seed={seed}", *common])
        for name in args.only
        for seed in args.seeds
    ]
    report("presets", args, runs=runs)


if __name__ == "__main__":
    main()
