"""Shaped rewards: small credits and penalties beside a reward that decides what is right.

Each states its range. A set of rewards refuses weights with which shaping could pay a wrong answer
as much as a right one (see ``RewardSet.check``). There is no credit for an answer that contains the
gold somewhere: what earns it best is a list of all numbers. docs/rewards.md tells more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from torchtune_grpo.rewards.math import (
    grade_math_answer,
    located_answers,
    math_gold_fault,
    stated_value,
)

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def math_tag_reward(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Partial credit for the format: a quarter for each of the four tags.

    A tag counts if it stands exactly once. If those that do are in the wrong order, none counts.
    """
    scores = []
    for text in completions:
        found = [text.index(tag) for tag in _TAGS if text.count(tag) == 1]
        scores.append(len(found) / len(_TAGS) if found == sorted(found) else 0.0)
    return scores


def math_number_reward(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Credit, 1 or 0, for one answer block that states exactly one number, whichever."""
    blocks = [located_answers(text) for text in completions]
    return [float(len(b) == 1 and stated_value(next(iter(b))) is not None) for b in blocks]


class OverlongPenalty:
    """DAPO's soft punishment of long responses (Yu et al. 2025, arXiv:2503.14476, equation 13).

    With y a response's length in tokens: 0 up to ``max_length - cache``, then falling in a straight
    line to -1 at ``max_length``, and -1 beyond.

    Args:
        max_length (int): tokens; usually ``${max_generated_tokens}``.
        cache (int): how long before that the punishment begins.

    Raises:
        ValueError: unless 0 < cache <= max_length.
    """

    __name__ = "overlong_penalty"
    reward_range = (-1.0, 0.0)

    def __init__(self, *, max_length: int, cache: int) -> None:
        if not 0 < cache <= max_length:
            raise ValueError(
                f"rewards: cache is {cache} and max_length {max_length}; cache must be above 0 and "
                "at most max_length."
            )
        self._start, self._cache = max_length - cache, cache

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float]:
        """Returns N numbers from -1 to 0."""
        over = [max(len(tokens) - self._start, 0) / self._cache for tokens in completion_ids]
        return [-min(share, 1.0) for share in over]


class RepetitionPenalty:
    """Punishes n-grams of words that come again (Yeo et al. 2025, arXiv:2502.03373, section 3.4).

    Raises:
        ValueError: if ``ngram``, the number of words, is not positive.
    """

    __name__ = "repetition_penalty"
    reward_range = (-1.0, 0.0)

    def __init__(self, *, ngram: int = 4) -> None:
        if ngram < 1:
            raise ValueError(f"rewards: ngram is {ngram}; give 1 or more.")
        self._ngram = ngram

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """Returns N numbers from -1 to 0: minus the share of n-grams that stood there before."""
        texts = [_numbered(text.lower().split(), self._ngram) for text in completions]
        return [len(set(grams)) / len(grams) - 1 if grams else 0.0 for grams in texts]


def _numbered(words: Sequence[Hashable], length: int) -> Sequence[Hashable]:
    """The n-grams in order, equal ones with equal numbers: each is two that overlap, half as long.

    In this way long n-grams take hardly more time than short ones.
    """
    if length == 1:
        return words
    half = (length + 1) // 2
    parts = _numbered(words, half)
    numbers: dict[tuple[Hashable, Hashable], int] = {}
    pairs = zip(parts, parts[length - half :])
    return [numbers.setdefault(pair, len(numbers)) for pair in pairs]


class CosineLengthReward:
    """Correctness that falls with length along half a cosine (Yeo et al. 2025, arXiv:2502.03373).

    A right answer is worth most when it is short. A wrong one is worth least when it is short, so
    that a model that cannot solve a problem yet may think longer.

    It decides by itself what is right, so use it in place of ``math_correctness_reward``, or beside
    it as a bonus.

    Args:
        max_length (int): tokens at which the cosine ends; usually ``${max_generated_tokens}``.
        correct (list[float] | tuple[float, float]): what a right answer of length 0 and of
            ``max_length`` is worth.
        wrong (list[float] | tuple[float, float]): the same for a wrong answer.

    Raises:
        ValueError: if max_length is not positive, or a wrong answer could be worth as much as a
            right one.
    """

    __name__ = "cosine_length_reward"
    decides = True
    check_row = staticmethod(math_gold_fault)

    def __init__(
        self,
        *,
        max_length: int,
        correct: list[float] | tuple[float, float] = (1.0, 0.5),
        wrong: list[float] | tuple[float, float] = (-1.0, -0.5),
    ) -> None:
        if max_length < 1:
            raise ValueError(f"rewards: max_length is {max_length}; give 1 or more tokens.")
        if max(wrong) >= min(correct):
            raise ValueError(
                f"rewards: wrong is {list(wrong)} and correct {list(correct)}; the largest value "
                "of a wrong answer must be below the smallest of a right one."
            )
        self._max_length = max_length
        self._correct, self._wrong = tuple(correct), tuple(wrong)
        self.reward_gap = min(correct) - max(wrong)

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        answer: list[str | int | float],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float]:
        """Returns N numbers within ``correct`` or ``wrong``."""
        rows = zip(completions, answer, completion_ids, strict=True)
        return [
            self._value(len(tokens), grade_math_answer(text, gold)) for text, gold, tokens in rows
        ]

    def _value(self, length: int, right: bool) -> float:
        first, last = self._correct if right else self._wrong
        progress = min(length / self._max_length, 1.0)
        return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


math_tag_reward.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]
math_number_reward.reward_range = (0.0, 1.0)  # type: ignore[attr-defined]
