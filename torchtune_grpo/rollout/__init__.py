"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.rollout.request import Capabilities, RolloutEngine, sample_groups

__all__ = ["Capabilities", "RolloutEngine", "sample_groups"]
