"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.config.keys import RolloutConfig, SamplingParams
from torchtune_grpo.rollout.engine import NativeEngine, TorchtuneEngine, make_engine
from torchtune_grpo.rollout.request import (
    Progress,
    RolloutEngine,
    RolloutRequest,
    decode_responses,
    decode_tokens,
    roll_out,
)
from torchtune_grpo.rollout.sampling import Sampler, filter_logits, row_keys

__all__ = [
    "NativeEngine",
    "Progress",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "Sampler",
    "SamplingParams",
    "TorchtuneEngine",
    "decode_responses",
    "decode_tokens",
    "filter_logits",
    "make_engine",
    "roll_out",
    "row_keys",
]
