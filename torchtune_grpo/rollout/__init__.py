"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.rollout._decoder import unsupported_reason
from torchtune_grpo.rollout._engine import (
    ENGINES,
    GATHER_CHOICES,
    MERGE_CHOICES,
    NativeEngine,
    RolloutEngine,
    make_engine,
)
from torchtune_grpo.rollout._noise import row_keys
from torchtune_grpo.rollout._params import Progress, SamplingParams
from torchtune_grpo.rollout._roll_out import roll_out
from torchtune_grpo.rollout._sampling import Sampler, filter_logits
from torchtune_grpo.rollout._torchtune import TorchtuneEngine

__all__ = [
    "ENGINES",
    "GATHER_CHOICES",
    "MERGE_CHOICES",
    "NativeEngine",
    "Progress",
    "RolloutEngine",
    "Sampler",
    "SamplingParams",
    "TorchtuneEngine",
    "filter_logits",
    "make_engine",
    "roll_out",
    "row_keys",
    "unsupported_reason",
]
