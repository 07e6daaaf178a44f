"""Rows -> per-token log-probs -> optimizer steps."""

from torchtune_grpo.training.logprobs import importance_weights, in_order, response_logprobs
from torchtune_grpo.training.teacher import Teacher

__all__ = ["Teacher", "importance_weights", "in_order", "response_logprobs"]
