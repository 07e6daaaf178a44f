"""Seconds and peak memory of the training step, beside padded rows with full logits.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --shortest 128

Measures the reference's and the policy's pass of a LoRA step, with packed groups (``packed``).
``full`` is the plain way: one row per response, padded on the right to the longest; the model's
``[rows, T, V]`` logits in float32, log-softmax, gather; in micro-batches of ``--micro-batch`` rows.

Every way runs in a process of its own, because freed memory is kept. Its extra memory is the peak
resident memory of the first run minus what was resident before it; its time is the best of
``--repeats`` runs, without the first if there are others. Prints one JSON line.
"""

import argparse
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

import torch
from common import (
    GROUP,
    SHAPE_S,
    apart,
    forget_peak,
    loss_of,
    memory_mb,
    random_policy,
    random_rows,
    report,
)
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.reference import Reference
from torchtune_grpo.trajectory import Trajectory

TEMPERATURE = 0.9
PROMPTS, PROMPT_TOKENS = 4, 200


def measured(way: str, args: Namespace) -> dict[str, float]:
    """Return the extra memory of a way's first run, and its best time."""
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    work = update_work(way, args)
    forget_peak()
    before, seconds, extra = memory_mb("VmRSS"), [], 0.0
    for _ in range(args.repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
        extra = extra or memory_mb("VmHWM") - before
    return {"seconds": round(min(seconds[1:] or seconds), 2), "extra_mb": round(extra)}


def padded_logprobs(model: TransformerDecoder, part: Trajectory) -> torch.Tensor:
    """Return log-probs [n, L] from the full logits [n, T, V] of padded rows."""
    longest = int((part.prompt_lengths + part.response_lengths).max())
    tokens = part.tokens[:, :longest]
    logprobs = (model(tokens)[:, :-1].float() / TEMPERATURE).log_softmax(-1)  # [n, T - 1, V]
    logprobs = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]  # [n, T - 1]
    offset = torch.arange(part.response_mask.shape[1])
    column = part.prompt_lengths[:, None] - 1 + offset  # [n, L]
    return logprobs.gather(1, column.clamp(max=longest - 2))


def update_work(way: str, args: Namespace) -> Callable[[], None]:
    """Make a reference pass and a policy's forward and backward over all groups of responses."""
    model = random_policy(SHAPE_S | {"vocab_size": args.vocab}, rank=8).train()
    loss, reference = GRPOLoss(), Reference(model)
    rows = random_rows(
        vocab=args.vocab,
        groups=PROMPTS,
        prompt=PROMPT_TOKENS,
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

    def packed() -> None:
        parts = micro_batches(rows, group_size=GROUP, pack=True, rows=GROUP)
        scored = replace(rows, ref_logprobs=reference.logprobs(parts, temperature=TEMPERATURE))
        for part in parts:
            of_part = scored.select(part.rows)
            loss_of(model, part, of_part, loss, temperature=TEMPERATURE).backward()

    return full if way == "full" else packed


def main() -> None:
    """Measure all ways; the defaults are the shape that RESULTS.md reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--shortest", type=int, default=20, help="response, in tokens")
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1, help="rows of the full way")
    args = parser.parse_args()
    ways = {way: apart(measured, way, args) for way in ("full", "packed")}
    report("training_step", args, **ways)


if __name__ == "__main__":
    main()
