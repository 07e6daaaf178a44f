"""What a reward gets and what it may return. No torch here: reward processes import this module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

# What every reward gets besides the columns, under TRL's names. The last four come from a recipe.
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")

# What the run itself logs of a reward ends in these.
MEASURED = ("mean", "std", "errors", "none")

LARGEST = 3.4028234663852886e38  # of float32

# A number; None where the reward does not apply; an exception where it failed.
Score = float | None | BaseException


class ContractError(ValueError):
    """A reward returned what no reward may return."""


def message(role: str, text: str) -> dict[str, Any]:
    """A message as chat formats and rewards of ``format: chat`` get it."""
    return {"role": role, "content": text}


class Prompt(str):
    """A prompt as rewards of texts see it: its last message. It knows all, the system's too."""

    messages: list[dict[str, Any]]

    def __new__(cls, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.messages = [*map(dict, messages)]
        return prompt


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, under the names of transformers' ``TrainerState``."""

    global_step: int  # finished optimizer steps
    max_steps: int  # of the whole run
    epoch: float = 0.0  # passes over the data set that these steps have made


class RewardNotes:
    """What a reward reports through TRL's ``log_extra`` and ``log_metric`` in one call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.extra: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keeps one value per completion, whatever it is."""
        column, values = str(column), list(values)
        if len(values) != self.count:
            raise ContractError(
                f"log_extra({column!r}, ...) got {len(values)} values for {self.count} "
                "completions; give one per completion."
            )
        self.extra[column] = values

    def log_metric(self, name: str, value: float) -> None:
        """Keeps a number."""
        name = str(name)
        if name.rpartition("/")[2] in MEASURED:
            raise ContractError(
                f"log_metric({name!r}, ...): the run itself logs .../{', .../'.join(MEASURED)}; "
                "give another name."
            )
        self.metrics.append((name, float(value)))

    def functions(self) -> dict[str, Callable[..., None]]:
        """The two functions, as keyword arguments."""
        return {"log_extra": self.log_extra, "log_metric": self.log_metric}


def check_returned(returned: Any, *, name: str, count: int) -> list[Score]:
    """The ``count`` scores that a reward returned in a list, a tuple, a tensor or an array.

    A number that is not finite in float32 is a failure: the reward has computed it, but it is no
    value to learn from.

    Raises:
        ContractError: if it is no list, has another length, or holds something else.
    """
    if not isinstance(returned, (list, tuple)) and hasattr(returned, "tolist"):
        returned = returned.tolist()  # tensors and arrays
    if not isinstance(returned, (list, tuple)):
        raise ContractError(
            f"The reward {name!r} returned {type(returned).__name__}; return a list with "
            "one number or None per completion."
        )
    if len(returned) != count:
        raise ContractError(
            f"The reward {name!r} returned {len(returned)} values for {count} completions; "
            "return one number or None per completion."
        )
    return [_score(name, index, value) for index, value in enumerate(returned)]


def _score(name: str, index: int, value: Any) -> Score:
    if value is None or isinstance(value, BaseException):
        return value
    if not isinstance(value, Real):
        raise ContractError(
            f"The reward {name!r} returned {value!r} at index {index}; return a number, or None "
            "where the reward does not apply."
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not abs(number) <= LARGEST:
        return ValueError(f"returned {number}; return a finite number (in float32), or None")
    return number
