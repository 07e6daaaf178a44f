"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.rollout._roll_out import roll_out
from torchtune_grpo.rollout._sampling import filter_logits, sample_tokens
from torchtune_grpo.rollout._torchtune import SamplingParams, generate

__all__ = ["SamplingParams", "filter_logits", "generate", "roll_out", "sample_tokens"]
