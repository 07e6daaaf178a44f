"""A step of the demo's shape: what its time goes into, and how it shares the cores.

    python benchmarks/small_step.py
    python benchmarks/small_step.py --busy 0 1 --threads one spinning adaptive

SmolLM2 135M's shape with random weights and LoRA of rank 32, in float32: 16 prompts of 57 tokens,
of which the first 33 are the same, and 8 responses of 4 to 9 tokens to each. ``threads`` is one,
or two as torch has them (``spinning``), or as a run has them (``adaptive``), beside some ``busy``
processes. ``shared`` prompts are those; the others have no tokens in common.

Prints one JSON line: for each way the least seconds of a rollout and an update, and the share of
that time that the matrix products need at the rate of a single large one on an idle core.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    apart,
    loss_of,
    random_policy,
    random_prompts,
    random_rows,
    report,
    request_of,
)
from torch.utils.flop_counter import FlopCounterMode

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import choose_threads, keep_freed_memory
from torchtune_grpo.rollout import RolloutConfig, make_engine
from torchtune_grpo.training.mini_batches import micro_batches

SHAPE = dict(
    vocab_size=49_152,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    embed_dim=576,
    intermediate_dim=1536,
    max_seq_len=2048,
)
PROMPTS, GROUP, PROMPT, SHARED, LONGEST = 16, 8, 57, 33, 9


def product_rate(name: str) -> float:
    """Operations a second of a large product on one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(2000, 576), torch.randn(576, 1536)
    best = min(timed(lambda: a @ b) for _ in range(20))
    return 2 * 2000 * 576 * 1536 / best


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def step(name: str, way: str, busy: int, shared: bool, repeats: int) -> dict[str, float]:
    """Seconds of a rollout and an update, and the operations of their products."""
    keep_freed_memory()
    model = random_policy(SHAPE, rank=32).train()
    if way == "adaptive":
        choose_threads(model)
    else:
        torch.set_num_threads(1 if way == "one" else 2)
    same = SHARED if shared else 0
    prompts = random_prompts([PROMPT] * PROMPTS, SHAPE["vocab_size"])
    prompts.tokens[:] = [prompts.tokens[0][:same] + tokens[same:] for tokens in prompts.tokens]
    request = request_of(prompts, new_tokens=LONGEST, group=GROUP)
    rows = random_rows(
        vocab=SHAPE["vocab_size"],
        prompt=PROMPT,
        shortest=4,
        longest=LONGEST,
        groups=PROMPTS,
        group=GROUP,
    )
    rows.tokens[:, :PROMPT] = torch.tensor(prompts.tokens).repeat_interleave(GROUP, dim=0)
    engine, loss = make_engine(model, RolloutConfig()), GRPOLoss()

    def rollout() -> None:
        engine.generate(request)

    def update() -> None:
        (part,) = micro_batches(rows, group_size=GROUP, pack=True, rows=rows.num_rows)
        loss_of(model, part, rows.select(part.rows), loss).backward()

    found: dict[str, float] = {}
    for work in (rollout, update):
        with FlopCounterMode(display=False) as counter:
            work()
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            found[work.__name__] = min(timed(work) for _ in range(repeats))
        finally:
            for other in others:
                other.kill()
                other.wait()
        found[f"{work.__name__} operations"] = counter.get_total_flops()
    return found


def main() -> None:
    """Measures every way in a process of its own, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="+", default=["one"])
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    per_second = apart(product_rate, "a product")
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for busy in args.busy:
            for way in args.threads:
                for shared in (True, False) if args.threads == ["one"] else (True,):
                    name = f"{way}, {busy} busy, {'shared' if shared else 'own'} prompts"
                    found = apart(step, name, way, busy, shared, args.repeats)
                    for work in ("rollout", "update"):
                        needed = found.pop(f"{work} operations") / per_second
                        found[f"{work}: share of products"] = round(needed / found[work], 2)
                        found[work] = round(found[work], 2)
                    results.setdefault(name, []).append(found)
    report("small_step", args, gigaflops=round(per_second / 1e9), results=results)


if __name__ == "__main__":
    main()
