"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.rollout.request import sample_groups

__all__ = ["sample_groups"]
