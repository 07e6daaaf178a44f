"""What an engine is asked for, and what it tells meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from tqdm import tqdm

from torchtune_grpo.rollout._params import SamplingParams
from torchtune_grpo.trajectory import Samples

Decode = Callable[[Sequence[int]], str]


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
        return f"{self.finished}/{self.rows}, {tqdm.format_sizeof(self.tokens)} tokens"


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """A group of responses for each prompt: N = B*G rows, prompt-major.

    Attributes:
        prompts (Sequence[Sequence[int]]): B prompts, none of them empty.
        group_size (int): G.
        params (SamplingParams): how to sample.
        stop_tokens (Sequence[int]): a response ends with the first of these.
        keys (Tensor): [N] int64 of the noise, see :func:`row_keys`. A response depends on its
            prompt, its key and the policy, and on nothing else.
        decode (Decode | None): token ids to text; needed for ``params.stop_strings``.
        report (Callable[[Progress], None] | None): told of the progress now and then.

    Raises:
        ValueError: if there are stop strings, but no ``decode`` to find them with.
    """

    prompts: Sequence[Sequence[int]]
    group_size: int
    params: SamplingParams
    stop_tokens: Sequence[int]
    keys: Tensor
    decode: Decode | None = None
    report: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        strings = list(self.params.stop_strings)
        if strings and self.decode is None:
            raise ValueError(f"stop_strings={strings}: give `decode` to find them.")

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.prompts) * self.group_size


class RolloutEngine(Protocol):
    """Samples a group of responses for each prompt."""

    def generate(self, request: RolloutRequest) -> Samples:
        """Samples all rows of a request with the policy's current weights."""
        ...


def end_of_rollout(deadline: float | None) -> float:
    """When, by ``time.monotonic``, a rollout that begins now cuts its rows where they are."""
    return math.inf if deadline is None else time.monotonic() + deadline
