"""Rows -> per-token log-probs: which rows share a pass, how they are laid out, and the softmax."""

from torchtune_grpo.training.logprobs import (
    in_order,
    response_logprobs,
    trajectory_logprobs,
    unembed_with,
)
from torchtune_grpo.training.micro_batches import MicroBatch, micro_batches
from torchtune_grpo.training.packed_attention import attend_in_segments

__all__ = [
    "MicroBatch",
    "attend_in_segments",
    "in_order",
    "micro_batches",
    "response_logprobs",
    "trajectory_logprobs",
    "unembed_with",
]
