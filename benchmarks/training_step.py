"""Seconds and peak memory of the training step, beside the padded full-logits way.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --shortest 128

Measures the reference's and the policy's pass of a LoRA step, with packed groups and under a
token budget. Every way runs in a process of its own, because freed memory is kept. Its extra memory
is the peak resident memory of the first run minus what was resident before it; its time is the best
of ``--repeats`` runs, without the first if there are others. Prints one JSON line.

The padded full-logits way: one row per response, padded on the right to the longest; the model's
``[rows, T, V]`` logits in float32, log-softmax, gather; in micro-batches of several sizes, of which
the fastest counts.
"""

import argparse
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from common import (
    SHAPE_S,
    apart,
    forget_peak,
    loss_of,
    peak_mb,
    random_policy,
    random_rows,
    report,
    resident_mb,
)
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.policy import AdapterReference
from torchtune_grpo.trajectory import Trajectory

TEMPERATURE = 0.9
WAYS = ("packed", "budget")


def measured(way: dict[str, Any], args: Namespace) -> dict[str, float]:
    """Return the extra memory of a way's first run, and its best time."""
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    args = Namespace(**{**vars(args), **way})
    work = update_work(args)
    forget_peak()
    before, seconds, extra = resident_mb(), [], 0.0
    for _ in range(args.repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
        extra = extra or peak_mb() - before
    return {"seconds": round(min(seconds[1:] or seconds), 2), "extra_mb": round(extra)}


def full_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Take the log-softmax of all logits [..., V], then the targets' entries: the plain way."""
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def padded_logprobs(model: TransformerDecoder, part: Trajectory) -> Tensor:
    """Return log-probs [n, L] from the full logits [n, T, V] of padded rows."""
    longest = int((part.prompt_lengths + part.response_lengths).max())
    tokens = part.tokens[:, :longest]
    logprobs = full_logprobs(model(tokens)[:, :-1], tokens[:, 1:])  # [n, T - 1]
    offset = torch.arange(part.response_mask.shape[1])
    column = part.prompt_lengths[:, None] - 1 + offset  # [n, L]
    return logprobs.gather(1, column.clamp(max=longest - 2))


def update_work(args: Namespace) -> Callable[[], None]:
    """Make a reference pass and a policy's forward and backward over B groups of G responses."""
    shape = SHAPE_S | {"vocab_size": args.vocab, "num_layers": args.layers}
    model, loss = random_policy(shape, rank=8).train(), GRPOLoss()
    reference = AdapterReference(model)
    rows = random_rows(
        vocab=args.vocab,
        groups=args.prompts,
        group=args.group,
        prompt=args.prompt_tokens,
        shortest=args.shortest,
        longest=args.longest,
    )

    def full() -> None:
        numbers = torch.arange(rows.num_rows).split(args.micro_batch)
        with torch.no_grad(), disable_adapter(model):
            values = [padded_logprobs(model, rows.select(each)) for each in numbers]
        scored = replace(rows, ref_logprobs=torch.cat(values))
        for part in map(scored.select, numbers):
            output = loss(
                logprobs=padded_logprobs(model, part),
                old_logprobs=None,
                ref_logprobs=part.ref_logprobs,
                advantages=part.advantages,
                weights=part.weights,
                response_mask=part.response_mask,
            )
            output.loss.backward()

    def ours() -> None:
        budget = args.token_budget if args.way == "budget" else None
        parts = micro_batches(
            rows, group_size=args.group, pack=True, rows=args.group, token_budget=budget
        )
        scored = replace(rows, ref_logprobs=reference.logprobs(parts, temperature=TEMPERATURE))
        for part in parts:
            of_part = scored.select(part.rows)
            loss_of(model, part, of_part, loss, temperature=TEMPERATURE).backward()

    return full if args.way == "full" else ours


def compare(args: Namespace) -> dict[str, Any]:
    """Measure the padded way with several micro-batches, and this package's ways."""
    full = {
        n: apart(measured, {"way": "full", "micro_batch": n}, args) for n in args.full_micro_batches
    }
    ours = {way: apart(measured, {"way": way}, args) for way in args.ways}
    best = min(full, key=lambda n: full[n]["seconds"])
    gains = {
        way: {name: round(full[best][name] / numbers[name], 2) for name in numbers}
        for way, numbers in ours.items()
    }
    return {"full": full, **ours, "best_full_micro_batch": best, "gains": gains}


def main() -> None:
    """Compare the ways; the defaults are the shape that docs/performance.md reports."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--vocab", type=int, default=128_256)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--prompts", type=int, default=4, help="B")
    p.add_argument("--group", type=int, default=8, help="G")
    p.add_argument("--prompt-tokens", type=int, default=200)
    p.add_argument("--shortest", type=int, default=20)
    p.add_argument("--longest", type=int, default=128)
    p.add_argument("--token-budget", type=int, default=384, help="of the way called budget")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    p.add_argument("--full-micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    args = p.parse_args()
    report("training_step", args, **compare(args))


if __name__ == "__main__":
    main()
