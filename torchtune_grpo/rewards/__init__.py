"""Rewards: pure functions from completions to numbers, and sets of them with weights.

A reward is any ``reward(prompts, completions, **columns) -> list[float | None]``: all arguments are
keywords and lists of N values, and None says that the reward does not apply to a completion.
"""

from torchtune_grpo.rewards._math import (
    grade_math_answer,
    math_correctness_reward,
    math_format_holds,
    math_format_reward,
)
from torchtune_grpo.rewards._reward import Reward, RewardFunction
from torchtune_grpo.rewards._reward_set import RewardScores, RewardSet

__all__ = [
    "Reward",
    "RewardFunction",
    "RewardScores",
    "RewardSet",
    "grade_math_answer",
    "math_correctness_reward",
    "math_format_holds",
    "math_format_reward",
]
