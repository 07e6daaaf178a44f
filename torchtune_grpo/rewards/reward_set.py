"""Several weighted rewards, called together once per batch of completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtune.utils import get_logger

from torchtune_grpo.advantages import total_reward
from torchtune_grpo.config.text import describe, shortened, visible
from torchtune_grpo.machine.interrupt import breakable
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank
from torchtune_grpo.rewards.calling import (
    AsyncRewards,
    Calls,
    Outcome,
    call_reward,
    is_async,
    joined,
)
from torchtune_grpo.rewards.reward import (
    Reward,
    check_columns,
    check_reward,
    check_shaping,
    row_faults,
    tried_rows,
)
from torchtune_grpo.rewards.reward_config import rewards_from_config
from torchtune_grpo.sandbox.contract import ContractError, TrainerState

log = get_logger("INFO")

_SHOWN_ROWS = 3  # of many bad ones

# What R rewards say of some completions; or one of them broke its contract.
Answers = list[Outcome] | ContractError


class RewardFailure(RuntimeError):
    """A reward failed on more completions than the config allows."""


@dataclass(frozen=True)
class RewardScores:
    """What R rewards say about N completions.

    Args:
        names (list[str]): the R rewards' names.
        scores (Tensor): [N, R] float32, unweighted; nan where a reward does not apply or failed.
        weights (Tensor): [R] float32.
        total (Tensor): [N] float32, the weighted sum; see
            :func:`torchtune_grpo.advantages.total_reward`. Advantages, metrics
            and the record of completions all read it.
        seconds (list[float]): the time that each of the R rewards took for all N completions.
        failed (Tensor): [N, R] bool, True where a reward raised, did not answer in time, or gave
            no finite number.
        extra (dict[str, list[Any]]): what rewards gave to ``log_extra``, N values each; a name that
            several gave is preceded by the reward's.
        metrics (list[tuple[str, float]]): what they gave to ``log_metric``; the name begins with
            the reward's.
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

    Args:
        rewards (Sequence[Reward]): at least one, each with a name of its own.
        max_failure_share (float): the share of a call's completions, over all ranks, on which a
            reward may fail; if it fails on more, the call raises. With 0.0 no failure is borne.

    Raises:
        ValueError: see :meth:`check`.
    """

    def __init__(self, rewards: Sequence[Reward], *, max_failure_share: float = 0.0) -> None:
        self.rewards = list(rewards)
        self._max_failure_share = max_failure_share
        self._async: AsyncRewards | None = None
        self.check()

    @classmethod
    def from_config(
        cls, cfg: Sequence[Mapping[str, Any]] | None, *, max_failure_share: float = 0.0
    ) -> RewardSet:
        """Builds the set that the config's list ``rewards`` describes.

        Args:
            cfg (Sequence[Mapping[str, Any]] | None): nodes with ``_component_``, the dotpath of a
                reward or of a class whose instances are rewards, and as wanted ``name`` (default:
                the component's), ``weight`` (default: 1.0), ``format`` (text or chat),
                ``isolation: process`` with ``timeout`` and ``workers``, and keyword arguments of
                the component.
            max_failure_share (float): see the class.

        Returns:
            The set, in the config's order.

        Raises:
            ValueError: naming the key, the value given and the remedy.
        """
        return cls(rewards_from_config(cfg), max_failure_share=max_failure_share)

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
                function cannot be called as rewards are, a column that one needs is missing, or
                shaping could outweigh what decides whether an answer is right.
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
        check_shaping(self.rewards)
        if columns is not None:
            given = list(columns)
            for reward in self.rewards:
                check_columns(reward, given)

    def check_data(self, dataset: Any, *, key: str, alone: bool = False) -> None:
        """Leaves out the rows of a data set that a reward cannot score any answer to.

        No reward is called, but a ``CodeReward`` tries rows' tests, on the first rank.

        Args:
            dataset (Any): an :class:`~torchtune_grpo.data.RLDataset`, or what has its items.
            key (str): of the data set in the config, for the log and the error.
            alone (bool): other ranks, if there are some, do not call it.

        Raises:
            ValueError: if a column that a reward needs is missing; if more than half of the rows
                would have to be left out, or some, and the data set has no ``leave_out``. It names
                the first of them.
        """
        for reward in self.rewards:
            rows = _columns(dataset)
            check_columns(reward, rows[0], data=key)
            faults = row_faults(reward, rows, data=key)
            _leave_out(dataset, faults, len(rows), key=key, name=reward.name)
            ask = (reward, _columns(dataset))
            tried = tried_rows(*ask) if alone else on_first_rank(tried_rows, *ask)
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
        """Scores N completions; on several ranks each calls it with its own.

        Args:
            prompts (Sequence[str]): N prompts, as rewards see them.
            completions (Sequence[str]): N texts, each prefill and completion.
            columns (Mapping[str, Sequence[Any]]): the data set's other columns, N values each.
            group_size (int): G completions after each other are of the same prompt.
            completion_ids (Sequence[Sequence[int]] | None): N lists of sampled tokens, without the
                prefill; None does not give them.
            trainer_state (TrainerState | None): how far the run is; with it rewards get
                ``log_extra`` and ``log_metric``, too.

        Returns:
            The scores; N may be 0.

        Raises:
            ValueError: if the lengths differ, a column is missing, or a reward returns anything but
                N numbers or Nones.
            RewardFailure: if a reward fails on more than ``max_failure_share`` of the completions.
                What stops one rank here stops all.
            Interrupted: if the run is to end, on all ranks.
        """
        outcomes = breakable(
            partial(
                self.call,
                prompts=prompts,
                completions=completions,
                columns=columns,
                completion_ids=completion_ids,
                trainer_state=trainer_state,
            )
        )
        return self.combine([outcomes], group_size=group_size)

    def call(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState | None = None,
    ) -> Answers:
        """What the rewards say of N completions, without a word to other ranks.

        The arguments are those of a call of the set. Bad ones raise a ValueError here; a broken
        contract does so when answers are combined.
        """
        given = {"completions": completions, **columns}
        if completion_ids is not None:
            given["completion_ids"] = completion_ids
        for name, values in given.items():
            if len(values) != len(prompts):
                raise ValueError(
                    f"There are {len(prompts)} prompts but {len(values)} values in {name!r}; give "
                    "one value per prompt."
                )
        self.check(columns)
        calls = Calls(
            prompts=prompts,
            completions=completions,
            columns=columns,
            completion_ids=completion_ids,
            trainer_state=trainer_state,
        )
        try:
            return self._call_all(calls)
        except ContractError as error:
            return error

    def combine(self, answers: Sequence[Answers], *, group_size: int) -> RewardScores:
        """The scores of one or more calls' completions; every rank has to call it.

        Raises:
            ValueError: if a reward has returned anything but numbers or Nones.
            RewardFailure: if one failed on more than ``max_failure_share`` of the completions.
        """
        broken = [visible(str(each)) for each in answers if isinstance(each, ContractError)]
        parts = [each for each in answers if not isinstance(each, ContractError)]
        outcomes = [] if broken else [joined(of_reward) for of_reward in zip(*parts, strict=True)]
        self._check_outcomes(outcomes, broken[0] if broken else None)
        return _combine(self.rewards, outcomes, group_size=group_size)

    def scores(self, answers: Answers, *, group_size: int) -> RewardScores | None:
        """Of one call, as :meth:`combine`, but for this rank alone and unchecked; None = broken."""
        if isinstance(answers, ContractError):
            return None
        return _combine(self.rewards, answers, group_size=group_size)

    def close(self) -> None:
        """Ends the processes and threads of rewards that have some; the set can be used again."""
        for reward in self.rewards:
            close = getattr(reward.function, "close", None)
            if callable(close):
                close()
        if self._async is not None:
            self._async.close()
            self._async = None

    def _call_all(self, calls: Calls) -> list[Outcome]:
        """The async rewards run side by side, and while the others are called one by one."""
        awaited, called = {}, {}
        for reward in filter(is_async, self.rewards):
            if self._async is None or not self._async.is_alive():
                self._async = AsyncRewards()
            awaited[reward.name] = self._async.start(reward, calls)
        for reward in self.rewards:
            if reward.name not in awaited:
                called[reward.name] = call_reward(reward, calls)
        return [awaited[n]() if n in awaited else called[n] for n in self.names]

    def _check_outcomes(self, outcomes: Sequence[Outcome], broken: str | None) -> None:
        """Raises on every rank if one's contract is ``broken`` or there are too many failures."""
        ranks = gather_over_ranks((broken, [_Failures.of(outcome) for outcome in outcomes]))
        for text, _ in ranks:
            if text is not None:
                raise ContractError(text)
        for index, name in enumerate(self.names):
            parts = [failures[index] for _, failures in ranks]
            failed, count = sum(part.failed for part in parts), sum(part.count for part in parts)
            if not failed:
                continue
            number, first = next((i, part) for i, part in enumerate(parts) if part.failed)
            where = f"index {first.index}" + (f" of rank {number}" if len(ranks) > 1 else "")
            message = (
                f"The reward {name!r} failed on {failed} of {count} completions, first at {where}: "
                f"{first.error}"
            )
            if not self.rewards[index].chat and "string indices must be" in first.error:
                message += " (does it want messages? set format: chat in its node)"
            if failed > self._max_failure_share * count:
                failure = RewardFailure(
                    f"{message}. That is more than max_reward_failure_share="
                    f"{self._max_failure_share}; correct the reward, or raise the share."
                )
                failure.add_note(first.places)
                raise failure
            if rank() == 0:
                log.warning(message)


def _columns(dataset: Any) -> list[dict[str, Any]]:
    return [dataset[index]["columns"] for index in range(len(dataset))]


def _leave_out(
    dataset: Any, faults: Mapping[int, str], checked: int, *, key: str, name: str
) -> None:
    """Leaves out the rows with faults; see :meth:`RewardSet.check_data`."""
    if not faults:
        return
    numbers = getattr(dataset, "row_numbers", range(len(dataset)))
    first = [f"row {numbers[i]}: {shortened(said, 200)}" for i, said in faults.items()]
    told = (
        f"{key}: the reward {name!r} can score no answer to {len(faults)} of "
        f"{checked} rows (counted from 0): {'; '.join(first[:_SHOWN_ROWS])}"
        f"{'; ...' if len(first) > _SHOWN_ROWS else ''}."
    )
    if 2 * len(faults) > checked or not hasattr(dataset, "leave_out"):
        raise ValueError(
            f"{told} Correct or remove these rows, name another column in {key}.columns, "
            "or use another reward."
        )
    dataset.leave_out(faults.keys())
    if rank() == 0:
        log.info(f"{told} They are left out.")


@dataclass(frozen=True)
class _Failures:
    """How often a reward failed on a rank's ``count`` completions, and how it did first."""

    count: int
    failed: int = 0
    index: int = 0
    error: str = ""
    places: str = ""

    @classmethod
    def of(cls, outcome: Outcome) -> _Failures:
        scores = outcome.scores
        errors = [(i, s) for i, s in enumerate(scores) if isinstance(s, BaseException)]
        if not errors:
            return cls(len(scores))
        index, error = errors[0]
        return cls(len(scores), len(errors), index, describe(error), describe(error, frames=3))


def _combine(
    rewards: Sequence[Reward], outcomes: Sequence[Outcome], *, group_size: int
) -> RewardScores:
    columns, failures = [], []
    for outcome in outcomes:
        values = [s if isinstance(s, float) else float("nan") for s in outcome.scores]
        columns.append(torch.tensor(values, dtype=torch.float32))
        failures.append(torch.tensor([isinstance(s, BaseException) for s in outcome.scores]).bool())
    scores = torch.stack(columns, dim=1)  # [N, R]
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float32)
    failed = torch.stack(failures, dim=1)  # [N, R]
    noted = list(zip(rewards, outcomes, strict=True))
    given = Counter(name for outcome in outcomes for name in outcome.notes.extra)
    extra = {
        name if given[name] == 1 else f"{reward.name}/{name}": values
        for reward, outcome in noted
        for name, values in outcome.notes.extra.items()
    }
    return RewardScores(
        names=[reward.name for reward in rewards],
        scores=scores,
        weights=weights,
        total=total_reward(scores, failed, weights, group_size=group_size),
        seconds=[outcome.seconds for outcome in outcomes],
        failed=failed,
        extra=extra,
        metrics=[(f"{r.name}/{name}", value) for r, o in noted for name, value in o.notes.metrics],
    )
