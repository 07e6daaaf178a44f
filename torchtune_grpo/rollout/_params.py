"""How responses are sampled: what every engine understands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
        max_generated_tokens (int): longest response, its stop token included.
        temperature (float): 0 is greedy.
        top_k (int | None): sample among the k most likely tokens only.
        top_p (float | None): sample within the nucleus of this mass only.
        min_p (float | None): leave out tokens less likely than this share of the likeliest one.
        repetition_penalty (float): above 1 makes every token of the prompt and of the response so
            far less likely (Keskar et al. 2019, arXiv:1909.05858, section 4.1); 1 is off.
        min_new_tokens (int): no stop token and no stop string before so many tokens.
        suppressed_tokens (Sequence[int]): never sampled.
        stop_strings (Sequence[str]): a response also ends with the token that completes one.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_generated_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    suppressed_tokens: Sequence[int] = ()
    stop_strings: Sequence[str] = ()

    def __post_init__(self) -> None:
        checks = {
            "max_generated_tokens": (self.max_generated_tokens >= 1, "give at least 1"),
            "temperature": (self.temperature >= 0, "give 0 (greedy) or more"),
            "top_k": (self.top_k is None or self.top_k >= 1, "give at least 1, or None"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "give a number in (0, 1]"),
            "min_p": (self.min_p is None or 0 <= self.min_p <= 1, "give a number in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0, "give a number above 0"),
            "min_new_tokens": (
                0 <= self.min_new_tokens <= self.max_generated_tokens,
                f"give 0 to max_generated_tokens={self.max_generated_tokens}",
            ),
            "stop_strings": (all(self.stop_strings), "an empty string stops nothing; remove it"),
        }
        for name, (holds, remedy) in checks.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)}: {remedy}.")

    @property
    def changes_distribution(self) -> bool:
        """Whether tokens are drawn from another distribution than softmax(logits / temperature)."""
        filters = (self.top_k, self.top_p, self.min_p)
        return self.changes_logits or any(value is not None for value in filters)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        return (
            self.repetition_penalty != 1
            or self.min_new_tokens > 0
            or len(self.suppressed_tokens) > 0
        )


@dataclass(frozen=True)
class Progress:
    """How far a rollout is.

    Attributes:
        tokens (int): sampled so far.
        finished (int): rows that ended.
        live (int): rows that are worked on now.
        rows (int): all rows.
    """

    tokens: int
    finished: int
    live: int
    rows: int

    def __str__(self) -> str:
        return f"{self.finished}/{self.rows} responses, {self.tokens} tokens"
