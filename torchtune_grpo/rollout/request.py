"""What an engine is asked for, and what it tells meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from tqdm import tqdm

from torchtune_grpo.config.keys import SamplingParams
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


class Admission(Protocol):
    """Lets a rollout's prompts begin in their order, the last ones if earlier groups ask for it."""

    def allowed(self) -> int:
        """How many may begin; it never shrinks, and may grow whenever a group has ended."""
        ...

    def is_final(self) -> bool:
        """Whether no more will; each one that may begin has ended then."""
        ...

    def ended(self, prompt: int, samples: Samples) -> None:
        """Is told of each group when all its rows have ended, by its place in the request."""
        ...

    def wait(self) -> None:
        """Waits a little for what other groups ask for."""
        ...


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
        admission (Admission | None): which prompts begin; those that do not are not in the samples.
            None = all.

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
    admission: Admission | None = None

    def __post_init__(self) -> None:
        strings = list(self.params.stop_strings)
        if strings and self.decode is None:
            raise ValueError(f"stop_strings={strings}: give `decode` to find them.")

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.prompts) * self.group_size

    @property
    def allowed_rows(self) -> int:
        """Rows that may begin now, all of them if nobody decides that."""
        allowed = len(self.prompts) if self.admission is None else self.admission.allowed()
        return allowed * self.group_size


class RolloutEngine(Protocol):
    """Samples a group of responses for each prompt."""

    def generate(self, request: RolloutRequest) -> Samples:
        """Samples all rows of a request with the policy's current weights."""
        ...


def end_of_rollout(deadline: float | None) -> float:
    """When, by ``time.monotonic``, a rollout that begins now cuts its rows where they are."""
    return math.inf if deadline is None else time.monotonic() + deadline
