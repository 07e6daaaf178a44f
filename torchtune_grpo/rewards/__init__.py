"""Rewards: pure functions from completions to numbers, and sets of them with weights.

A reward is any ``reward(prompts, completions, **columns) -> list[float | None]``, as in TRL's
GRPOTrainer: all arguments are keywords; prompts (texts), completions (texts, each with its prefill)
and the data set's other columns are lists of N values; and None says that the reward does not apply
to a completion. docs/rewards.md tells more.
"""

from torchtune_grpo.rewards.code import CodeReward, code_format_reward
from torchtune_grpo.rewards.lenient import last_number_reward
from torchtune_grpo.rewards.math import (
    grade_math_answer,
    math_correctness_reward,
    math_format_holds,
    math_format_reward,
)
from torchtune_grpo.rewards.reward import Reward, RewardFunction
from torchtune_grpo.rewards.reward_set import Answers, RewardFailure, RewardScores, RewardSet
from torchtune_grpo.rewards.shaping import (
    CosineLengthReward,
    OverlongPenalty,
    RepetitionPenalty,
    math_number_reward,
    math_tag_reward,
)
from torchtune_grpo.rewards.symbolic import SymbolicMathReward
from torchtune_grpo.sandbox.contract import TrainerState

__all__ = [
    "Answers",
    "CodeReward",
    "CosineLengthReward",
    "OverlongPenalty",
    "RepetitionPenalty",
    "Reward",
    "RewardFailure",
    "RewardFunction",
    "RewardScores",
    "RewardSet",
    "SymbolicMathReward",
    "TrainerState",
    "code_format_reward",
    "grade_math_answer",
    "last_number_reward",
    "math_correctness_reward",
    "math_format_holds",
    "math_format_reward",
    "math_number_reward",
    "math_tag_reward",
]
