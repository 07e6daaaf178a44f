"""How responses are sampled, and how an engine goes about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchtune_grpo.config.schema import check_ranges, key, not_negative, one_of, positive, share

ENGINES = ("native", "torchtune")
MERGE_CHOICES = ("auto", "always", "never")
GRAPH_CHOICES = ("auto", "never")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The keys below ``rollout``: how the responses are generated, not what is sampled."""

    engine: str = one_of("Generation engine; see docs/rollout.md", "native", ENGINES)
    max_rows: int | None = positive(
        "Most responses worked on at once; null = as many as memory allows", None
    )
    merge_adapters: str = one_of(
        "Add adapters to a copy of the weights for a rollout; auto = where exact and memory allows",
        "auto",
        MERGE_CHOICES,
    )
    cuda_graphs: str = one_of(
        "Record decoding steps and replay them, which spares their launches; auto = on CUDA",
        "auto",
        GRAPH_CHOICES,
    )
    deadline: float | None = positive(
        "Seconds after which a rollout cuts its responses where they are; null = none", None
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The keys below ``sampling``: what is not sampled, and what ends a response."""

    top_k: int | None = positive("Sample among the k most likely tokens; null = all", None)
    top_p: float | None = share(
        "Sample within this probability mass; null = all", None, above_0=True
    )
    min_p: float | None = share(
        "Leave out tokens less likely than this share of the likeliest; null = none", None
    )
    repetition_penalty: float = positive(
        "Above 1: tokens of prompt and response so far become less likely (arXiv:1909.05858, 4.1)",
        1.0,
    )
    min_new_tokens: int = not_negative("No stop token and no stop string before so many tokens", 0)
    suppressed_tokens: tuple[int, ...] = key(
        "Token ids that are never sampled",
        (),
        valid=lambda ids: all(0 <= token for token in ids),
        hint="token ids are 0 or more",
    )
    stop_strings: tuple[str, ...] = key(
        "Texts that also end a response, with the token that completes one",
        (),
        valid=all,
        hint="an empty string stops nothing; remove it",
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingConfig):
    """How responses are sampled: what every engine understands.

    Attributes, besides those of :class:`SamplingConfig`:
        max_generated_tokens (int): longest response, its stop token included.
        temperature (float): 0 is greedy.

    Raises:
        ValueError: if a value is out of its range.
    """

    max_generated_tokens: int = positive("Longest response in tokens")
    temperature: float = not_negative("Sampling temperature; 0 is greedy", 1.0)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_new_tokens > self.max_generated_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens}: give 0 to max_generated_tokens="
                f"{self.max_generated_tokens}."
            )

    @property
    def greedy(self) -> SamplingParams:
        """The same without chance: always the likeliest token."""
        return replace(self, temperature=0.0, top_k=None, top_p=None, min_p=None)

    @property
    def filters(self) -> bool:
        """Whether some tokens may be left out by their probability."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters acts on the logits."""
        return (
            self.repetition_penalty != 1
            or self.min_new_tokens > 0
            or len(self.suppressed_tokens) > 0
        )
