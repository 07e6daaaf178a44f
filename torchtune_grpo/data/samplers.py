"""Samplers choose the next prompts: ``sampler`` in the config. Every rank holds the same one.

A step may ask several times for the prompts of all ranks, and gets the same ones each time.
``learn`` ends the step and reports how often each prompt was solved. So an interrupted step that is
repeated sees the same prompts, and the state covers the finished steps only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.data.dataset import PromptBatch, collate_prompts

_SEEDS = 1_000_003  # distance between the generator seeds of successive run seeds


class ShuffledSampler:
    """Sampler that takes each pass over the data in a new seeded order.

    Passes follow each other without a gap: if a step's prompts do not divide the data set, no
    row is repeated or left out at the end of a pass. ``shuffle=False`` keeps the data's order.
    """

    def __init__(self, dataset: Sequence[Any], *, seed: int, shuffle: bool = True) -> None:
        self._size, self._seed, self._shuffle = len(dataset), seed, shuffle
        self._drawn = 0

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """Return the next ``count`` rows for all ranks, after ``skip`` that the step has had."""
        self._check_size(count)
        start, rows = self._drawn + skip, list[int]()
        while len(rows) < count:
            number, offset = divmod(start + len(rows), self._size)
            rows += self._order(number)[offset : offset + count - len(rows)]
        return rows

    def _check_size(self, count: int) -> None:
        if self._size < count:
            raise ValueError(
                f"batch_size * ranks = {count} prompts a step, but dataset has only {self._size}; "
                "lower batch_size, or give more prompts."
            )

    def _order(self, number: int) -> list[int]:
        if not self._shuffle:
            return [*range(self._size)]
        generator = torch.Generator().manual_seed(self._seed * _SEEDS + number)
        return torch.randperm(self._size, generator=generator).tolist()

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float]) -> None:
        """End a step that asked for these rows; a pass rate is the share of right samples."""
        self._drawn += len(rows)

    @property
    def epoch(self) -> float:
        """Number of finished passes over the data."""
        return self._drawn / self._size

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that each step logs."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the size, the seed and the shuffling, for a checkpoint."""
        fixed = ("_size", "_seed", "_shuffle")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        vars(self).update(state)


class WeightedSampler(ShuffledSampler, ABC):
    """Base class that draws rows by weight; within a step, without replacement while rows last.

    Other samplers derive from it: they define :meth:`weights` and extend :meth:`learn`.
    """

    @abstractmethod
    def weights(self) -> Tensor:
        """Return the weight of each row, [rows]; a row of weight 0 is never drawn."""

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """As in :class:`ShuffledSampler`. Source: Efraimidis and Spirakis 2006 (A-Res)."""
        self._check_size(count)
        generator = torch.Generator().manual_seed(self._seed * _SEEDS + self._drawn)
        weights = self.weights().double()
        race = torch.empty_like(weights).exponential_(generator=generator) / weights
        order: list[int] = race.argsort()[: int((weights > 0).sum())].tolist()
        return [order[number % len(order)] for number in range(skip, skip + count)]


class LevelSampler(WeightedSampler):
    """Curriculum that adds the next level of ``column`` when the newest is solved often enough.

    That is when the last ``window`` groups of the newest level have a mean pass rate of at least
    ``pass_rate``. Lower levels come first; all levels so far are equally likely.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        seed: int,
        column: str = "level",
        pass_rate: float = 0.8,
        window: int = 32,
    ) -> None:
        super().__init__(dataset, seed=seed)
        columns = [row["columns"] for row in dataset]
        if column not in columns[0]:
            raise ValueError(f"column={column}: dataset has {', '.join(sorted(columns[0]))}.")
        if not 0 < pass_rate <= 1 or window < 1:
            raise ValueError(f"pass_rate={pass_rate}, window={window}: give (0, 1], and 1 or more.")
        levels = [each[column] for each in columns]
        number = {level: place for place, level in enumerate(sorted(set(levels)))}
        self._levels = torch.tensor([number[level] for level in levels])  # [rows]
        self._pass_rate, self._window = pass_rate, window
        self._newest, self._recent = 0, list[float]()

    def weights(self) -> Tensor:
        """Return 1 / rows of the level, up to the newest level."""
        share = 1 / self._levels.bincount()[self._levels]
        return share.where(self._levels <= self._newest, 0)

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float]) -> None:
        super().learn(rows, pass_rates)
        rates = zip(rows, pass_rates, strict=True)
        self._recent += [rate for row, rate in rates if self._levels[row] == self._newest]
        self._recent = self._recent[-self._window :]
        is_solved = len(self._recent) == self._window and self._mean >= self._pass_rate
        if is_solved and self._newest < int(self._levels.max()):
            self._newest, self._recent = self._newest + 1, []

    @property
    def _mean(self) -> float:
        return sum(self._recent) / max(len(self._recent), 1)

    @property
    def metrics(self) -> dict[str, float]:
        """``sampler/level``, counted from 0, and ``sampler/level_pass_rate`` of the newest."""
        return {"sampler/level": float(self._newest), "sampler/level_pass_rate": self._mean}


def make_sampler(node: DictConfig | None, dataset: Sequence[Any], *, seed: int) -> Any:
    """Make the config's sampler; None shuffles."""
    if node is None:
        return ShuffledSampler(dataset, seed=seed)
    return instantiate("sampler", node, dataset, seed=seed)


def prompts_of_rank(
    dataset: Sequence[Any],
    rows: Sequence[int],
    *,
    rank: int,
    world_size: int,
    before: Sequence[int] = (),
) -> tuple[PromptBatch, int]:
    """Return one rank's share of a round's ``rows``, and its size.

    ``before`` are the rows of the step's earlier rounds. A rank whose share is empty gets the first
    prompt, whose responses are dropped: a sharded model needs every rank.
    """
    all_rows = [*before, *rows]
    own = range(rank * len(rows) // world_size, (rank + 1) * len(rows) // world_size)
    places = [len(before) + place for place in own or range(1)]
    batch = collate_prompts(
        [dataset[all_rows[place]] for place in places],
        uses=[all_rows[:place].count(all_rows[place]) for place in places],
        places=places,
    )
    return batch, len(own)
