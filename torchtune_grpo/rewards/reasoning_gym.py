"""The scorers of reasoning-gym as a reward."""

from __future__ import annotations

from torchtune_grpo.rewards.foreign import task_scorer
from torchtune_grpo.rewards.math import located_answers
from torchtune_grpo.rewards.workers import FunctionWorker, function_pool


class ReasoningGymReward:
    """Reward for an answer that its reasoning-gym task scores 1; ``partial``: the task's own score.

    The answer is located as in math, or else is all of the text after the thinking; a final full
    stop is dropped unless the gold has one. Some scorers evaluate the answer as Python, so all run
    in worker processes. If one raises or takes more than ``timeout`` seconds, the score is 0.
    """

    __name__ = "reasoning_gym_reward"
    reads = "text"
    isolates = True  # in processes of its own

    def __init__(self, *, partial: bool = False, timeout: float = 5.0, workers: int = 2) -> None:
        self._pool = function_pool(task_scorer, timeout=timeout, workers=workers)
        self._partial, self.close = partial, self._pool.close
        self.decides = not partial  # partial scores of wrong answers may be nearly 1

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        *,
        entry: list[dict[str, object]],
        **columns: object,
    ) -> list[float | Exception]:
        scores = self._pool.map(_score, [*zip(completions, entry, strict=True)])
        if self._partial:
            return scores
        return [s if isinstance(s, Exception) else float(s >= 1) for s in scores]


def _score(worker: FunctionWorker, row: tuple[str, dict[str, object]]) -> float | Exception:
    text, entry = row
    gold = str(entry["answer"])
    found = located_answers(text, one_line="\n" not in gold)
    given, *others = found or [text.rpartition("</think>")[2].strip()]
    if not gold.endswith("."):
        given = given.removesuffix(".")
    try:
        return 0.0 if others else float(worker(answer=given, entry=entry))
    except (RuntimeError, TimeoutError):
        return 0.0
