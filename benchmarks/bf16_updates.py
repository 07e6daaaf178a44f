"""Compares ways to keep weights over 200 optimizer steps at the shipped learning rates.

    python benchmarks/bf16_updates.py

Gradients are a fixed direction under ten times as much noise, in bf16 where the weights are. Prints
one JSON line: for each way of keeping the weights, the share of weights that changed, and the
cosine between the whole update and that of float32 weights. Both are given for the weights that are
kept and for the bf16 weights that the model then computes with.
"""

import math

import torch
from common import report
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune import config

from torchtune_grpo.training.optimizer import MASTER, make_optimizer, optimizer_step

STEPS, NOISE = 200, 10.0
ADAMW = {"_component_": "torch.optim.AdamW", "lr": 1e-4, "weight_decay": 0.0}
ADAMW8 = {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-5, "weight_decay": 0.0}
ROUNDED = ADAMW8 | {"bf16_stochastic_round": True}
# Way -> the optimizer, the dtype of the weights, and whether the package takes the steps.
WAYS = {
    "lora": {
        "float32": (ADAMW, torch.float32, False),
        "bf16": (ADAMW, torch.bfloat16, False),
        "float32 adapters": (ADAMW, torch.float32, True),
    },
    "full": {
        "float32": (ADAMW8, torch.float32, False),
        "bf16": (ADAMW8, torch.bfloat16, False),
        "stochastic rounding": (ROUNDED, torch.bfloat16, True),
        "float32 masters": (ADAMW8, torch.bfloat16, True),
    },
}


def start(model: str) -> dict[str, Tensor]:
    """Return the weights that a run begins with: bf16 numbers in float32."""
    draw = torch.Generator().manual_seed(0)
    if model == "lora":  # adapters of a 2048 x 2048 projection, initialized as in torchtune
        bound = 1 / math.sqrt(2048)
        a = torch.empty(16, 2048).uniform_(-bound, bound, generator=draw)
        weights = {"lora_a": a, "lora_b": torch.zeros(2048, 16)}
    else:
        weight = torch.empty(64, 1024).normal_(std=0.02, generator=draw)
        weights = {"weight": weight, "norm scale": torch.ones(4096)}
    return {name: value.bfloat16().float() for name, value in weights.items()}


def train(
    before: dict[str, Tensor], node: dict, dtype: torch.dtype, ours: bool
) -> dict[str, Tensor]:
    """Return the weights that are kept after all steps; ``ours`` takes the package's steps."""
    weights = [nn.Parameter(value.to(dtype, copy=True)) for value in before.values()]
    make = make_optimizer if ours else config.instantiate
    optimizer = make(OmegaConf.create(node), weights)
    draw = torch.Generator().manual_seed(1)
    directions = [torch.randn(weight.shape, generator=draw) for weight in weights]
    for _ in range(STEPS):
        for weight, direction in zip(weights, directions, strict=True):
            gradient = direction + NOISE * torch.randn(weight.shape, generator=draw)
            if ours or dtype == torch.bfloat16:
                gradient = gradient.bfloat16()
            weight.grad = gradient.to(dtype)
        optimizer_step(optimizer) if ours else optimizer.step()
    kept = [optimizer.state[weight].get(MASTER, weight) for weight in weights]
    return {name: value.detach().float() for name, value in zip(before, kept, strict=True)}


def compare(before: Tensor, after: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the share of weights that changed, and the update's cosine with that of float32."""
    update, wanted = (after - before).double().flatten(), (exact - before).double().flatten()
    cosine = nn.functional.cosine_similarity(update, wanted, dim=0)
    changed = (update != 0).double().mean()
    return {"changed": round(changed.item(), 3), "cosine": round(cosine.item(), 3)}


def main() -> None:
    """Train in all ways, with the same gradients."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its optimizers, for a minute
    result: dict = {}
    for model, ways in WAYS.items():
        before, exact = start(model), {}
        for way, how in ways.items():
            kept = train(before, *how)
            exact = exact or kept
            result.setdefault(model, {})[way] = {
                name: {
                    "kept": compare(before[name], value, exact[name]),
                    "in bf16": compare(before[name], value.bfloat16().float(), exact[name]),
                }
                for name, value in kept.items()
            }
    report("bf16_updates", steps=STEPS, **result)


if __name__ == "__main__":
    main()
