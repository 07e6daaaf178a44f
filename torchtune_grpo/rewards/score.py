"""Scoring a batch of completions with several weighted rewards, on one rank or on many."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torchtune.utils import get_logger

from torchtune_grpo.advantages import total_reward
from torchtune_grpo.config.text import describe, shortened, visible
from torchtune_grpo.data.prompt import Prompt, message
from torchtune_grpo.machine.interrupt import breakable
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank
from torchtune_grpo.rewards.reward import Reward, RewardFunction, rewards_from_config
from torchtune_grpo.rewards.workers import ContractError, WorkerPool

log = get_logger("INFO")

# What the run itself logs of a reward ends in these.
MEASURED = ("mean", "std", "errors", "none")
LARGEST = 3.4028234663852886e38  # of float32
_SHOWN_ROWS = 3  # of many bad ones
_ASYNC_CALLS = 32  # at once, of an async reward that is called on each completion by itself

# A number; None where the reward does not apply; an exception where it failed.
Score = float | None | BaseException


class RewardFailure(RuntimeError):
    """A reward failed on more completions than the config allows."""


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, under the names of transformers' ``TrainerState``."""

    global_step: int  # finished optimizer steps
    max_steps: int  # of the whole run
    epoch: float = 0.0  # passes over the data set that these steps have made


@dataclass(frozen=True)
class RewardScores:
    """What R rewards say about N completions.

    Args:
        scores: [N, R] float32, unweighted; nan where a reward does not apply or failed.
        weights: [R] float32.
        total: [N] float32, the weighted sum of :func:`torchtune_grpo.advantages.total_reward`.
        seconds: the time that each of the R rewards took for all N completions.
        failed: [N, R] bool, True where a reward raised, did not answer in time, or gave no finite
            number.
        extra: what rewards gave to ``log_extra``, N values each; a name that several gave is
            preceded by the reward's.
        metrics: what they gave to ``log_metric``; each name begins with the reward's.
    """

    names: list[str]
    scores: Tensor
    weights: Tensor
    total: Tensor
    seconds: list[float]
    failed: Tensor
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)


class RewardSet:
    """R weighted rewards, checked before the first completion is scored.

    ``max_failure_share`` is the share of a call's completions, over all ranks, on which a reward
    may fail; if it fails on more, the call raises.
    """

    def __init__(self, rewards: Sequence[Reward], *, max_failure_share: float = 0.0) -> None:
        self.rewards = list(rewards)
        self._max_failure_share = max_failure_share
        for name, count in Counter(self.names).items():
            if count > 1:
                places = [f"rewards[{i}].name" for i, n in enumerate(self.names) if n == name]
                raise ValueError(
                    f"{' and '.join(places)} are both {name!r}; give each reward a name of its own."
                )
        for index, reward in enumerate(self.rewards):
            reward.check(f"rewards[{index}]")
        _check_shaping(self.rewards)

    @classmethod
    def from_config(
        cls, cfg: Sequence[Mapping[str, Any]] | None, *, max_failure_share: float = 0.0
    ) -> RewardSet:
        """Builds the set that the config's list ``rewards`` describes; see docs/rewards.md."""
        return cls(rewards_from_config(cfg), max_failure_share=max_failure_share)

    @property
    def names(self) -> list[str]:
        """The R rewards' names."""
        return [reward.name for reward in self.rewards]

    def check(self, columns: Iterable[str]) -> None:
        """Raises a ValueError if the data set's columns lack one that a reward needs."""
        for reward in self.rewards:
            reward.check_columns(columns)

    def check_data(self, dataset: Any, *, key: str, alone: bool = False) -> None:
        """Leaves out the rows of the data set ``key`` that a reward cannot score any answer to.

        No reward is called, but a ``CodeReward`` tries rows' tests, on the first rank, or here if
        this rank is ``alone``. Raises a ValueError naming the first rows if more than half would
        have to be left out, or some, and the data set has no ``leave_out``.
        """
        for reward in self.rewards:
            rows = _columns(dataset)
            reward.check_columns(rows[0], data=key)
            faults = reward.row_faults(rows)
            _leave_out(dataset, faults, len(rows), key=key, name=reward.name)
            rows = _columns(dataset)
            tried = reward.tried_rows(rows) if alone else on_first_rank(reward.tried_rows, rows)
            faults = {row: fault for row, fault in tried.items() if fault is not None}
            _leave_out(dataset, faults, len(tried), key=key, name=reward.name)

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        group_size: int = 1,
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState | None = None,
    ) -> RewardScores:
        """Scores N completions; on several ranks each calls it with its own, and N may be 0.

        Args:
            completions: N texts, each prefill and completion.
            columns: the data set's other columns, N values each.
            group_size: G completions after each other are of the same prompt.
            completion_ids: N lists of sampled tokens, without the prefill; None does not give them.
            trainer_state: None gives neither it nor ``log_extra`` and ``log_metric``.

        Raises:
            ValueError: if a column is missing, or a reward returns anything but N numbers or Nones.
            RewardFailure: if one fails on more than ``max_failure_share`` of the completions. What
                stops one rank here stops all.
            Interrupted: if the run is to end, on all ranks.
        """
        batch = _Batch(prompts, completions, columns, completion_ids, trainer_state)
        self.check(columns)
        outcomes = breakable(partial(self._call, batch))
        self._check_failures(outcomes)
        return self._scores(outcomes, group_size)

    def call(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None,
        trainer_state: TrainerState | None,
    ) -> list[Outcome]:
        """What each reward says of N completions; for dynamic sampling, group by group."""
        self.check(columns)
        return self._call(_Batch(prompts, completions, columns, completion_ids, trainer_state))

    def combine(self, answers: Sequence[list[Outcome]], *, group_size: int) -> RewardScores:
        """The scores of several calls' completions; every rank has to call it."""
        outcomes = [Outcome.join(of_reward) for of_reward in zip(*answers, strict=True)]
        self._check_failures(outcomes)
        return self._scores(outcomes, group_size)

    def scores(self, answers: list[Outcome], *, group_size: int) -> RewardScores | None:
        """Of one call, unchecked and for this rank alone; None = a reward is broken."""
        is_broken = any(outcome.broken for outcome in answers)
        return None if is_broken else self._scores(answers, group_size)

    def close(self) -> None:
        """Ends the processes of rewards that have some; the set can be used again."""
        for reward in self.rewards:
            reward.close()

    def _call(self, batch: _Batch) -> list[Outcome]:
        """Each async reward waits in a thread of its own, while the others are called in turn."""
        outcomes: dict[str, Outcome] = {}

        def call(reward: Reward) -> None:
            outcomes[reward.name] = _call_reward(reward, batch)

        waiting = [reward for reward in self.rewards if reward.is_async]
        threads = [threading.Thread(target=call, args=(r,), daemon=True) for r in waiting]
        for thread in threads:
            thread.start()
        for reward in self.rewards:
            if not reward.is_async:
                call(reward)
        for thread in threads:
            thread.join()
        return [outcomes[name] for name in self.names]

    def _check_failures(self, outcomes: Sequence[Outcome]) -> None:
        """Raises on every rank if one has a broken reward, or if there are too many failures."""
        broken = next((visible(str(o.broken)) for o in outcomes if o.broken), None)
        ranks = gather_over_ranks((broken, [outcome.failures() for outcome in outcomes]))
        for text, _ in ranks:
            if text is not None:
                raise ContractError(text)
        for index, reward in enumerate(self.rewards):
            counts, failures = zip(*(failures[index] for _, failures in ranks), strict=True)
            failed, count = sum(map(len, failures)), sum(counts)
            if not failed:
                continue
            number = next(i for i, part in enumerate(failures) if part)
            row, error, places = failures[number][0]
            place = f"index {row}" + (f" of rank {number}" if len(ranks) > 1 else "")
            text = (
                f"The reward {reward.name!r} failed on {failed} of {count} completions, first at "
                f"{place}: {error}"
            )
            if not reward.chat and "string indices must be" in error:
                text += " (does it want messages? set format: chat in its node)"
            if failed > self._max_failure_share * count:
                failure = RewardFailure(
                    f"{text}. That is more than max_reward_failure_share="
                    f"{self._max_failure_share}; correct the reward, or raise the share."
                )
                failure.add_note(places)
                raise failure
            if rank() == 0:
                log.warning(text)

    def _scores(self, outcomes: Sequence[Outcome], group_size: int) -> RewardScores:
        rows = [[s if isinstance(s, float) else math.nan for s in o.scores] for o in outcomes]
        failures = [[isinstance(s, BaseException) for s in o.scores] for o in outcomes]
        scores = torch.tensor(rows, dtype=torch.float32).T.contiguous()  # [N, R]
        failed = torch.tensor(failures, dtype=torch.bool).T.contiguous()  # [N, R]
        weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float32)
        named = list(zip(self.names, outcomes, strict=True))
        given = Counter(column for outcome in outcomes for column in outcome.extra)
        return RewardScores(
            names=self.names,
            scores=scores,
            weights=weights,
            total=total_reward(scores, failed, weights, group_size=group_size),
            seconds=[outcome.seconds for outcome in outcomes],
            failed=failed,
            extra={
                column if given[column] == 1 else f"{name}/{column}": values
                for name, outcome in named
                for column, values in outcome.extra.items()
            },
            metrics=[(f"{name}/{metric}", x) for name, o in named for metric, x in o.metrics],
        )


def _check_shaping(rewards: Sequence[Reward]) -> None:
    """Raises a ValueError if shaping could pay a wrong answer as much as a right one.

    A reward that ``decides`` gives a right answer at least its ``reward_gap`` more than a wrong
    one; one with a ``reward_range`` can favour a wrong answer by at most the width of that range.
    """
    gap = sum(reward.weight * reward.reward_gap for reward in rewards if reward.decides)
    spans = {
        reward.name: abs(reward.weight) * (reward.reward_range[1] - reward.reward_range[0])
        for reward in rewards
        if reward.reward_range
    }
    if any(reward.decides for reward in rewards) and sum(spans.values()) >= gap:
        listed = ", ".join(f"{name} {span:g}" for name, span in spans.items())
        raise ValueError(
            f"rewards: together {listed} can outweigh what makes a right answer better than a "
            f"wrong one ({gap:g}); lower their weights until their sum is less."
        )


def _columns(dataset: Any) -> list[dict[str, Any]]:
    return [dataset[index]["columns"] for index in range(len(dataset))]


def _leave_out(
    dataset: Any, faults: Mapping[int, str], checked: int, *, key: str, name: str
) -> None:
    """Leaves out the rows with faults; see :meth:`RewardSet.check_data`."""
    if not faults:
        return
    numbers = getattr(dataset, "row_numbers", range(len(dataset)))
    first = [f"row {numbers[i]}: {shortened(fault, 200)}" for i, fault in faults.items()]
    text = (
        f"{key}: the reward {name!r} can score no answer to {len(faults)} of "
        f"{checked} rows (counted from 0): {'; '.join(first[:_SHOWN_ROWS])}"
        f"{'; ...' if len(first) > _SHOWN_ROWS else ''}."
    )
    if 2 * len(faults) > checked or not hasattr(dataset, "leave_out"):
        raise ValueError(
            f"{text} Correct or remove these rows, name another column in {key}.columns, "
            "or use another reward."
        )
    dataset.leave_out(faults.keys())
    if rank() == 0:
        log.info(f"{text} They are left out.")


@dataclass(frozen=True)
class _Batch:
    """What a step's rewards are called with: N values each; None = not given."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    completion_ids: Sequence[Sequence[int]] | None
    trainer_state: TrainerState | None

    def arguments(self, reward: Reward, rows: range, outcome: Outcome) -> dict[str, Any]:
        """Lists of the call's own, so that a reward which changes them changes no other's."""
        given = {n: values for n, values in self.columns.items() if n not in reward.fixed}
        given |= {"prompts": self.prompts, "completions": self.completions}
        own: dict[str, Any] = {n: [values[row] for row in rows] for n, values in given.items()}
        if self.completion_ids is not None:
            own["completion_ids"] = [list(self.completion_ids[row]) for row in rows]
        if reward.chat:
            own["prompts"] = [_messages(prompt) for prompt in own["prompts"]]
            own["completions"] = [[message("assistant", text)] for text in own["completions"]]
        else:
            own["prompts"] = [*map(str, own["prompts"])]
        if self.trainer_state is not None:
            own["trainer_state"] = self.trainer_state
            own |= {"log_extra": outcome.log_extra, "log_metric": outcome.log_metric}
        return own


def _messages(prompt: str) -> list[dict[str, Any]]:
    if isinstance(prompt, Prompt):
        return copy.deepcopy(prompt.messages)
    return [message("user", prompt)]


@dataclass
class Outcome:
    """What one reward returns and reports for ``count`` completions."""

    count: int
    scores: list[Score] = field(default_factory=list)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    raised: bool = False  # whether it gave an exception instead of scores
    broken: ContractError | None = None
    seconds: float = 0.0

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

    def fail(self, error: BaseException) -> None:
        """All completions failed in the same way."""
        self.scores, self.raised = [error] * self.count, True

    def failures(self) -> tuple[int, list[tuple[int, str, str]]]:
        """``count``, and of each failure the position, the error and where it was raised."""
        errors = [(i, s) for i, s in enumerate(self.scores) if isinstance(s, BaseException)]
        texts = [(i, describe(e), describe(e, frames=3)) for i, e in errors[:1]]
        return self.count, texts + [(i, "", "") for i, _ in errors[1:]]

    @classmethod
    def join(cls, parts: Sequence[Outcome]) -> Outcome:
        """One reward's outcomes of several calls as one."""
        whole = cls(sum(part.count for part in parts))
        for part in parts:
            for name, values in part.extra.items():
                column = whole.extra.setdefault(name, [None] * whole.count)
                column[len(whole.scores) : len(whole.scores) + part.count] = values
            whole.metrics += part.metrics
            whole.scores += part.scores
            whole.seconds += part.seconds
            whole.broken = whole.broken or part.broken
        return whole


def _call_reward(reward: Reward, batch: _Batch) -> Outcome:
    """Calls a reward on all completions; in workers, or if it raises, on each by itself."""
    start, count = time.perf_counter(), len(batch.completions)
    single = [range(row, row + 1) for row in range(count)]

    def call(function: RewardFunction, rows: range) -> Outcome:
        return _call(function, reward, batch, rows)

    try:
        if reward.workers is not None:
            outcome = Outcome.join(reward.workers.map(call, single))
        else:
            outcome = call(reward.function, range(count))
            if outcome.raised and count > 1 and reward.is_async:
                threads = WorkerPool([reward.function] * _ASYNC_CALLS)
                outcome = Outcome.join(threads.map(call, single))
            elif outcome.raised and count > 1:
                outcome = Outcome.join([call(reward.function, rows) for rows in single])
    except ContractError as error:
        outcome = Outcome(count, [error] * count, broken=error)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _call(function: RewardFunction, reward: Reward, batch: _Batch, rows: range) -> Outcome:
    outcome = Outcome(len(rows))
    try:
        returned = function(**batch.arguments(reward, rows, outcome))
        if reward.is_async:
            returned = asyncio.run(_wait(returned))
        outcome.scores = _scores_of(reward.name, returned, len(rows))
    except ContractError:
        raise
    except BaseException as error:  # sys.exit, too
        if isinstance(error, KeyboardInterrupt) and not reward.is_async:
            raise  # Ctrl-C, which never reaches the threads of async rewards
        outcome.fail(error)
    return outcome


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _scores_of(name: str, returned: Any, count: int) -> list[Score]:
    """The ``count`` scores that a reward returned in a list, a tuple, a tensor or an array."""
    if not isinstance(returned, (list, tuple)) and hasattr(returned, "tolist"):
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)) or len(returned) != count:
        is_list = isinstance(returned, (list, tuple))
        what = f"{len(returned)} values" if is_list else type(returned).__name__
        raise ContractError(
            f"The reward {name!r} returned {what} for {count} completions; return a list with one "
            "number or None per completion."
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
    if abs(number) <= LARGEST:
        return number
    # The reward has computed it, but it is not a value to learn from.
    return ValueError(f"returned {number}; return a finite number (in float32), or None")
