"""Rows -> per-token log-probs -> optimizer steps."""

from torchtune_grpo.training.logprobs import importance_weights, in_order, response_logprobs

__all__ = ["importance_weights", "in_order", "response_logprobs"]
