"""Two rewards for maths with one number as the answer: the format, and the answer's correctness.

The text to grade is ``<think> ... </think> <answer> ... </answer>``: the prefill, if there is one,
and the completion. Grading takes linear time, executes nothing, raises nothing and works in any
thread.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from typing import TypeGuard

from torchtune_grpo.config.text import shortened
from torchtune_grpo.rewards.math.value import stated_value

_THINK, _END_THINK, _END_ANSWER = "<think>", "</think>", "</answer>"
_BLOCK = re.compile("<answer>(.*?)</answer>", re.DOTALL)
_FORM = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>", re.DOTALL)

_GSM8K_MARK = "#### "

# How many answer blocks of one text, none like another, are read; more are not correct.
MAX_SPELLINGS = 1000


def math_format_holds(text: str) -> bool:
    """Whether prefill and completion have the form that the prompt asks for.

    The text, stripped, is one think block, only white space (or nothing), and one answer block;
    each of the four tags stands once, and neither block is blank.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    form = _FORM.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in tags) else None
    return form is not None and not any(map(_is_blank, form.groups()))


def grade_math_answer(text: str, gold: str | int | float) -> bool:
    """Whether the answer in a text states exactly one number, and it is the gold.

    The answer is the content of the complete ``<answer>`` block behind the last ``</think>``
    (anywhere, if there is no think tag at all). Several blocks must all state the same value.
    Numbers are compared as rationals, of any length.

    Args:
        text (str): prefill and completion.
        gold (str | int | float): the right number, written in any way that an answer may be. With
            a gold that states no number nothing is correct.
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
    """Rewards the form of an answer, whatever it says: N numbers, 1.0 where it holds, else 0.0."""
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
        ValueError: if the golds are not N, or one is neither text nor a number.
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
    tail = text.rpartition(_END_THINK)[2]
    # Up to the last closing tag each opening one has its own, so that no search is in vain.
    closed = tail[: tail.rfind(_END_ANSWER) + len(_END_ANSWER)]
    blocks = list(_BLOCK.finditer(closed))
    if blocks and _THINK in tail[: blocks[0].start()]:
        return set()
    return {block[1].strip(" \n") for block in blocks}


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
