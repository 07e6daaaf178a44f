"""Parts that benchmarks share: random models and rows, memory use, processes and runs."""

import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from resource import struct_rusage
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training import set_default_dtype

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.models.layers import attend_in_segments, standardize
from torchtune_grpo.rollout.request import RolloutRequest
from torchtune_grpo.rollout.sampling import row_keys
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.packing import MicroBatch
from torchtune_grpo.trajectory import Trajectory, length_mask

BIN = Path(sys.executable).parent
_SIZES = (
    "vocab_size embed_dim intermediate_dim num_layers num_heads num_kv_heads max_seq_len"
).split()
SHAPES = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "S": (32_768, 512, 1536, 8, 8, 4, 4096),
        "M": (128_256, 2048, 8192, 16, 32, 8, 4096),  # Llama 3.2 1B
        "SmolLM2": (49_152, 576, 1536, 30, 9, 3, 2048),
    }.items()
}
SHAPE_S, LLAMA_1B, SMOLLM2 = SHAPES.values()
GROUP = 8
PROMPT_LENGTHS = (96, 160, 212, 292)


# --- Models and rows of random numbers ------------------------------------------------------------


def random_model(
    shape: dict[str, int],
    *,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> TransformerDecoder:
    """Make torchtune's Llama 3.2; with a rank, it has LoRA on all layers and trains only that."""
    torch.manual_seed(0)
    with set_default_dtype(dtype), torch.device(device):
        if rank is None:
            model = llama3_2(**shape)
        else:
            projections = ["q_proj", "k_proj", "v_proj", "output_proj"]
            model = lora_llama3_2(
                projections, apply_lora_to_mlp=True, lora_rank=rank, lora_alpha=2 * rank, **shape
            )
            set_trainable_params(model, get_adapter_params(model))
    # The usual initialization; torch's default of 1 gives logits that no trained model has.
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.02)
    return model


def random_policy(shape: dict[str, int], **settings: Any) -> TransformerDecoder:
    """Make the same model, prepared for the recipe's passes over packed groups."""
    model = random_model(shape, **settings)
    for module in model.modules():  # torchtune leaves the frequencies out on the meta device
        if hasattr(module, "rope_init") and not hasattr(module, "theta"):
            module.rope_init()
    standardize(model)
    attend_in_segments(model)
    return model


def random_prompts(lengths: list[int], vocab: int) -> PromptBatch:
    """Return random prompts of these lengths."""
    draw = random.Random(1)
    return PromptBatch(
        tokens=[draw.choices(range(vocab), k=length) for length in lengths],
        indices=list(range(len(lengths))),
        prompts=[""] * len(lengths),
        columns={},
        uses=[0] * len(lengths),
        step_indices=list(range(len(lengths))),
    )


def request_of(prompts: PromptBatch, *, new_tokens: int, group: int = GROUP) -> RolloutRequest:
    """Make a request for groups of responses that no token ends."""
    return RolloutRequest(
        prompts=prompts.tokens,
        group_size=group,
        params=SamplingParams(max_generated_tokens=new_tokens),
        stop_tokens=[],
        keys=row_keys(seed=0, step=0, prompt_indices=prompts.indices, group_size=group),
    )


class Words:
    """Tokenizer with all that a rollout needs; no token ends a response."""

    stop_tokens: list[int] = []

    def decode(self, tokens: list[int]) -> str:
        return " ".join(f"w{token}" for token in tokens)


def rows_of(
    tokens: Tensor, prompt_lengths: Tensor, response_lengths: Tensor, **more: Any
) -> Trajectory:
    """Make rows with prompts and responses of these lengths; ``more`` replaces what is made up."""
    mask = length_mask(response_lengths, int(response_lengths.max()))
    numbers, zeros = torch.arange(len(tokens)), torch.zeros(mask.shape)
    made_up = {
        "tokens": tokens.where(length_mask(prompt_lengths + response_lengths, tokens.shape[1]), 0),
        "prompt_indices": numbers,
        "step_indices": numbers,
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
        "sampled": mask.clone(),
        "response_mask": mask,
        "truncated": torch.zeros(len(tokens), dtype=torch.bool),
        "sampler_logprobs": zeros,
        "behaviour_logprobs": zeros,
        "prompts": [],
        "completions": [],
        "columns": {},
    }
    return Trajectory(**made_up | more)


def random_rows(
    *, vocab: int, prompt: int, shortest: int, longest: int, groups: int = 1, group: int = GROUP
) -> Trajectory:
    """Make groups of random responses, the first as long as any, with all that a loss needs."""
    generator = torch.Generator().manual_seed(0)
    count = groups * group
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    tokens = torch.randint(vocab, (count, prompt + longest), generator=generator)
    tokens[:, :prompt] = tokens[::group, :prompt].repeat_interleave(group, dim=0)
    rows = rows_of(
        tokens,
        torch.full((count,), prompt),
        lengths,
        prompt_indices=torch.zeros(count, dtype=torch.long),
        step_indices=torch.zeros(count, dtype=torch.long),
        advantages=torch.randn(count, generator=generator),
        ref_logprobs=torch.zeros(count, longest),
    )
    return with_weights(rows)


def with_weights(rows: Trajectory) -> Trajectory:
    """Set each token's share of the default loss, with all rows in one optimizer step."""
    weights = GRPOLoss().weights(
        rows.response_mask,
        prompt_indices=rows.prompt_indices,
        num_rows=rows.num_rows,
        num_tokens=int(rows.response_mask.sum()),
        max_generated_tokens=rows.response_mask.shape[1],
    )
    return replace(rows, weights=weights)


def loss_of(
    model: TransformerDecoder,
    part: MicroBatch,
    rows: Trajectory,
    loss: Any,
    *,
    temperature: float = 0.9,
) -> Tensor:
    """Run the forward pass of a micro-batch with these rows; return its share of the loss."""
    logprobs, entropy = response_logprobs(
        model,
        part.layout,
        temperature=temperature,
        entropy="gradient" if loss.needs_entropy_gradient else "value",
    )
    return loss(
        logprobs=logprobs,
        old_logprobs=None,
        ref_logprobs=rows.ref_logprobs,
        advantages=rows.advantages,
        weights=rows.weights,
        response_mask=rows.response_mask,
        entropy=entropy,
    ).loss


# --- TRL ------------------------------------------------------------------------------------------


def trl_settings(folder: str) -> dict[str, Any]:
    """Return arguments of TRL's ``GRPOConfig``: the same computation, on a CPU, and no logs."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "activation_checkpointing": False,
        "loss_type": "grpo",
        "optim": "adamw_torch",
    }


def lora(rank: int) -> Any:
    """Return PEFT's settings for LoRA on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )


# --- Processes ------------------------------------------------------------------------------------


def forget_peak() -> None:
    """Start measuring a new peak."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_mb(name: str) -> float:
    """Return what this process holds now (VmRSS), or held at most since forget_peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024 / 1e6


def apart(work: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """Return what some work returns in a process of its own; its first argument is its name."""
    with (
        patch.dict(os.environ, environment),
        ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=os.dup2, initargs=(2, 1)
        ) as process,
    ):
        result = process.submit(work, *args).result()
    print(args[0], result, file=sys.stderr, flush=True)
    return result


def run(command: list[Any], *, threads: int = 1) -> struct_rusage:
    """Run a command on this many threads, and return its CPU time and memory use."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen([*map(str, command)], stdout=sys.stderr, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(map(str, command))}: ended with status {status}")
    return usage


def tune_run(config: str, folder: Path, keys: list[str], *, threads: int = 1) -> struct_rusage:
    """Run the recipe, as a user does."""
    command = [BIN / "tune", "run", "grpo_full_finetune_single_device", "--config", config]
    return run([*command, f"output_dir={folder}", *keys], threads=threads)


def report(benchmark: str, settings: Namespace | None = None, **results: Any) -> None:
    """Print a benchmark's line of JSON."""
    line: dict[str, Any] = {"benchmark": benchmark, "torch": torch.__version__}
    line |= {"settings": vars(settings)} if settings else {}
    print(json.dumps(line | results, default=str))
