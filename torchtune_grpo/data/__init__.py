"""Data sets that yield prompt tokens plus the columns rewards need, and their collation."""

from torchtune_grpo.data.arithmetic import arithmetic_dataset, arithmetic_problems
from torchtune_grpo.data.collate import PromptBatch, collate_prompts
from torchtune_grpo.data.gsm8k import gsm8k_dataset
from torchtune_grpo.data.humaneval import humaneval_dataset
from torchtune_grpo.data.rl_dataset import RLDataset
from torchtune_grpo.data.samplers import (
    DifficultySampler,
    LevelSampler,
    ShuffledSampler,
    WeightedSampler,
    make_sampler,
    prompts_of_rank,
)

__all__ = [
    "DifficultySampler",
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
    "prompts_of_rank",
]
