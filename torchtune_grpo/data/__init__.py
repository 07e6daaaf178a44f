"""Data sets that yield prompt tokens plus the columns rewards need, and their collation."""

from torchtune_grpo.data.dataset import PromptBatch, RLDataset, collate_prompts
from torchtune_grpo.data.presets import (
    arithmetic_dataset,
    arithmetic_problems,
    gsm8k_dataset,
    humaneval_dataset,
    number_dataset,
    reasoning_gym_dataset,
)
from torchtune_grpo.data.samplers import (
    LevelSampler,
    ShuffledSampler,
    WeightedSampler,
    make_sampler,
    prompts_of_rank,
)

__all__ = [
    "LevelSampler",
    "PromptBatch",
    "RLDataset",
    "ShuffledSampler",
    "WeightedSampler",
    "arithmetic_dataset",
    "arithmetic_problems",
    "collate_prompts",
    "gsm8k_dataset",
    "humaneval_dataset",
    "make_sampler",
    "number_dataset",
    "prompts_of_rank",
    "reasoning_gym_dataset",
]
