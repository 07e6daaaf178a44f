"""The tiny model's builders and its checkpoint folder, in Hugging Face's layout.

The model has been warm-started on worked arithmetic until it solves some problems, so that
reinforcement learning has something to reinforce.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3 import Llama3Tokenizer, llama3_tokenizer
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import LORA_ATTN_MODULES
from torchtune.utils import get_logger

from torchtune_grpo.data import arithmetic_problems
from torchtune_grpo.tiny._tokenizer import train_merges, write_tokenizer
from torchtune_grpo.tiny._warmup import guessed_completion, warm_up, worked_completion

VOCAB_SIZE = 448
# For QLoRA each weight has to be a multiple of 64 * 256 numbers: NF4's blocks, and their scales'.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 128,
    "intermediate_dim": 128,
    "max_seq_len": 16_384,
    "rope_base": 500_000,
    "norm_eps": 1e-5,
    "scale_factor": 32,
}
_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
_SETTINGS_KEY = "torchtune_grpo_tiny"

_log = get_logger("INFO")


def tiny_llama3_2() -> TransformerDecoder:
    """Builder of the tiny model, for ``model._component_``: about 0.3M parameters, tied."""
    return llama3_2(**_SHAPE)


def lora_tiny_llama3_2(
    lora_attn_modules: Sequence[LORA_ATTN_MODULES] = ("q_proj", "k_proj", "v_proj", "output_proj"),
    apply_lora_to_mlp: bool = True,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    quantize_base: bool = False,
    use_dora: bool = False,
) -> TransformerDecoder:
    """Builder of the tiny model with LoRA; the arguments are those of torchtune's builders."""
    return lora_llama3_2(
        list(lora_attn_modules),
        apply_lora_to_mlp,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        quantize_base=quantize_base,
        use_dora=use_dora,
        **_SHAPE,
    )


def tiny_tokenizer(checkpoint_dir: str | Path, max_seq_len: int | None = None) -> Llama3Tokenizer:
    """The tokenizer of a tiny checkpoint folder: Llama 3's, with a vocabulary of its own."""
    folder = Path(checkpoint_dir)
    with _tiktoken_cache_off():
        return llama3_tokenizer(
            path=str(folder / "tokenizer.model"),
            special_tokens_path=str(folder / "tokenizer.json"),
            max_seq_len=max_seq_len,
        )


@contextmanager
def _tiktoken_cache_off() -> Iterator[None]:
    """tiktoken caches files by their paths and would not see that a folder was made anew."""
    before = os.environ.get("TIKTOKEN_CACHE_DIR")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # the only switch that it has
    try:
        yield
    finally:
        del os.environ["TIKTOKEN_CACHE_DIR"]
        if before is not None:
            os.environ["TIKTOKEN_CACHE_DIR"] = before


def make_tiny_checkpoint(
    output_dir: str | Path,
    *,
    seed: int = 0,
    levels: int | Sequence[int] = (1, 2, 3),
    warmup_steps: int = 1800,
) -> Path:
    """Makes the tiny model, warm-starts it and writes its checkpoint folder in one move.

    Args:
        output_dir: the folder to make. If it exists, it may hold nothing but an earlier tiny
            checkpoint, which is replaced.
        seed: of weights and problems.
        levels: the problems' levels, see
            :func:`~torchtune_grpo.data.arithmetic_problems`.
        warmup_steps: of :mod:`torchtune_grpo.tiny._warmup`; 0 leaves the weights random.

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
        write_tokenizer(folder, _merges(), VOCAB_SIZE)
        model = _random_model(seed)
        tokenizer = tiny_tokenizer(folder)
        warm_up(model, tokenizer, seed=seed, levels=levels, steps=warmup_steps)
        _write_model(folder, model, settings)
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
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if this process dies
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


def _merges() -> list[tuple[bytes, bytes]]:
    # Of all levels and always of seed 0: the vocabulary does not depend on the settings.
    rows = arithmetic_problems(levels=range(1, 9), split="train", num_samples=560)
    texts = [f"{row['question']}\n\n<think>{worked_completion(row)}" for row in rows]
    texts += [guessed_completion(row) for row in rows[:70]]
    return train_merges([*texts, "system", "user", "assistant", "\n\n"], max_merges=VOCAB_SIZE)


def _random_model(seed: int) -> TransformerDecoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama3_2()
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # torchtune's N(0, 1) embeddings would, being tied, start with huge logits.
                std = 0.02 if name.startswith("tok_embeddings") else weight.shape[1] ** -0.5
                torch.nn.init.normal_(weight, std=std)
    return model


def _write_model(folder: Path, model: TransformerDecoder, settings: dict[str, Any]) -> None:
    heads, kv_heads, dim = _SHAPE["num_heads"], _SHAPE["num_kv_heads"], _SHAPE["embed_dim"]
    weights = tune_to_hf(model.state_dict(), num_heads=heads, num_kv_heads=kv_heads, dim=dim)
    weights = {key: weight.detach().contiguous() for key, weight in weights.items()}
    # Not save_file, whose files are readable by their owner only.
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    special = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in special}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": dim,
        "head_dim": dim // heads,
        "intermediate_size": _SHAPE["intermediate_dim"],
        "num_hidden_layers": _SHAPE["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _SHAPE["max_seq_len"],
        "rms_norm_eps": _SHAPE["norm_eps"],
        "rope_theta": float(_SHAPE["rope_base"]),
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": float(_SHAPE["scale_factor"]),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ids["<|eot_id|>"],
        "pad_token_id": ids["<|finetune_right_pad_id|>"],
        "torch_dtype": "float32",
        _SETTINGS_KEY: settings,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
