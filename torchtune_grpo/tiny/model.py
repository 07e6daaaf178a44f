"""The tiny model's checkpoint folder, as the hub has them.

The model has been warm-started on worked arithmetic until it solves some problems, so that
reinforcement learning has something to reinforce.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save
from torchtune.modules import TransformerDecoder
from torchtune.utils import get_logger

from torchtune_grpo.data import arithmetic_problems
from torchtune_grpo.models import hf_model, hf_state, hf_tokenizer
from torchtune_grpo.tiny.tokenizer import write_tokenizer
from torchtune_grpo.tiny.warmup import guessed_completion, warm_up, worked_completion

# For QLoRA each weight has to be a multiple of 64 * 256 numbers: NF4's blocks, and their scales'.
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 448,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_SETTINGS_KEY = "torchtune_grpo_tiny"

_log = get_logger("INFO")


def make_tiny_checkpoint(
    output_dir: str | Path,
    *,
    seed: int = 0,
    levels: int | Sequence[int] = (1, 2, 3),
    warmup_steps: int = 3000,
) -> Path:
    """Makes the tiny model, warm-starts it and writes its checkpoint folder in one move.

    Args:
        output_dir: the folder to make. If it exists, it may hold nothing but an earlier tiny
            checkpoint, which is replaced.
        seed: of weights and problems.
        levels: the problems' levels, see
            :func:`~torchtune_grpo.data.arithmetic_problems`.
        warmup_steps: of :mod:`torchtune_grpo.tiny.warmup`; 0 leaves the weights random.

    Returns:
        Path: the folder.

    Raises:
        ValueError: if ``output_dir`` holds other files.
    """
    levels = [levels] if isinstance(levels, int) else list(levels)
    settings = {"seed": seed, "levels": levels, "warmup_steps": warmup_steps}
    target = Path(output_dir).absolute()
    _check_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Short enough for 80 columns behind the logger's prefix.
    _log.info("Making a tiny Llama that can add: 1 or 2 minutes.")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name) / target.name
        folder.mkdir()
        ids = write_tokenizer(folder, _texts(), _CONFIG["vocab_size"])
        config = json.dumps(_CONFIG | ids | {_SETTINGS_KEY: settings}, indent=2)
        (folder / "config.json").write_text(config + "\n")
        model = _random_model(folder, seed)
        tokenizer = hf_tokenizer(str(folder))
        warm_up(model, tokenizer, seed=seed, levels=levels, steps=warmup_steps)
        weights = hf_state(model.state_dict(), folder)
        # Not save_file, whose files are readable by their owner only.
        (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
        if target.exists():
            shutil.rmtree(target)
        os.rename(folder, target)
    _log.info(f"Made {target.name} in {time.perf_counter() - start:.0f} s.")
    return target


def prepare(checkpoint_dir: str | Path, **settings: Any) -> None:
    """Makes the tiny checkpoint unless it is there. Several processes may call this at once.

    Args:
        checkpoint_dir: the folder.
        **settings: as :func:`make_tiny_checkpoint` takes them.

    Raises:
        ValueError: if the folder holds a checkpoint made with other settings, or other files.
    """
    folder = Path(checkpoint_dir).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not all((folder / name).is_file() for name in _FILES):
            make_tiny_checkpoint(folder, **settings)
            return
    made = json.loads((folder / "config.json").read_text()).get(_SETTINGS_KEY, {})
    differing = {key: made.get(key) for key, value in settings.items() if made.get(key) != value}
    if differing:
        raise ValueError(
            f"prepare: {folder} was made with {differing}, the config asks for "
            f"{ {key: settings[key] for key in differing} }. "
            "Delete the folder, or name another checkpoint_dir."
        )


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and (others := {path.name for path in folder.iterdir()} - set(_FILES)):
        raise ValueError(
            f"checkpoint_dir: {folder} holds other files ({', '.join(sorted(others)[:5])}). "
            "Name a new folder."
        )


def _texts() -> Iterator[str]:
    # Of all levels and always of seed 0: the vocabulary does not depend on the settings.
    rows = arithmetic_problems(levels=range(1, 9), split="train", num_samples=560)
    yield from (f"{row['question']}\n\n<think>{worked_completion(row)}" for row in rows)
    yield from map(guessed_completion, rows[:70])
    yield from ("system", "user", "assistant", "\n\n")


def _random_model(folder: Path, seed: int) -> TransformerDecoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf_model(str(folder))
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # torchtune's N(0, 1) embeddings would, being tied, start with huge logits.
                std = 0.02 if name.startswith("tok_embeddings") else weight.shape[1] ** -0.5
                torch.nn.init.normal_(weight, std=std)
    return model
