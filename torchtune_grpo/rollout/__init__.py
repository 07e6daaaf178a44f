"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.rollout.request import roll_out

__all__ = ["roll_out"]
