"""Samplers choose the next prompts: ``sampler`` in the config. Every rank holds the same one.

A step may ask several times for the prompts of all ranks, and gets the same ones each time.
``learn`` ends the step and reports how often each prompt was solved. So an interrupted step that is
repeated sees the same prompts, and the state covers the finished steps only.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import islice
from statistics import fmean
from typing import Any, Protocol

import torch
from omegaconf import DictConfig

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.data.dataset import PromptBatch, PromptData, collate_prompts
from torchtune_grpo.data.mixing import MixedDataset

_SEEDS = 1_000_003  # distance between the generator seeds of successive run seeds
_WINDOW = 32  # groups of a data set in its pass rate


class Sampler(Protocol):
    """What a run asks of a sampler; one of your own may derive from ``ShuffledSampler``."""

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """Return the next ``count`` rows for all ranks, after ``skip`` that the step has had."""

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        """End a step that asked for these rows.

        A pass rate is the share of right samples; None where the deciding reward did not apply.
        """

    @property
    def epoch(self) -> float:
        """Number of finished passes over the data."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics that each step logs."""

    def state_dict(self) -> dict[str, object]:
        """Return everything that is not given, for a checkpoint."""

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a checkpoint."""


class ShuffledSampler:
    """Sampler that takes each pass over the data in a new seeded order.

    Passes follow each other without a gap: if a step's prompts do not divide the data set, no
    row is repeated or left out at the end of a pass. ``shuffle=False`` keeps the data's order.

    ``rest``: a prompt that all of its samples solved, or none, sits out this many passes.
    """

    def __init__(self, dataset: Sized, *, seed: int, shuffle: bool = True, rest: int = 0) -> None:
        if rest < 0:
            raise ValueError(f"rest={rest}: give 0 or more passes.")
        self._size, self._seed, self._shuffle, self._rest = len(dataset), seed, shuffle, rest
        self._drawn = 0  # rows of all passes so far, with those that sat out
        self._back: dict[int, int] = {}  # of a row that rests: the next pass that has it

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        self._check_size(count)
        return self.ahead(skip + count)[skip:]

    def ahead(self, count: int) -> list[int]:
        """Return the ``count`` rows to come."""
        return [row for _, row in islice(self._places(), count)]

    def _places(self) -> Iterator[tuple[int, int]]:
        """Yield all rows to come, each behind its place in the passes."""
        start = self._drawn % self._size
        for number in itertools.count(self._drawn // self._size):
            for offset, row in enumerate(self._order(number)[start:], start):
                if self._back.get(row, 0) <= number:
                    yield number * self._size + offset, row
            start = 0

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

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        places, resting = [place for place, _ in islice(self._places(), len(rows))], {**self._back}
        for place, row, rate in zip(places, rows, pass_rates, strict=True):
            if self._rest and rate is not None and not 0 < rate < 1:
                if rate not in (0, 1):
                    raise ValueError(
                        f"sampler.rest={self._rest}: the deciding reward averages {rate:.3g} over "
                        "a prompt's samples, but must be 0 for wrong and 1 for right ones; name "
                        "such a reward in deciding_reward, or set sampler.rest=0."
                    )
                resting[row] = place // self._size + 1 + self._rest
            self._drawn = place + 1
        now = self._drawn // self._size
        self._back = {row: number for row, number in resting.items() if number > now}

    @property
    def epoch(self) -> float:
        return self._drawn / self._size

    @property
    def metrics(self) -> dict[str, float]:
        """``sampler/resting``, with ``rest``: the share of prompts that sit out."""
        return {"sampler/resting": self._num_resting / self._size} if self._rest else {}

    @property
    def _num_resting(self) -> int:
        return len(self._back)

    def state_dict(self) -> dict[str, object]:
        fixed = ("_size", "_seed", "_shuffle", "_rest")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state_dict(self, state: dict[str, object]) -> None:
        vars(self).update(state)


class MixedSampler(ShuffledSampler):
    """Sampler of a ``MixedDataset``: passes over each of its data sets, which take turns by weight.

    The next prompt is always of the data set that is furthest behind its share, so that every step
    has the weights' shares, but for rounding that later steps make up for.
    """

    def __init__(
        self, dataset: MixedDataset, *, seed: int, shuffle: bool = True, rest: int = 0
    ) -> None:
        super().__init__(dataset, seed=seed, shuffle=shuffle, rest=rest)
        self._parts, self._starts, self._shares = [*dataset.parts], dataset.starts, dataset.shares
        parts = dataset.parts.values()
        self._passes = [ShuffledSampler(p, seed=seed, shuffle=shuffle, rest=rest) for p in parts]
        self._counts = [0] * len(parts)  # prompts drawn from each
        self._pass_rates: list[list[float]] = [[] for _ in parts]  # of each one's last groups

    def next(self, count: int, *, skip: int = 0) -> list[int]:
        """As in ``ShuffledSampler``; within a step, a small data set may repeat its prompts."""
        self._check_size(count)
        counts, drawn, turns = [*self._counts], sum(self._counts), list[int]()
        for number in range(drawn + 1, drawn + skip + count + 1):
            behind = [s * number - n for s, n in zip(self._shares, counts, strict=True)]
            turns.append(behind.index(max(behind)))
            counts[turns[-1]] += 1
        rows = [iter(part.ahead(turns.count(n))) for n, part in enumerate(self._passes)]
        return [self._starts[turn] + next(rows[turn]) for turn in turns][skip:]

    def learn(self, rows: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        self._drawn += len(rows)
        turns = [bisect_right(self._starts, row) - 1 for row in rows]
        for number, (part, start) in enumerate(zip(self._passes, self._starts, strict=False)):
            own = [n for n, turn in enumerate(turns) if turn == number]
            part.learn([rows[n] - start for n in own], [pass_rates[n] for n in own])
        self._counts = [n + turns.count(number) for number, n in enumerate(self._counts)]
        self._pass_rates = [*self._pass_rates]
        for turn, rate in zip(turns, pass_rates, strict=True):
            if rate is not None:
                self._pass_rates[turn] = [*self._pass_rates[turn], rate][-_WINDOW:]

    @property
    def metrics(self) -> dict[str, float]:
        """``sampler/pass_rate/NAME``: the mean over the last 32 groups of each data set."""
        named = zip(self._parts, self._pass_rates, strict=True)
        found = {f"sampler/pass_rate/{name}": fmean(rates) for name, rates in named if rates}
        return found | super().metrics

    @property
    def _num_resting(self) -> int:
        return sum(part._num_resting for part in self._passes)

    def state_dict(self) -> dict[str, object]:
        names = ("_drawn", "_counts", "_pass_rates")
        parts = [part.state_dict() for part in self._passes]
        return {name: getattr(self, name) for name in names} | {"parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, own in zip(self._passes, state["parts"], strict=True):
            part.load_state_dict(own)
        super().load_state_dict({name: own for name, own in state.items() if name != "parts"})


def make_sampler(node: DictConfig | None, dataset: PromptData, *, seed: int) -> Sampler:
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
