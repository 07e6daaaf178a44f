"""The demo's model: a tiny Llama 3.2 that adds a little, made on the spot instead of downloaded."""

from torchtune_grpo.tiny.model import make_tiny_checkpoint, prepare

__all__ = ["make_tiny_checkpoint", "prepare"]
