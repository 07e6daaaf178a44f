"""How the cost of a sampled token grows with group size, prompt length and live rows.

    python benchmarks/rollout_growth.py --plot docs/rollout_growth.png

Shape S of `rollout.py`, float32, 32 new tokens a response; three sweeps:

    group   one prompt of 256 tokens, G = 1 to 64
    prompt  one prompt of 64 to 2,048 tokens, G = 8
    rows    eight prompts of 256 tokens, G = 8, at most 4 to 64 of 64 responses at once

`native` and `torchtune` are this package's engines; the second works on one group at a time, so on
8 rows at most in the third sweep. A point is measured `--repeats` times after once to warm up; a
figure is the median of seconds over tokens, the prompts' computation included. Prints one JSON
line, microseconds a token.
"""

import argparse
import json
import statistics
import time

import torch
from rollout import build_model, build_prompts, make_way

from torchtune_grpo.machine.device import keep_freed_memory

NEW_TOKENS = 32
POWERS = (1, 2, 4, 8, 16, 32, 64)
SWEEPS = {
    "group": [{"group_size": g, "prompt": 256, "prompts": 1, "max_rows": None} for g in POWERS],
    "prompt": [
        {"group_size": 8, "prompt": p, "prompts": 1, "max_rows": None}
        for p in (64, 128, 256, 512, 1024, 2048)
    ],
    "rows": [{"group_size": 8, "prompt": 256, "prompts": 8, "max_rows": r} for r in POWERS[2:]],
}
LABELS = {
    "group": ("group_size", "group size G"),
    "prompt": ("prompt", "prompt length, tokens"),
    "rows": ("max_rows", "live rows"),
}


def make_point(name: str, model, point: dict):
    """A function that rolls out once and returns the number of tokens sampled."""
    prompts = build_prompts(
        [point["prompt"]] * point["prompts"], model.tok_embeddings.num_embeddings
    )
    settings = {key: point[key] for key in ("group_size", "max_rows")}
    args = argparse.Namespace(varying_lengths=False, **settings)
    return make_way(name, model, prompts, args, new_tokens=NEW_TOKENS)


def microseconds(work, *, repeats: int) -> float:
    """Median time per token."""
    work()
    values = []
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = work()
        values.append((time.perf_counter() - start) / tokens * 1e6)
    return round(statistics.median(values))


def draw(results: dict, path: str) -> None:
    """One panel per sweep, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(11, 3.2), sharey=True)
    for axis, (sweep, ways) in zip(axes, results.items(), strict=True):
        key, label = LABELS[sweep]
        points = [point[key] for point in SWEEPS[sweep]]
        for name, values in ways.items():
            axis.plot(points, values, marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("microseconds per token")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measures all points of all sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["native", "torchtune"])
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plot", help="file for the picture")
    args = parser.parse_args()
    keep_freed_memory()
    model = build_model("S", torch.float32)
    results = {
        sweep: {
            name: [
                microseconds(make_point(name, model, point), repeats=args.repeats)
                for point in SWEEPS[sweep]
            ]
            for name in args.ways
        }
        for sweep in args.sweeps
    }
    if args.plot:
        draw(results, args.plot)
    points = {s: [point[LABELS[s][0]] for point in SWEEPS[s]] for s in results}
    settings = {**vars(args), "torch": torch.__version__, "threads": torch.get_num_threads()}
    name = {"benchmark": "rollout_growth", "settings": settings, "points": points}
    print(json.dumps({**name, "microseconds_per_token": results}))


if __name__ == "__main__":
    main()
