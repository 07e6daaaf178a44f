"""A step of the demo's shape: where its time goes, and how it shares the cores.

    python benchmarks/small_step.py --prompts shared own
    python benchmarks/small_step.py --busy 0 1 --threads one spinning adaptive

SmolLM2 135M's shape with random weights and LoRA of rank 32, in float32: 16 prompts of 57 tokens,
of which the first 33 are the same, and 8 responses of 4 to 9 tokens to each. ``threads`` is one,
or torch's two (``spinning``), or as many as a run has (``adaptive``), beside some ``busy``
processes. ``shared`` prompts are those; ``own`` prompts have no tokens in common.

Prints one JSON line: for each way the least seconds of a rollout and an update.
"""

import argparse
import subprocess
import sys
import timeit
from itertools import product

import torch
from common import (
    SMOLLM2,
    apart,
    loss_of,
    random_policy,
    random_prompts,
    random_rows,
    report,
    request_of,
)

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import choose_threads, keep_freed_memory
from torchtune_grpo.rollout.engine import make_engine
from torchtune_grpo.rollout.request import EngineContext
from torchtune_grpo.training.mini_batches import micro_batches

PROMPTS, GROUP, PROMPT, SHARED, LONGEST = 16, 8, 57, 33, 9


def step(name: str, busy: int, threads: str, kind: str, repeats: int) -> dict[str, float]:
    """Return the seconds of a rollout and an update."""
    keep_freed_memory()
    model = random_policy(SMOLLM2, rank=32).train()
    if threads == "adaptive":
        choose_threads(model)
    else:
        torch.set_num_threads(1 if threads == "one" else 2)
    same, vocab = SHARED if kind == "shared" else 0, SMOLLM2["vocab_size"]
    prompts = random_prompts([PROMPT] * PROMPTS, vocab)
    prompts.tokens[:] = [prompts.tokens[0][:same] + tokens[same:] for tokens in prompts.tokens]
    request = request_of(prompts, new_tokens=LONGEST, group=GROUP)
    rows = random_rows(
        vocab=vocab,
        prompt=PROMPT,
        shortest=4,
        longest=LONGEST,
        groups=PROMPTS,
        group=GROUP,
    )
    rows.tokens[:, :PROMPT] = torch.tensor(prompts.tokens).repeat_interleave(GROUP, dim=0)
    engine = make_engine(EngineContext(model, RolloutConfig(), torch.device("cpu")))
    loss = GRPOLoss()

    def rollout() -> None:
        engine.generate(request)

    def update() -> None:
        (part,) = micro_batches(rows, group_size=GROUP, pack=True, rows=rows.num_rows)
        loss_of(model, part, rows.select(part.rows), loss).backward()

    found: dict[str, float] = {}
    for work in (rollout, update):
        work()  # what it does the first time only
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
        try:
            found[work.__name__] = round(min(timeit.repeat(work, repeat=repeats, number=1)), 2)
        finally:
            for other in others:
                other.kill()
                other.wait()
    return found


def main() -> None:
    """Measure every way in a process of its own, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = ["one", "spinning", "adaptive"]
    parser.add_argument("--busy", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", nargs="+", choices=ways, default=["one"])
    parser.add_argument("--prompts", nargs="+", choices=["shared", "own"], default=["shared"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    for busy, threads, kind in [*product(args.busy, args.threads, args.prompts)] * args.rounds:
        name = f"{threads}, {busy} busy, {kind} prompts"
        results.setdefault(name, []).append(apart(step, name, busy, threads, kind, args.repeats))
    report("small_step", args, results=results)


if __name__ == "__main__":
    main()
