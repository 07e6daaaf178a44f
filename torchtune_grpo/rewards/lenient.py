"""What evaluations ask of math rewards: the last number of a text, and the answer a reward sees."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from torchtune_grpo.rewards.math import (
    located_answers,
    math_correctness_reward,
    math_gold_fault,
    stated_value,
)
from torchtune_grpo.rewards.reward import Reward
from torchtune_grpo.rewards.symbolic import SymbolicMathReward, stated_expression

# A minus behind a digit, a letter or a bracket subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_LONGEST = 200  # characters of an answer that other spellings of the same number are found for


def last_number_reward(
    prompts: list[str],
    completions: list[str],
    *,
    answer: list[str | int | float],
    **columns: Any,
) -> list[float]:
    """Rewards a text whose last number, wherever it stands, is the gold: a lenient grader.

    Beside ``math_correctness_reward`` it tells what a model knows from whether it keeps the form.
    Not one to train on: of an answer that lists numbers, the last one counts.
    """
    texts = [f"<answer>{last_number(text) or ''}</answer>" for text in completions]
    return math_correctness_reward(prompts, texts, answer=answer)


def last_number(text: str) -> str | None:
    """The last number of a text as it is written there, or None."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def stated_answer(text: str) -> str | None:
    """The number in a text's answer block, one spelling for each value; None if there is none."""
    blocks = located_answers(text)
    answers = {_spelling(block) for block in blocks} if len(blocks) <= _LONGEST else {None}
    return answers.pop() if len(answers) == 1 else None


def _spelling(content: str) -> str | None:
    value = stated_value(content)
    if value and len(content) <= _LONGEST:
        return str(Fraction(value.numerator) / Fraction(value.denominator))
    return content if value else None


def names_answer(reward: Reward) -> Callable[[str], str | None] | None:
    """How a reward says which answer it sees in a text: its ``answer_of``, or None."""
    return reward.answer_of


# See evaluation.py: votes among samples.
math_correctness_reward.answer_of = stated_answer  # type: ignore[attr-defined]
SymbolicMathReward.answer_of = staticmethod(  # type: ignore[attr-defined]
    lambda text: stated_answer(text) or stated_expression(text)
)
last_number_reward.answer_of = lambda text: _spelling(last_number(text) or "")  # type: ignore[attr-defined]
last_number_reward.decides = True  # type: ignore[attr-defined]
last_number_reward.check_row = math_gold_fault  # type: ignore[attr-defined]
