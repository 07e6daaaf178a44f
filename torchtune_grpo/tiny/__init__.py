"""The embedded default: a tiny Llama 3.2 that adds a little, made on the spot, not downloaded."""

from torchtune_grpo.tiny._model import (
    lora_tiny_llama3_2,
    make_tiny_checkpoint,
    prepare,
    tiny_llama3_2,
    tiny_tokenizer,
)

__all__ = [
    "lora_tiny_llama3_2",
    "make_tiny_checkpoint",
    "prepare",
    "tiny_llama3_2",
    "tiny_tokenizer",
]
