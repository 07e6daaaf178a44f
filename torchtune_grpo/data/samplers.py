"""Samplers choose the next prompts: ``sampler`` in the config. Every rank holds the same one.

A step may ask several times for the prompts of all ranks, and gets the same ones each time.
``learn`` ends the step and reports how often each prompt was solved. So an interrupted step that is
repeated sees the same prompts, and the state covers the finished steps only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence, Sized
from statistics import fmean
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.data.dataset import Item, PromptBatch, PromptData, collate_prompts
from torchtune_grpo.data.mixing import MixedDataset

_SEEDS = 1_000_003  # distance between the generator seeds of successive run seeds
_WINDOW = 32  # groups of a data set in its pass rate


class ShuffledSampler:
    """Sampler that takes each pass over the data in a new seeded order.

    Passes follow each other without a gap: if a step's prompts do not divide the data set, no
    row is repeated or left out at the end of a pass. ``shuffle=False`` keeps the data's order, and
    data that are streamed are shuffled within blocks, so that rows are read a block ahead.
    """

    def __init__(self, dataset: Sized, *, seed: int, shuffle: bool = True) -> None:
        self._size, self._seed, self._shuffle = len(dataset), seed, shuffle
        self._block = getattr(dataset, "look_ahead", None) or self._size
        self._drawn = 0

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """Return the next ``count`` rows for all ranks, after ``skip`` that the step has had."""
        self._check_size(count)
        return self.pass_over(self._drawn + skip, count)

    def pass_over(self, start: int, count: int) -> list[int]:
        """Return ``count`` rows after the first ``start`` of all passes."""
        rows: list[int] = []
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
        order: list[int] = []
        for start in range(0, self._size, self._block):
            count = min(self._block, self._size - start)
            order += (start + torch.randperm(count, generator=generator)).tolist()
        return order

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        """End a step that asked for these rows.

        A pass rate is the share of right samples; None where the deciding reward did not apply.
        """
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
        """Return everything that is not given, for a checkpoint."""
        fixed = ("_size", "_seed", "_shuffle", "_block")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        vars(self).update(state)


class MixedSampler(ShuffledSampler):
    """Sampler of a ``MixedDataset``: passes over each of its data sets, which take turns by weight.

    The next prompt is always of the data set that is furthest behind its share, so that every step
    has the weights' shares, but for rounding that later steps make up for.
    """

    def __init__(self, dataset: MixedDataset, *, seed: int, shuffle: bool = True) -> None:
        super().__init__(dataset, seed=seed, shuffle=shuffle)
        parts = dataset.parts.values()
        self._passes = [ShuffledSampler(part, seed=seed, shuffle=shuffle) for part in parts]
        self._starts = dataset.starts
        total = sum(dataset.weights.values())
        self._shares = {name: weight / total for name, weight in dataset.weights.items()}
        self._counts = [0] * len(parts)  # prompts drawn from each
        self._pass_rates: list[list[float]] = [[] for _ in parts]  # of each one's last groups

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """As in ``ShuffledSampler``; within a step, a small data set may repeat its prompts."""
        self._check_size(count)
        counts, turns = [*self._counts], list[int]()
        for number in range(self._drawn + 1, self._drawn + skip + count + 1):
            behind = [s * number - n for s, n in zip(self._shares.values(), counts, strict=True)]
            turns.append(behind.index(max(behind)))
            counts[turns[-1]] += 1
        rows = [
            iter(part.pass_over(done, turns.count(number)))
            for number, (part, done) in enumerate(zip(self._passes, self._counts, strict=True))
        ]
        return [self._starts[turn] + next(rows[turn]) for turn in turns][skip:]

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        super().learn(rows, pass_rates)
        turns = [bisect_right(self._starts, row) - 1 for row in rows]
        self._counts = [n + turns.count(number) for number, n in enumerate(self._counts)]
        self._pass_rates = [*self._pass_rates]
        for turn, rate in zip(turns, pass_rates, strict=True):
            if rate is not None:
                self._pass_rates[turn] = [*self._pass_rates[turn], rate][-_WINDOW:]

    @property
    def metrics(self) -> dict[str, float]:
        """``sampler/pass_rate/NAME``: the mean over the last 32 groups of each data set."""
        named = zip(self._shares, self._pass_rates, strict=True)
        return {f"sampler/pass_rate/{name}": fmean(rates) for name, rates in named if rates}

    def state_dict(self) -> dict[str, Any]:
        names = ("_drawn", "_counts", "_pass_rates")
        return {name: getattr(self, name) for name in names}


class WeightedSampler(ShuffledSampler, ABC):
    """Base class that draws rows by weight; within a step, without replacement while rows last.

    Other samplers derive from it: they define ``weights`` and extend ``learn``.
    """

    @abstractmethod
    def weights(self) -> Tensor:
        """Return the weight of each row, [rows]; a row of weight 0 is never drawn."""

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """As in ``ShuffledSampler``. Source: Efraimidis and Spirakis 2006 (A-Res)."""
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
        dataset: Sequence[Item],
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
        number = {level: index for index, level in enumerate(sorted(set(levels)))}
        self._levels = torch.tensor([number[level] for level in levels])  # [rows]
        self._pass_rate, self._window = pass_rate, window
        self._newest, self._recent = 0, list[float]()

    def weights(self) -> Tensor:
        """Return 1 / rows of the level, up to the newest level."""
        share = 1 / self._levels.bincount()[self._levels]
        return share.where(self._levels <= self._newest, 0)

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        super().learn(rows, pass_rates)
        for row, rate in zip(rows, pass_rates, strict=True):
            if rate is not None and self._levels[row] == self._newest:
                self._recent.append(rate)
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


def make_sampler(node: DictConfig | None, dataset: PromptData, *, seed: int) -> Any:
    """Make the config's sampler; None shuffles, and mixes the data sets of a ``MixedDataset``."""
    if node is None:
        if isinstance(dataset, MixedDataset):
            return MixedSampler(dataset, seed=seed)
        return ShuffledSampler(dataset, seed=seed)
    return instantiate("sampler", node, dataset, seed=seed)


def prompts_of_rank(
    dataset: PromptData,
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
    step_indices = [len(before) + index for index in own or range(1)]
    batch = collate_prompts(
        [dataset[all_rows[index]] for index in step_indices],
        uses=[all_rows[:index].count(all_rows[index]) for index in step_indices],
        step_indices=step_indices,
    )
    return batch, len(own)
