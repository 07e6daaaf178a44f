"""Data sets that yield prompt tokens plus the columns rewards need, and their collation."""

from torchtune_grpo.data._arithmetic import arithmetic_dataset, arithmetic_problems
from torchtune_grpo.data._collate import PromptBatch, collate_prompts
from torchtune_grpo.data._gsm8k import gsm8k_dataset
from torchtune_grpo.data._humaneval import humaneval_dataset
from torchtune_grpo.data._rl_dataset import RLDataset
from torchtune_grpo.data._samplers import (
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
