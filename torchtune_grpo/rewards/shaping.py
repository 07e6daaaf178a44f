"""Shaped rewards: small credits and penalties beside a reward that decides what is right.

Each declares its range, and a set of rewards refuses weights with which shaping could give a wrong
answer as much as a right one.
"""

from __future__ import annotations

from torchtune_grpo.rewards.math import located_value
from torchtune_grpo.rewards.reward import declares


@declares(reads="text", reward_range=(0.0, 1.0))
def math_number_reward(
    prompts: list[str], completions: list[str], **columns: object
) -> list[float]:
    """Score 1.0 for an answer block, or equal ones, with exactly one number, right or wrong."""
    return [float(located_value(text, strict=True) is not None) for text in completions]


class OverlongPenalty:
    """DAPO's soft punishment of long responses (Yu et al. 2025, arXiv:2503.14476, equation 13).

    The score is 0 up to ``max_length - cache`` tokens, falls linearly to -1 at ``max_length``
    (usually ``${max_generated_tokens}``) and is -1 beyond.
    """

    __name__ = "overlong_penalty"
    reads = "text"
    reward_range = (-1.0, 0.0)

    def __init__(self, *, max_length: int, cache: int) -> None:
        if not 0 < cache <= max_length:
            raise ValueError(f"cache={cache}: give a number from 1 to max_length={max_length}.")
        self._start, self._cache = max_length - cache, cache

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        completion_ids: list[list[int]],
        **columns: object,
    ) -> list[float]:
        """Return N numbers from -1 to 0."""
        over = [max(len(tokens) - self._start, 0) / self._cache for tokens in completion_ids]
        return [-min(share, 1.0) for share in over]
