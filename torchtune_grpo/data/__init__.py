"""Data sets that yield prompt tokens plus the columns rewards need, and their collation."""

from torchtune_grpo.data.dataset import PromptBatch, RLDataset
from torchtune_grpo.data.mixing import MixedDataset
from torchtune_grpo.data.presets import (
    arithmetic_dataset,
    gsm8k_dataset,
    humaneval_dataset,
    number_dataset,
    reasoning_gym_dataset,
)
from torchtune_grpo.data.samplers import (
    MixedSampler,
    ShuffledSampler,
)

__all__ = [
    "MixedDataset",
    "MixedSampler",
    "PromptBatch",
    "RLDataset",
    "ShuffledSampler",
    "arithmetic_dataset",
    "gsm8k_dataset",
    "humaneval_dataset",
    "number_dataset",
    "reasoning_gym_dataset",
]
