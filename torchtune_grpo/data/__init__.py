"""Data sets that yield prompt tokens plus the columns rewards need, and their collation."""

from torchtune_grpo.data._arithmetic import arithmetic_dataset, arithmetic_problems
from torchtune_grpo.data._collate import PromptBatch, collate_prompts
from torchtune_grpo.data._gsm8k import gsm8k_dataset
from torchtune_grpo.data._humaneval import humaneval_dataset
from torchtune_grpo.data._order import step_indices
from torchtune_grpo.data._rl_dataset import RLDataset

__all__ = [
    "PromptBatch",
    "RLDataset",
    "arithmetic_dataset",
    "arithmetic_problems",
    "collate_prompts",
    "gsm8k_dataset",
    "humaneval_dataset",
    "step_indices",
]
