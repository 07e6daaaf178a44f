"""Grading of math answers: the located answer, and whether it states the gold."""

from torchtune_grpo.rewards.math.grading import (
    grade_math_answer,
    is_worked_answer,
    located_answers,
    math_correctness_reward,
    math_format_holds,
    math_format_reward,
    math_gold_fault,
)
from torchtune_grpo.rewards.math.value import stated_value

__all__ = [
    "grade_math_answer",
    "is_worked_answer",
    "located_answers",
    "math_correctness_reward",
    "math_format_holds",
    "math_format_reward",
    "math_gold_fault",
    "stated_value",
]
