"""What the rules of ``findings.py`` read: a run's config, and the newest lines of its metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from torchtune_grpo.config.keys import GRPOConfig

MOST_STEPS = 100  # that a rule looks back
FIRST_STEPS = 3  # whose mean is what a metric began with; one alone is noisy
STEPS_OF_EVALUATION = 3  # fewer steps between two evaluations have no spread to judge a rise by
_MARGIN = 0.05  # of an evaluation without an interval: that of some 400 prompts


@dataclass(frozen=True)
class Settings:
    """What the rules know of a run's config."""

    keys: Mapping[str, Any]  # by dotted key, such as ``optimizer.lr`` or ``rewards.0.timeout``
    rewards: Sequence[Mapping[str, Any]]  # the list ``rewards``, with all names and weights

    @classmethod
    def from_config(cls, cfg: GRPOConfig) -> Settings:
        """Those of a run."""
        plain: Any = OmegaConf.to_container(OmegaConf.create(cfg.model_dump()), resolve=True)
        nodes = plain.pop("rewards")
        named = [{"name": n["_component_"].rpartition(".")[2], "weight": 1.0} | n for n in nodes]
        plain |= {f"rewards.{index}": node for index, node in enumerate(named)}
        keys: dict[str, Any] = {}
        for name, value in plain.items():
            is_node = isinstance(value, dict)
            keys |= {f"{name}.{k}": v for k, v in value.items()} if is_node else {name: value}
        return cls(keys, named)

    @property
    def decider(self) -> str:
        """Name of the reward that is the accuracy."""
        return str(self.keys["evaluation.reward"] or self.rewards[0]["name"])

    def change(self, key: str, new: Any) -> tuple[str, str]:
        """The key, and the sentence that gives it a value."""
        old = f"{_text(self.keys[key])} -> " if key in self.keys else ""
        return key, f"Set {key}: {old}{_text(new)}."

    def scale(self, key: str, factor: float) -> tuple[str, str]:
        """The key, and the sentence that multiplies its value."""
        old = self.keys.get(key)
        if not isinstance(old, (int, float)):
            return key, f"Multiply {key} by {factor:g}."
        return self.change(key, type(old)(old * factor))


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class Evaluation(NamedTuple):
    """An evaluation, and the steps since the one before."""

    accuracy: float  # held out, greedy
    margin: float  # half of its 95% interval
    reward: float  # the steps' mean
    error: float  # that mean's standard error
    spread: float  # mean of the steps' reward_std
    level: float  # mean of the deciding reward


class Run:
    """The newest lines of a run's metrics; what is null or not finite in them is NaN."""

    def __init__(self, settings: Settings) -> None:
        self.decider = f"rewards/{settings.decider}/mean"
        self.steps: deque[dict[str, float]] = deque(maxlen=MOST_STEPS)
        self.evaluations: deque[Evaluation] = deque(maxlen=4)
        self._first: dict[str, list[float]] = {}
        self._since: list[list[float]] = []  # the last evaluation

    def add(self, record: Mapping[str, Any]) -> bool:
        """Reads a line. Returns whether it is an evaluation's."""
        values = {name: _number(value) for name, value in record.items()}
        if any(name.startswith("eval/") for name in values):
            if not self.evaluations or len(self._since) >= STEPS_OF_EVALUATION:
                self.evaluations.append(self._evaluation(values))
                self._since = []
            return True
        self.steps.append(values)
        for name, value in values.items():
            first = self._first.setdefault(name, [])
            if len(first) < FIRST_STEPS and not math.isnan(value):
                first.append(value)
        self._since.append([self.now(name) for name in ("reward", "reward_std", self.decider)])
        return False

    def _evaluation(self, values: Mapping[str, float]) -> Evaluation:
        rewards, stds, levels = zip(*self._since, strict=True) if self._since else ((), (), ())
        accuracy, low, high = (
            values.get(f"eval/accuracy{end}", math.nan) for end in ("", "/low", "/high")
        )
        margin = _MARGIN if math.isnan(high - low) else (high - low) / 2
        return Evaluation(accuracy, margin, *mean(rewards), mean(stds)[0], mean(levels)[0])

    def now(self, name: str) -> float:
        """A metric of the newest step."""
        return self.steps[-1].get(name, math.nan)

    def last(self, name: str, count: int) -> list[float]:
        """A metric of the newest ``count`` steps, without those that lack it."""
        values = [step.get(name, math.nan) for step in [*self.steps][-count:]]
        return [value for value in values if not math.isnan(value)]

    def first(self, name: str) -> float:
        """A metric's mean in the first steps that have it."""
        return mean(self._first.get(name, []))[0]

    @property
    def level(self) -> float:
        """The deciding reward's mean in the newest step."""
        return self.now(self.decider)


def _number(value: Any) -> float:
    # Squares of what is kept are finite.
    is_kept = isinstance(value, (int, float)) and abs(value) < 1e100
    return float(value) if is_kept else math.nan


def mean(values: Sequence[float]) -> tuple[float, float]:
    """Their mean and its standard error; NaN of too few.

    The error is that of the noise from one value to the next, whatever their trend (von Neumann).
    """
    count = len(values)
    squares = sum((b - a) * (b - a) for a, b in pairwise(values))
    error = math.sqrt(squares / (count - 1) / 2 / count) if count > 1 else math.nan
    return sum(values) / count if count else math.nan, error


def rise(values: Sequence[float]) -> tuple[float, float]:
    """From the mean of their first half to that of the second, and its standard error."""
    half = len(values) // 2
    (before, error), (after, other) = mean(values[:half]), mean(values[half:])
    return after - before, math.hypot(error, other)
