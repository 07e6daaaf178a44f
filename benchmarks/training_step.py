"""Seconds and peak memory of the training step, beside the padded full-logits way.

    python benchmarks/training_step.py head            # log-probs + backward of the projection
    python benchmarks/training_step.py update          # reference and policy pass of a LoRA step
    python benchmarks/training_step.py update --lengths equal
    python benchmarks/training_step.py sweep           # peak memory against G, L and V

Every way runs in a process of its own, because freed memory is kept. Its extra memory is the peak
resident memory of the first run minus what was resident before it; its time is the best of
``--repeats`` runs, or of all runs but the first. Prints one JSON line.

The padded full-logits way: one row per response, padded on the right to the longest; the model's
``[rows, T, V]`` logits in float32, log-softmax, gather; in micro-batches of several sizes, of which
the fastest counts.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import disable_adapter, get_adapter_params, set_trainable_params

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.machine.device import keep_freed_memory
from torchtune_grpo.training import attend_in_segments, response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.reference import AdapterReference
from torchtune_grpo.training.softmax import default_chunk_bytes, projection_logprobs
from torchtune_grpo.trajectory import Trajectory, length_mask

TEMPERATURE = 0.9
LORA = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 8,
    "lora_alpha": 16,
}


def memory_mb(name: str) -> float:
    """A field of /proc/self/status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(name)


def measure(work: Callable[[], Any], *, repeats: int) -> dict[str, float]:
    """Extra memory of the first run, and the best time of ``repeats``."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory_mb("VmRSS")
    seconds = []
    for run in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
        if run == 0:
            extra = memory_mb("VmHWM") - before
    return {"seconds": round(min(seconds[1:] or seconds), 2), "extra_mb": round(extra)}


def full_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """The plain way: log-softmax of all logits [..., V], then the targets' entries."""
    return (logits.float() / TEMPERATURE).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


# --- The output projection alone ------------------------------------------------------------------


def run_head(args: argparse.Namespace) -> dict[str, float]:
    """Log-probs of [rows, tokens] random hidden states and their backward pass."""
    torch.manual_seed(0)
    head = nn.Linear(args.dim, args.vocab, bias=False)
    head.requires_grad_(args.head == "trained")
    nn.init.normal_(head.weight, std=0.02)
    hidden = torch.randn(args.rows * args.tokens, args.dim, requires_grad=True)  # [K, D]
    targets = torch.randint(args.vocab, (len(hidden),))

    def work() -> None:
        hidden.grad = head.weight.grad = None
        if args.way == "full":
            values = full_logprobs(head(hidden), targets)
        else:
            values, _ = projection_logprobs(head, hidden, targets, temperature=TEMPERATURE)
        values.mean().backward()

    return measure(work, repeats=args.repeats)


def compare_head(args: argparse.Namespace) -> dict[str, Any]:
    """Full logits beside chunks, with the projection frozen and trained."""
    logits_mb = args.rows * args.tokens * args.vocab * 4 / 1e6
    results: dict[str, Any] = {"float32_logits_mb": round(logits_mb)}
    for head in args.heads:
        full = in_process(args, way="full", head=head)
        ours = in_process(args, way="ours", head=head)
        # W's gradient is the result, whatever the way; only what comes on top of it is compared.
        held = args.vocab * args.dim * 4 / 1e6 if head == "trained" else 0
        results[head] = {
            "full": full,
            "ours": ours,
            "gradient_of_w_mb": round(held),
            "time_ratio": round(ours["seconds"] / full["seconds"], 2),
            "logits_over_extra": round(logits_mb / (ours["extra_mb"] - held), 1),
        }
    return results


# --- A whole update -------------------------------------------------------------------------------


def build_policy(args: argparse.Namespace) -> TransformerDecoder:
    """A random LoRA policy, of which only the adapters are trained."""
    torch.manual_seed(0)
    model = lora_llama3_2(
        **LORA,
        vocab_size=args.vocab,
        num_layers=args.layers,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=args.dim,
        intermediate_dim=3 * args.dim,
        max_seq_len=4096,
    )
    # As models are initialized; torch's default of 1 gives logits that no trained model has.
    nn.init.normal_(model.tok_embeddings.weight, std=0.02)
    set_trainable_params(model, get_adapter_params(model))
    attend_in_segments(model)
    return model.train()


def random_batch(args: argparse.Namespace) -> Trajectory:
    """B groups of G random responses to one random prompt each."""
    generator = torch.Generator().manual_seed(args.seed)
    rows = args.prompts * args.group
    if args.lengths == "equal":
        lengths = torch.full((rows,), args.longest)
    else:
        lengths = torch.randint(args.shortest, args.longest + 1, (rows,), generator=generator)
        lengths[0] = args.longest
    width = args.prompt_tokens + int(lengths.max())
    tokens = torch.randint(args.vocab, (rows, width), generator=generator)
    prompts = tokens[:: args.group, : args.prompt_tokens]
    tokens[:, : args.prompt_tokens] = prompts.repeat_interleave(args.group, dim=0)
    mask = length_mask(lengths, int(lengths.max()))
    return Trajectory(
        tokens=tokens.where(length_mask(lengths + args.prompt_tokens, width), 0),
        prompt_indices=torch.zeros(rows, dtype=torch.long),
        places=torch.zeros(rows, dtype=torch.long),
        prompt_lengths=torch.full((rows,), args.prompt_tokens),
        response_lengths=lengths,
        response_mask=mask,
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler_logprobs=torch.zeros(mask.shape),
        behaviour_logprobs=torch.zeros(mask.shape),
        prompts=[],
        completions=[],
        columns={},
        advantages=torch.randn(rows, generator=generator),
    )


def padded_logprobs(model: TransformerDecoder, part: Trajectory) -> Tensor:
    """[n, L] from the full logits [n, T, V] of padded rows."""
    longest = int((part.prompt_lengths + part.response_lengths).max())
    tokens = part.tokens[:, :longest]
    logprobs = full_logprobs(model(tokens)[:, :-1], tokens[:, 1:])  # [n, T - 1]
    offset = torch.arange(part.response_mask.shape[1])
    column = part.prompt_lengths[:, None] - 1 + offset  # [n, L]
    return logprobs.gather(1, column.clamp(max=longest - 2))


def loss_backward(
    loss: GRPOLoss, part: Trajectory, logprobs: Tensor, entropy: Tensor | None = None
) -> None:
    """Adds the gradients of some rows, given their log-probs [n, L] (and entropy)."""
    output = loss(
        logprobs=logprobs,
        old_logprobs=None,
        ref_logprobs=part.ref_logprobs,
        advantages=part.advantages,
        weights=part.weights,
        response_mask=part.response_mask,
        entropy=entropy,
    )
    output.loss.backward()


def run_update(args: argparse.Namespace) -> dict[str, float]:
    """Reference pass, policy forward and backward over the whole batch."""
    model, batch, loss = build_policy(args), random_batch(args), GRPOLoss()
    reference = AdapterReference(model)
    weights = loss.weights(
        batch.response_mask,
        prompt_indices=batch.prompt_indices,
        num_rows=batch.num_rows,
        num_tokens=int(batch.response_mask.sum()),
        max_generated_tokens=args.longest,
    )
    batch = replace(batch, weights=weights)

    def full() -> None:
        parts = torch.arange(batch.num_rows).split(args.micro_batch)
        with torch.no_grad(), disable_adapter(model):
            values = [padded_logprobs(model, batch.select(rows)) for rows in parts]
        scored = replace(batch, ref_logprobs=torch.cat(values))
        for rows in parts:
            part = scored.select(rows)
            loss_backward(loss, part, padded_logprobs(model, part))

    def ours() -> None:
        parts = micro_batches(
            batch,
            group_size=args.group,
            pack=args.way != "rows",
            rows=args.group,
            token_budget=args.token_budget if args.way == "budget" else None,
        )
        ref_logprobs = reference.logprobs(parts, temperature=TEMPERATURE)
        scored = replace(batch, ref_logprobs=ref_logprobs)
        for part in parts:
            values, _ = response_logprobs(
                model, part.layout, temperature=TEMPERATURE, with_entropy=True
            )
            loss_backward(loss, scored.select(part.rows), values)

    return measure(full if args.way == "full" else ours, repeats=args.repeats)


def compare_update(args: argparse.Namespace) -> dict[str, Any]:
    """The padded way at several micro-batches, rows without padding, and packed groups."""
    full = {n: in_process(args, way="full", micro_batch=n) for n in args.full_micro_batches}
    ours = {way: in_process(args, way=way) for way in args.ways}
    best = min(full, key=lambda n: full[n]["seconds"])
    gains = {
        way: {name: round(full[best][name] / numbers[name], 2) for name in numbers}
        for way, numbers in ours.items()
    }
    return {"full": full, **ours, "best_full_micro_batch": best, "gains": gains}


def predicted_mb(args: argparse.Namespace) -> float:
    """What autograd keeps of a packed group, what one layer's backward pass and the logits add."""
    width = args.prompt_tokens + args.group * (args.longest - 1)  # S
    hidden = 3 * args.dim  # F
    layers = width * (args.layers * (7.5 * args.dim + 4 * hidden) + 4 * hidden)
    trained = args.group * args.longest  # K
    logits = default_chunk_bytes(torch.device("cpu"), tokens=trained) / 4
    copies = 2 * args.group * (args.prompt_tokens + args.longest) * args.dim  # keys and values
    numbers = layers + copies + 4 * trained * args.dim + 2 * logits
    return 4 * numbers / 1e6


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    """Extra memory of one packed group against G, L and V."""
    base = {"group": 8, "longest": 128, "vocab": args.vocab}
    points = [base, {**base, "group": 4}, {**base, "group": 16}]
    points += [{**base, "longest": 64}, {**base, "longest": 256}, {**base, "vocab": 32_768}]
    rows = []
    for point in points:
        case = {**point, "benchmark": "update", "prompts": 1, "lengths": "equal", "way": "packed"}
        extra = in_process(args, **case, repeats=1)["extra_mb"]
        predicted = predicted_mb(argparse.Namespace(**{**vars(args), **point}))
        rows.append({**point, "extra_mb": extra, "predicted_mb": round(predicted)})
    return {"points": rows}


# --- Running --------------------------------------------------------------------------------------


def in_process(args: argparse.Namespace, **changes: Any) -> dict[str, float]:
    """One way in a process of its own."""
    settings = json.dumps({**vars(args), **changes, "child": True})
    command = [*shlex.split(args.prefix), sys.executable, __file__, "child", settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shown = {name: changes[name] for name in changes}
    print(shown, done.stdout.strip(), file=sys.stderr, flush=True)
    return json.loads(done.stdout)


def child(settings: str) -> None:
    """Runs one way and prints its numbers."""
    args = argparse.Namespace(**json.loads(settings))
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    runs = {"head": run_head, "update": run_update}
    print(json.dumps(runs[args.benchmark](args)))


def parser() -> argparse.ArgumentParser:
    """The settings; the defaults are the shape that docs/performance.md reports."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("benchmark", choices=["head", "update", "sweep"])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--prefix", default="", help="put before each process, e.g. 'taskset -c 0,1'")
    p.add_argument("--vocab", type=int, default=128_256)
    p.add_argument("--dim", type=int, help="2048 for head, 512 for update")
    p.add_argument("--rows", type=int, default=32, help="head: rows")
    p.add_argument("--tokens", type=int, default=328, help="head: tokens of a row")
    p.add_argument("--heads", nargs="+", default=["frozen", "trained"], help="head: which")
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--prompts", type=int, default=4, help="B")
    p.add_argument("--group", type=int, default=8, help="G")
    p.add_argument("--prompt-tokens", type=int, default=200)
    p.add_argument("--shortest", type=int, default=20)
    p.add_argument("--longest", type=int, default=128)
    p.add_argument("--lengths", choices=["equal", "uniform"], default="uniform")
    p.add_argument("--token-budget", type=int, default=384, help="of the way called budget")
    p.add_argument("--ways", nargs="+", default=["rows", "packed", "budget"])
    p.add_argument("--full-micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    return p


def main() -> None:
    """Runs one benchmark."""
    if sys.argv[1:2] == ["child"]:
        return child(sys.argv[2])
    args = parser().parse_args()
    args.dim = args.dim or (2048 if args.benchmark == "head" else 512)
    result = {"head": compare_head, "update": compare_update, "sweep": sweep}[args.benchmark](args)
    name = {"benchmark": "training_step", "torch": torch.__version__}
    print(json.dumps(name | {"settings": vars(args)} | result))


if __name__ == "__main__":
    main()
