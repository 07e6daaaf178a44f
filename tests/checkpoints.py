"""Tiny checkpoint folders in Hugging Face's format, with byte tokenizers, for any test."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hf_models import hf_folder
from omegaconf import OmegaConf
from policies import SHAPE, randomize
from safetensors.torch import save_file
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2._tokenizer import bytes_to_unicode

from torchtune_grpo.config.keys import ObjectiveConfig, SavingConfig

LLAMA_SPECIALS = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> "
    "<|python_tag|> <|finetune_right_pad_id|> <|step_id|> <|image|>"
).split()
QWEN_SPECIALS = "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call>".split()
TOKENS = torch.arange(40).view(2, 20) * 6 % 250
VOCAB = 272  # 256 bytes, the special tokens, and ids that no tokenizer knows
# Every adapted weight has a multiple of 16,384 elements, which NF4 quantization needs.
TINY = SHAPE | dict(vocab_size=VOCAB, embed_dim=256, intermediate_dim=256, max_seq_len=512)
SIZES = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=256)  # the same for transformers


def llama_checkpoint(folder: Path) -> Path:
    """Write a random two-layer Llama 3.2 with a byte tokenizer."""
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, **scaling}
    rope["original_max_position_embeddings"] = 8192
    hf_folder("llama3", folder, **SIZES, rope_parameters=rope, rms_norm_eps=1e-5)
    heads = {name: TINY[name] for name in ("num_heads", "num_kv_heads")}
    state = tune_to_hf(randomize(llama3_2(**TINY)).state_dict(), **heads, dim=TINY["embed_dim"])
    state = {name: value.contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})  # as golden runs have them
    llama_tokenizer_files(folder)
    return folder


def qwen_checkpoint(folder: Path) -> Path:
    """Write a random two-layer Qwen 2.5 with a byte tokenizer."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    hf_folder("qwen2", folder, **SIZES, rope_parameters=rope, rms_norm_eps=1e-5)
    qwen_tokenizer_files(folder)
    return folder


def llama_tokenizer_files(folder: Path) -> None:
    """Write a byte tokenizer in tiktoken's format."""
    lines = (base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    _specials(folder, LLAMA_SPECIALS)


def qwen_tokenizer_files(folder: Path) -> None:
    """Write a byte tokenizer in GPT-2's format."""
    vocab = {char: byte for byte, char in bytes_to_unicode().items()}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    _specials(folder, QWEN_SPECIALS)


def _specials(folder: Path, names: list[str]) -> None:
    added = [{"id": 256 + i, "content": name} for i, name in enumerate(names)]
    (folder / "special_tokens.json").write_text(json.dumps({"added_tokens": added}))


def saving_config(checkpointer: dict[str, Any], folder: Path, **saving: Any) -> SimpleNamespace:
    """Make as much of a config as a run's checkpoints need."""
    return SimpleNamespace(
        checkpointer=OmegaConf.create(checkpointer),
        output_dir=str(folder),
        batch_size=1,
        dataset={},
        objective=ObjectiveConfig(),
        saving=SavingConfig(**saving),
        model_dump=lambda: {"dtype": "fp32"},
    )
