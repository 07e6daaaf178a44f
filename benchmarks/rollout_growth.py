"""How the cost of a sampled token grows with group size, prompt length and live rows.

    python benchmarks/rollout_growth.py

Shape S of `rollout.py`, float32, 32 new tokens a response; three sweeps:

    group_size  one prompt of 256 tokens, G = 1 to 64
    prompt      one prompt of 64 to 2,048 tokens, G = 8
    max_rows    eight prompts of 256 tokens, G = 8, at most 4 to 64 of 64 responses at once

`native` and `torchtune` are this package's engines; the second works on one group at a time, so on
8 rows at most in the third sweep. A point is measured `--repeats` times after once to warm up; a
figure is the median of seconds over tokens, the prompts' computation included. Prints one JSON
line, microseconds a token.
"""

import argparse
import json

import torch
from rollout import build_model, build_prompts, make_way, timed

from torchtune_grpo.machine.device import keep_freed_memory

NEW_TOKENS = 32
POWERS = (1, 2, 4, 8, 16, 32, 64)
USUAL = {"group_size": 8, "prompt": 256, "prompts": 1, "max_rows": None}
SWEEPS = {
    "group_size": [USUAL | {"group_size": group} for group in POWERS],
    "prompt": [USUAL | {"prompt": length} for length in (64, 128, 256, 512, 1024, 2048)],
    "max_rows": [USUAL | {"prompts": 8, "max_rows": rows} for rows in POWERS[2:]],
}


def microseconds(name: str, model, *, repeats: int, prompt: int, prompts: int, **settings) -> int:
    """Median time per token of a way at one point."""
    batch = build_prompts([prompt] * prompts, model.tok_embeddings.num_embeddings)
    args = argparse.Namespace(varying_lengths=False, **settings)
    way = make_way(name, model, batch, args, new_tokens=NEW_TOKENS)
    tokens, _, seconds = timed(way, torch.device("cpu"), repeats=repeats)
    return round(seconds / tokens * 1e6)


def main() -> None:
    """Measures all points of all sweeps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", default=["native", "torchtune"])
    parser.add_argument("--sweeps", nargs="+", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()
    model, results = build_model("S", torch.float32), {}
    for sweep in args.sweeps:
        points = SWEEPS[sweep]
        results[sweep] = {sweep: [point[sweep] for point in points]} | {
            name: [microseconds(name, model, repeats=args.repeats, **point) for point in points]
            for name in args.ways
        }
    settings = {**vars(args), "torch": torch.__version__, "threads": torch.get_num_threads()}
    result = {"benchmark": "rollout_growth", "settings": settings}
    print(json.dumps(result | {"microseconds_per_token": results}))


if __name__ == "__main__":
    main()
