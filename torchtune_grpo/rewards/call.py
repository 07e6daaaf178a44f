"""Calling rewards: their arguments, return values, reports and failures."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any, cast

from torchtune_grpo.config.text import describe, place_of
from torchtune_grpo.machine import loop
from torchtune_grpo.machine.parallel import rank, world_size
from torchtune_grpo.rewards.reward import Reward, RewardFunction
from torchtune_grpo.rewards.workers import ContractError, WorkerPool
from torchtune_grpo.trajectory import Completion, Prompt

# Endings of the run's own metrics of a reward
MEASURED = ("mean", "std", "errors", "none", "no_answer")
_LARGEST = 3.4028234663852886e38  # the largest float32
_NOT_FINITE = "returned NaN or a number beyond float32; return a finite number, or None"
_ASYNC_CALLS = 32  # concurrent calls of an async reward that is called per completion

# A number; None where the reward does not apply; an exception where it failed.
Score = float | None | BaseException


@dataclass(frozen=True)
class TrainerState:
    """A run's progress, with the field names of transformers' ``TrainerState``."""

    global_step: int  # finished optimizer steps
    max_steps: int  # steps of the whole run
    epoch: float = 0.0  # passes over the data set so far


@dataclass(frozen=True)
class Batch:
    """The arguments of a step's rewards, N values each."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    columns: Mapping[str, Sequence[object]]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: TrainerState | None
    seed: int = 0  # of the run

    def own_seed(self) -> int:
        """Return a seed that depends on run, step, prompts and completions alone."""
        step = -1 if self.trainer_state is None else self.trainer_state.global_step
        texts = [*map(str, self.prompts), *map(str, self.completions)]
        key = "\0".join([f"{self.seed} {step}", *texts])
        return random.Random(key.encode(errors="replace")).getrandbits(63)

    def arguments(self, reward: Reward, outcome: Outcome) -> dict[str, object]:
        """Copy the arguments, so that a reward may modify all that it gets."""
        given = {n: values for n, values in self.columns.items() if n not in reward.fixed}
        # One by one: the rows of a group share their columns' values.
        own: dict[str, object] = {n: [*map(copy.deepcopy, values)] for n, values in given.items()}
        read = [*map(reward.read, self.prompts, self.completions)]
        own["prompts"], own["completions"] = [each[0] for each in read], [each[1] for each in read]
        if self.completion_ids is not None:
            own["completion_ids"] = [*map(list, self.completion_ids)]
        if reward.workers is None and any(each.kind for each in self.completions):
            own["environments"] = [each.environment for each in self.completions]
        if self.trainer_state is not None:
            own["trainer_state"] = self.trainer_state
            own |= {"log_extra": outcome.log_extra, "log_metric": outcome.log_metric}
        return own

    def rows_of(self, reward: Reward) -> list[int]:
        """Return the rows that a reward scores, none of them of an environment that has failed."""
        columns = {name: self.columns[name] for name in reward.only}
        rows = [n for n, each in enumerate(self.completions) if not each.failed]
        return [n for n in rows if reward.applies_to({c: v[n] for c, v in columns.items()})]

    def groups(self) -> list[range]:
        """Return the runs of rows that have the same prompt."""
        starts = [n for n, each in enumerate(self.prompts) if not n or each != self.prompts[n - 1]]
        return [range(*ends) for ends in pairwise([*starts, len(self.prompts)])]

    def select(self, rows: Sequence[int]) -> Batch:
        def of(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in rows]

        ids = None if self.completion_ids is None else of(self.completion_ids)
        columns = {name: of(values) for name, values in self.columns.items()}
        batch = replace(self, prompts=of(self.prompts), completions=of(self.completions))
        return replace(batch, columns=columns, completion_ids=ids)


@dataclass
class Outcome:
    """A reward's scores and reports for ``count`` completions."""

    count: int
    scores: list[Score] = field(default_factory=list)
    extra: dict[str, list[object]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    raised: bool = False  # the reward raised instead of returning scores
    broken: ContractError | None = None
    seconds: float = 0.0

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        """Record one value of any kind per completion."""
        column, values = str(column), list(values)
        if len(values) != self.count:
            raise ContractError(
                f"log_extra({column!r}, ...) got {len(values)} values for {self.count} "
                "completions; give one per completion."
            )
        self.extra[column] = values

    def log_metric(self, name: str, value: float) -> None:
        name = str(name)
        if name.rpartition("/")[2] in MEASURED:
            raise ContractError(
                f"log_metric({name!r}, ...): the run itself logs .../{', .../'.join(MEASURED)}; "
                "give another name."
            )
        self.metrics.append((name, float(value)))

    def failures(self, format: str | None) -> tuple[int, int, str, str]:
        """Count completions and failures; describe the first failure and where it was raised.

        ``format`` is the reward's: a text read as messages, or the reverse, fails by its type.
        """
        errors = [(i, s) for i, s in enumerate(self.scores) if isinstance(s, BaseException)]
        if not errors:
            return self.count, 0, "", ""
        row, error = errors[0]
        where = f"index {row}" + (f" of rank {rank()}" if world_size() > 1 else "")
        text = f"first at {where}: {describe(error)}{place_of(error)}"
        if format is None and isinstance(error, (TypeError, AttributeError)):
            text += " (set format: text in its node if it wants texts, format: chat for messages)"
        return self.count, len(errors), text, describe(error, frames=3)

    def fill(self, rows: Sequence[int], part: Outcome) -> None:
        """Take over the scores and reports of a ``part``, which are of these rows."""
        self.scores = self.scores or [None] * self.count
        for row, score in zip(rows, part.scores, strict=True):
            self.scores[row] = score
        for name, values in part.extra.items():
            column = self.extra.setdefault(name, [None] * self.count)
            for row, value in zip(rows, values, strict=True):
                column[row] = value
        self.metrics += part.metrics
        self.broken = self.broken or part.broken
        self.seconds += part.seconds


def call_all(rewards: Sequence[Reward], batch: Batch) -> dict[str, Outcome]:
    """Call each async reward in its own thread and, meanwhile, the others one after another.

    Returns outcomes by name: rewards of the same name have scored different rows.
    """
    rows = [batch.rows_of(reward) for reward in rewards]

    def call(number: int) -> Outcome:
        if not rows[number]:
            return Outcome(0)
        return _call_reward(rewards[number], batch.select(rows[number]))

    numbers, count = range(len(rewards)), len(batch.completions)
    begun = {n: loop.in_thread(call, n) for n in numbers if rewards[n].is_async}
    parts = {n: call(n) for n in numbers if n not in begun}
    parts |= {n: each.result() for n, each in begun.items()}
    outcomes = {reward.name: Outcome(count, [None] * count) for reward in rewards}
    for number, reward in enumerate(rewards):
        outcomes[reward.name].fill(rows[number], parts[number])
    return outcomes


def _call_reward(reward: Reward, batch: Batch) -> Outcome:
    """Call a reward on all completions, or in workers on each group."""
    start, count = time.perf_counter(), len(batch.completions)

    def of_rows(function: RewardFunction, rows: Sequence[int]) -> Outcome:
        """Call it on rows at once; if it raises, on one at a time."""
        outcome = _call(reward, function, batch.select(rows))
        if not outcome.raised or len(rows) == 1:
            return outcome
        outcome, ones = Outcome(len(rows)), [[row] for row in rows]
        if reward.is_async:
            parts = WorkerPool([function] * _ASYNC_CALLS).map(of_rows, ones)
        else:
            parts = [of_rows(function, one) for one in ones]
        for number, part in enumerate(parts):
            outcome.fill([number], part)
        return outcome

    try:
        if reward.workers is None:
            outcome = of_rows(reward.function, range(count))
        else:
            outcome, groups = Outcome(count), batch.groups()
            for rows, part in zip(groups, reward.workers.map(of_rows, groups), strict=True):
                outcome.fill(rows, part)
    except ContractError as error:
        outcome = Outcome(count, [error] * count, broken=error)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _call(reward: Reward, function: RewardFunction, batch: Batch) -> Outcome:
    count = len(batch.completions)
    outcome = Outcome(count)
    if reward.workers is not None:
        function = partial(function, batch.own_seed())
    try:
        returned = function(**batch.arguments(reward, outcome))
        if reward.is_async:
            returned = loop.run(returned)
        outcome.scores = _scores_of(reward.name, returned, count)
    except ContractError:
        raise
    except BaseException as error:  # including sys.exit
        if isinstance(error, KeyboardInterrupt) and not reward.is_async:
            raise  # Ctrl-C, which never reaches the threads of async rewards
        outcome.scores, outcome.raised = [error] * count, True
    return outcome


def _scores_of(name: str, returned: Any, count: int) -> list[Score]:
    """Check the ``count`` scores that a reward returned in a list, tuple, tensor or array."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    is_list = isinstance(returned, (list, tuple))
    if not is_list or len(returned) != count:
        what = f"{len(returned)} values" if is_list else type(returned).__name__
        raise ContractError(
            f"The reward {name!r} returned {what} for {count} completions; return a list with one "
            "number or None per completion."
        )
    scores: list[Score] = []
    for index, value in enumerate(returned):
        if isinstance(value, (list, tuple)) and len(value) == 1:  # of a shape (N, 1)
            value = value[0]
        if hasattr(value, "item"):  # a number of numpy or torch
            value = value.item()
        if isinstance(value, (Real, Decimal)):
            is_finite = abs(cast(float, value)) <= _LARGEST
            scores.append(float(value) if is_finite else ValueError(_NOT_FINITE))
        elif value is None or isinstance(value, BaseException):
            scores.append(value)
        else:
            raise ContractError(
                f"The reward {name!r} returned {value!r} at index {index}; return a number, or "
                "None where the reward does not apply."
            )
    return scores
