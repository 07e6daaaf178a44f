"""Two rewards for maths with one number as the answer: the format, and the answer's correctness.

The text to grade is ``<think> ... </think> <answer> ... </answer>``: the prefill, if there is one,
and the completion. Grading takes linear time, executes nothing, raises nothing and works in any
thread.
"""

from __future__ import annotations

import unicodedata
from decimal import Decimal
from typing import TypeGuard

from torchtune_grpo.plain import shortened
from torchtune_grpo.rewards.math._value import stated_value

_THINK, _END_THINK = "<think>", "</think>"
_ANSWER, _END_ANSWER = "<answer>", "</answer>"

_GSM8K_MARK = "#### "

# How many answer blocks of one text, none like another, are read; more are not correct.
MAX_SPELLINGS = 1000


def math_format_holds(text: str) -> bool:
    """Whether a text has the form that the prompt asks for.

    Args:
        text (str): prefill and completion.

    Returns:
        True where the text, stripped, is one think block, only white space (or nothing), and one
        answer block; each of the four tags stands once, and neither block is blank.
    """
    text = text.strip()
    if any(text.count(tag) != 1 for tag in (_THINK, _END_THINK, _ANSWER, _END_ANSWER)):
        return False
    if not (text.startswith(_THINK) and text.endswith(_END_ANSWER)):
        return False
    thought, _, rest = text[len(_THINK) :].partition(_END_THINK)
    between, _, answer = rest.removesuffix(_END_ANSWER).partition(_ANSWER)
    ordered = _ANSWER in rest
    return ordered and not between.strip() and not (_is_blank(thought) or _is_blank(answer))


def grade_math_answer(text: str, gold: str | int | float) -> bool:
    """Whether the answer in a text states exactly one number, and it is the gold.

    The answer is the content of the complete ``<answer>`` block behind the last ``</think>``
    (anywhere, if there is no think tag at all). Several blocks must all state the same value.
    Numbers are compared as rationals, of any length.

    Args:
        text (str): prefill and completion.
        gold (str | int | float): the right number, written in any way that an answer may be. With
            a gold that states no number nothing is correct.

    Returns:
        True where the answer is correct.
    """
    blocks = located_answers(text)
    if not blocks or len(blocks) > MAX_SPELLINGS:
        return False
    expected = stated_value(_gold_text(gold))
    if expected is None:
        return False
    values = (stated_value(block) for block in blocks)
    return all(value is not None and value.same_as(expected) for value in values)


def math_format_reward(
    prompts: list[str], completions: list[str], **columns: list[object]
) -> list[float]:
    """Rewards the form of an answer, whatever it says.

    Returns:
        N numbers, 1.0 where ``math_format_holds`` and 0.0 elsewhere.
    """
    return [float(math_format_holds(text)) for text in completions]


def math_correctness_reward(
    prompts: list[str],
    completions: list[str],
    *,
    answer: list[str | int | float],
    **columns: list[object],
) -> list[float]:
    """Rewards a right answer, whatever the form outside its ``<answer>`` block.

    Args:
        prompts, completions, **columns: as all rewards get them.
        answer (list[str | int | float]): N golds, such as ``"72"``.

    Returns:
        N numbers, 1.0 where ``grade_math_answer`` says so and 0.0 elsewhere.

    Raises:
        ValueError: if there are not as many golds as completions, or a gold is neither text nor a
            number.
    """
    if len(answer) != len(completions):
        raise ValueError(
            f"The column answer has {len(answer)} golds for {len(completions)} completions; "
            "give one gold per completion."
        )
    for index, gold in enumerate(answer):
        if not _is_text_or_number(gold):
            raise ValueError(
                f"answer[{index}] is {gold!r}; the column answer must hold the right number, as "
                "text (such as '72') or as a number."
            )
    return [float(grade_math_answer(text, gold)) for text, gold in zip(completions, answer)]


def math_gold_fault(*, answer: object) -> str | None:
    """What keeps every answer from being right with a gold, or None if one can be."""
    if not _is_text_or_number(answer):
        return f"answer={shortened(repr(answer))} is neither text nor a number"
    if stated_value(_gold_text(answer)) is not None:
        return None
    problem = "does not state one number"
    if is_worked_answer(answer):
        problem = "is a worked answer; torchtune_grpo.data.gsm8k_dataset takes the gold out of it"
    return f"answer={shortened(repr(answer))} {problem}"


def is_worked_answer(gold: object) -> bool:
    """Whether a gold is written as GSM8K's rows have it: worked, then the mark and the number."""
    return isinstance(gold, str) and _GSM8K_MARK in gold


def located_answers(text: str) -> set[str]:
    """The contents of the answer blocks that count; equal ones once.

    They stand behind the last ``</think>``, or anywhere if there is no think tag at all.
    """
    _, end_think, tail = text.rpartition(_END_THINK)
    reopened = tail.find(_THINK)
    thinking_from = len(tail) if reopened < 0 else reopened
    blocks: set[str] = set()
    position = 0
    while (opening := tail.find(_ANSWER, position)) >= 0:
        start = opening + len(_ANSWER)
        end = tail.find(_END_ANSWER, start)
        if end < 0:
            break
        if not blocks and opening > thinking_from:
            return set()
        blocks.add(tail[start:end].strip(" \n"))
        position = end + len(_END_ANSWER)
    return blocks


def _is_blank(block: str) -> bool:
    """Whether a block shows nothing: white space, control and format characters, lone accents."""
    return all(c.isspace() or unicodedata.category(c)[0] in "CMZ" for c in block)


def _is_text_or_number(gold: object) -> TypeGuard[str | int | float]:
    return isinstance(gold, (str, int, float)) and not isinstance(gold, bool)


def _gold_text(gold: str | int | float) -> str:
    if isinstance(gold, str):
        return gold
    # Through Decimal, because str() writes exponents and refuses long integers.
    return f"{Decimal(gold) if isinstance(gold, int) else Decimal(repr(gold)):f}"


# See RewardSet.check: the weights of rewards with a range may not outweigh one that decides.
math_format_reward.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]
math_correctness_reward.decides = True  # type: ignore[attr-defined]
# See RewardSet.check_data.
math_correctness_reward.check_row = math_gold_fault  # type: ignore[attr-defined]
