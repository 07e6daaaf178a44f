"""The scorers of reasoning-gym as a reward."""

from __future__ import annotations

from typing import Any

from torchtune_grpo.rewards.math import located_answers
from torchtune_grpo.rewards.workers import FunctionWorker, function_pool


class ReasoningGymReward:
    """Rewards an answer that its task of reasoning-gym scores 1; ``partial`` gives its own scores.

    It is located as a math answer is, or else is all behind the thinking; a full stop is left off
    unless the gold has one. Some scorers evaluate it as Python: all run in processes of their own.
    Where one raises or takes longer than ``timeout`` seconds, the score is 0.
    """

    __name__ = "reasoning_gym_reward"

    def __init__(self, *, partial: bool = False, timeout: float = 5.0, workers: int = 2) -> None:
        path = "torchtune_grpo.sandbox.worker.task_scorer"
        self._pool = function_pool(path, timeout=timeout, workers=workers)
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
