"""Several weighted rewards, called together once per batch of completions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.rewards._reward import (
    Reward,
    bound_arguments,
    check_columns,
    check_reward,
)
from torchtune_grpo.rewards._reward_config import rewards_from_config


@dataclass(frozen=True)
class RewardScores:
    """What R rewards say about N completions.

    Args:
        names (list[str]): the R rewards' names.
        scores (Tensor): [N, R] float32, unweighted; nan where a reward does not apply.
        weights (Tensor): [R] float32.
        total (Tensor): [N] float32, the weighted sum over the rewards that apply; 0 if none does.
        seconds (list[float]): the time that each of the R rewards took for all N completions.
    """

    names: list[str]
    scores: Tensor
    weights: Tensor
    total: Tensor
    seconds: list[float]


class RewardSet:
    """R weighted rewards, checked before the first completion is scored.

    Args:
        rewards (Sequence[Reward]): at least one, each with a name of its own.

    Raises:
        ValueError: see :meth:`check`.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = list(rewards)
        self.check()

    @classmethod
    def from_config(cls, cfg: Sequence[Mapping[str, Any]] | None) -> RewardSet:
        """Builds the set that the config's list ``rewards`` describes.

        Args:
            cfg (Sequence[Mapping[str, Any]] | None): nodes with ``_component_``, the dotpath of a
                reward or of a class whose instances are rewards, and as wanted ``name`` (default:
                the component's), ``weight`` (default: 1.0), and keyword arguments of the component.

        Returns:
            The set, in the config's order.

        Raises:
            ValueError: naming the key, the value given and the remedy.
        """
        return cls(rewards_from_config(cfg))

    @property
    def names(self) -> list[str]:
        """The R rewards' names."""
        return [reward.name for reward in self.rewards]

    def check(self, columns: Iterable[str] | None = None) -> None:
        """Checks what can be known without a completion, and calls no reward.

        Args:
            columns (Iterable[str] | None): the data set's columns, if they are known already.

        Raises:
            ValueError: if there is no reward, two have the same name, a weight is not finite, a
                function cannot be called as rewards are, or a column that one needs is missing.
        """
        if not self.rewards:
            raise ValueError("rewards is empty; give at least one reward.")
        for name, count in Counter(self.names).items():
            if count > 1:
                places = [f"rewards[{i}].name" for i, n in enumerate(self.names) if n == name]
                raise ValueError(
                    f"{' and '.join(places)} are both {name!r}; give each reward a name of its own."
                )
        for index, reward in enumerate(self.rewards):
            check_reward(reward, f"rewards[{index}]")
        if columns is not None:
            given = list(columns)
            for reward in self.rewards:
                check_columns(reward, given)

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
    ) -> RewardScores:
        """Scores N completions.

        Args:
            prompts (Sequence[str]): N prompts, as rewards see them.
            completions (Sequence[str]): N texts, each prefill and completion.
            columns (Mapping[str, Sequence[Any]]): the data set's other columns, N values each.

        Returns:
            The scores; N may be 0.

        Raises:
            ValueError: if the lengths differ, a column is missing, or a reward returns anything but
                N finite numbers or Nones. Whatever a reward raises itself passes through.
        """
        for name, values in {"completions": completions, **columns}.items():
            if len(values) != len(prompts):
                raise ValueError(
                    f"There are {len(prompts)} prompts but {len(values)} values in {name!r}; give "
                    "one value per prompt."
                )
        self.check(columns)
        scores, seconds = [], []
        for reward in self.rewards:
            start = time.perf_counter()
            scores.append(_score(reward, prompts, completions, columns))
            seconds.append(time.perf_counter() - start)
        stacked = torch.stack(scores, dim=1)  # [N, R]
        weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float32)
        # In float64, so that the total does not depend on the order of the rewards.
        weighted = torch.nan_to_num(stacked.double(), nan=0.0) * weights.double()
        return RewardScores(self.names, stacked, weights, weighted.sum(dim=1).float(), seconds)


def _score(
    reward: Reward,
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> Tensor:
    """Calls one reward on N completions. Returns [N] float32, nan where it does not apply."""
    bound = bound_arguments(reward.function)
    # Lists of its own, so that a reward which changes them changes nothing for the next.
    own = {name: list(values) for name, values in columns.items() if name not in bound}
    returned: Any = reward.function(prompts=list(prompts), completions=list(completions), **own)
    if not isinstance(returned, (list, tuple)) and hasattr(returned, "tolist"):
        returned = returned.tolist()  # tensors and arrays
    if not isinstance(returned, (list, tuple)):
        raise ValueError(
            f"The reward {reward.name!r} returned {type(returned).__name__}; return a list with "
            "one number or None per completion."
        )
    if len(returned) != len(completions):
        raise ValueError(
            f"The reward {reward.name!r} returned {len(returned)} values for {len(completions)} "
            "completions; return one number or None per completion."
        )
    numbers = [_number(reward.name, index, value) for index, value in enumerate(returned)]
    return torch.tensor(numbers, dtype=torch.float32)


def _number(name: str, index: int, value: object) -> float:
    if value is None:
        return float("nan")
    if not isinstance(value, Real):
        raise ValueError(
            f"The reward {name!r} returned {value!r} at index {index}; return a number, or None "
            "where the reward does not apply."
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond all floats
        number = float("inf")
    if not abs(number) <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"The reward {name!r} returned {value} at index {index}; return a finite number (in "
            "float32), or None where the reward does not apply."
        )
    return number
