"""Shaped rewards: small credits and penalties beside a reward that decides what is right.

Each declares its range, and a set of rewards refuses weights with which shaping could pay a wrong
answer as much as a right one. docs/rewards.md says why there is no credit for an answer that only
contains the gold.
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
from torchtune_grpo.rewards.reward import declares

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@declares(reward_range=(0.0, 1.0))
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


@declares(reward_range=(0.0, 1.0))
def math_number_reward(
    prompts: list[str], completions: list[str], **columns: list[Any]
) -> list[float]:
    """Credit, 1 or 0, for one answer block that states exactly one number, whichever."""
    blocks = [located_answers(text, strict=True) for text in completions]
    return [float(len(b) == 1 and stated_value(next(iter(b))) is not None) for b in blocks]


class OverlongPenalty:
    """DAPO's soft punishment of long responses (Yu et al. 2025, arXiv:2503.14476, equation 13).

    0 up to a length of ``max_length - cache`` tokens, then falling in a straight line to -1 at
    ``max_length``, usually ``${max_generated_tokens}``, and -1 beyond.
    """

    __name__ = "overlong_penalty"
    reward_range = (-1.0, 0.0)

    def __init__(self, *, max_length: int, cache: int) -> None:
        if not 0 < cache <= max_length:
            raise ValueError(
                f"cache is {cache} and max_length {max_length}; cache must be above 0 and at most "
                "max_length."
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

    The value is minus the share of n-grams that stood there before; ``ngram`` is their length.
    """

    __name__ = "repetition_penalty"
    reward_range = (-1.0, 0.0)

    def __init__(self, *, ngram: int = 4) -> None:
        if ngram < 1:
            raise ValueError(f"ngram is {ngram}; give 1 or more.")
        self._ngram = ngram

    def __call__(self, prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        """Returns N numbers from -1 to 0."""
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
    it as a bonus. ``correct`` and ``wrong`` are what answers of length 0 and of ``max_length``
    tokens, usually ``${max_generated_tokens}``, are worth.
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
            raise ValueError(f"max_length is {max_length}; give 1 or more tokens.")
        if max(wrong) >= min(correct):
            raise ValueError(
                f"wrong is {list(wrong)} and correct {list(correct)}; the largest value of a wrong "
                "answer must be below the smallest of a right one."
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
        scores = []
        for text, gold, tokens in zip(completions, answer, completion_ids, strict=True):
            first, last = self._correct if grade_math_answer(text, gold) else self._wrong
            progress = min(len(tokens) / self._max_length, 1.0)
            scores.append(last + (first - last) * (1 + math.cos(math.pi * progress)) / 2)
        return scores
