"""The scorers of reasoning-gym as a reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from torchtune_grpo.rewards.math import located_answers
from torchtune_grpo.rewards.workers import FunctionWorker, WorkerPool


class ReasoningGymReward:
    """Rewards an answer that its task of reasoning-gym scores 1; ``partial`` gives its own scores.

    It is located as a math answer is, or else is all behind the thinking; a full stop is left off
    unless the gold has one. Some scorers evaluate it as Python: all run in processes of their own.
    Where one raises or takes longer than ``timeout`` seconds, the score is 0.
    """

    __name__ = "reasoning_gym_reward"

    def __init__(self, *, partial: bool = False, timeout: float = 5.0, workers: int = 2) -> None:
        if timeout <= 0 or workers < 1:
            raise ValueError(f"timeout is {timeout} and workers {workers}; give more than 0")
        path = "torchtune_grpo.rewards.reasoning_gym.scorer"
        made = [FunctionWorker(path, makes=True, timeout=timeout) for _ in range(workers)]
        self._pool = WorkerPool(made)
        self._partial, self.close = partial, self._pool.close
        self.decides = not partial  # in part, wrong answers may score nearly 1

    def __call__(
        self, prompts: list[str], completions: list[str], *, entry: list[Any], **columns: Any
    ) -> list[float]:
        scores = self._pool.map(_score, [*zip(completions, entry, strict=True)])
        return scores if self._partial else [float(score >= 1) for score in scores]


def _score(worker: FunctionWorker, row: tuple[str, dict[str, Any]]) -> float:
    text, entry = row
    given, *others = located_answers(text) or [text.rpartition("</think>")[2].strip()]
    if not str(entry["answer"]).endswith("."):
        given = given.removesuffix(".")
    try:
        return 0.0 if others else float(worker(answer=given, entry=entry))
    except (RuntimeError, TimeoutError):
        return 0.0


def scorer() -> Callable[..., float]:
    """Make the function that a worker calls; the import is not part of a call's time."""
    from reasoning_gym import create_dataset

    made = cache(lambda task, settings: create_dataset(task, **json.loads(settings)))
    return lambda answer, entry: made(entry["task"], entry["settings"]).score_answer(answer, entry)
