"""Rows -> per-token log-probs -> optimizer steps."""

from torchtune_grpo.training.logprobs import (
    importance_weights,
    in_order,
    response_logprobs,
    trajectory_logprobs,
)
from torchtune_grpo.training.packing import MicroBatch, attend_in_segments

__all__ = [
    "MicroBatch",
    "attend_in_segments",
    "importance_weights",
    "in_order",
    "response_logprobs",
    "trajectory_logprobs",
]
