"""Rewards: functions from completions to numbers, and weighted sets of them.

A reward is any ``reward(prompts, completions, **columns) -> list[float | None]``; docs/rewards.md
describes it.
"""

from torchtune_grpo.rewards.call import TrainerState
from torchtune_grpo.rewards.code import CodeReward, ProgramReward, code_format_reward
from torchtune_grpo.rewards.judge import JudgeReward
from torchtune_grpo.rewards.math import (
    grade_math_answer,
    last_number_reward,
    math_correctness_reward,
    math_format_holds,
    math_format_reward,
)
from torchtune_grpo.rewards.model import RewardModel
from torchtune_grpo.rewards.reasoning_gym import ReasoningGymReward
from torchtune_grpo.rewards.reward import Reward, RewardFunction
from torchtune_grpo.rewards.score import Decider, RewardFailure, RewardScores, RewardSet
from torchtune_grpo.rewards.shaping import OverlongPenalty, math_number_reward
from torchtune_grpo.rewards.short_answers import choice_reward, short_text_reward
from torchtune_grpo.rewards.symbolic import SymbolicMathReward

__all__ = [
    "CodeReward",
    "JudgeReward",
    "OverlongPenalty",
    "ProgramReward",
    "ReasoningGymReward",
    "Reward",
    "Decider",
    "RewardFailure",
    "RewardFunction",
    "RewardModel",
    "RewardScores",
    "RewardSet",
    "SymbolicMathReward",
    "TrainerState",
    "choice_reward",
    "code_format_reward",
    "grade_math_answer",
    "last_number_reward",
    "math_correctness_reward",
    "math_format_holds",
    "math_format_reward",
    "math_number_reward",
    "short_text_reward",
]
