"""Sampling a group of completions for each prompt: the generation engine."""

from torchtune_grpo.config.keys import RolloutConfig, SamplingConfig, SamplingParams
from torchtune_grpo.rollout.decoder import unsupported_reason
from torchtune_grpo.rollout.engine import NativeEngine, make_engine
from torchtune_grpo.rollout.noise import row_keys
from torchtune_grpo.rollout.request import Admission, Progress, RolloutEngine, RolloutRequest
from torchtune_grpo.rollout.roll_out import roll_out
from torchtune_grpo.rollout.sampling import Sampler, filter_logits
from torchtune_grpo.rollout.text import decode_responses
from torchtune_grpo.rollout.torchtune import TorchtuneEngine

__all__ = [
    "Admission",
    "NativeEngine",
    "Progress",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "Sampler",
    "SamplingConfig",
    "SamplingParams",
    "TorchtuneEngine",
    "decode_responses",
    "filter_logits",
    "make_engine",
    "roll_out",
    "row_keys",
    "unsupported_reason",
]
