"""Several weighted rewards, called together once per batch of completions."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchtune.utils import get_logger

from torchtune_grpo.advantages import total_reward
from torchtune_grpo.reward_contract import Score, TrainerState
from torchtune_grpo.rewards._calling import (
    AsyncRewards,
    Calls,
    Outcome,
    call_reward,
    is_async,
)
from torchtune_grpo.rewards._reward import Reward, check_columns, check_reward, check_shaping
from torchtune_grpo.rewards._reward_config import rewards_from_config

log = get_logger("INFO")


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
        extra (dict[str, list[Any]]): what rewards gave to ``log_extra``, N values each.
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
        max_failure_share (float): the share of a call's completions on which a reward may fail; if
            it fails on more, the call raises. With 0.0 no failure is borne.

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
        """Scores N completions.

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
        outcomes = self._call_all(calls)
        for reward, outcome in zip(self.rewards, outcomes, strict=True):
            self._check_failures(reward, outcome.scores)
        return _combine(self.rewards, outcomes, group_size=group_size)

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
        awaited = [reward for reward in self.rewards if is_async(reward)]
        future = None
        if awaited:
            self._async = self._async or AsyncRewards()
            future = self._async.start(awaited, calls)
        called = iter([call_reward(r, calls) for r in self.rewards if not is_async(r)])
        finished = iter(future.result() if future is not None else [])
        return [next(finished if is_async(r) else called) for r in self.rewards]

    def _check_failures(self, reward: Reward, scores: list[Score]) -> None:
        failures = [(i, s) for i, s in enumerate(scores) if isinstance(s, Exception)]
        if not failures:
            return
        index, error = failures[0]
        shown = "".join(traceback.format_exception_only(type(error), error)).strip()
        message = (
            f"The reward {reward.name!r} failed on {len(failures)} of {len(scores)} completions, "
            f"first at index {index}: {shown}"
        )
        if len(failures) > self._max_failure_share * len(scores):
            raise RewardFailure(
                f"{message}\nThat is more than max_reward_failure_share={self._max_failure_share}; "
                "correct the reward, or raise the share."
            ) from error
        log.warning(message)


def _combine(
    rewards: Sequence[Reward], outcomes: Sequence[Outcome], *, group_size: int
) -> RewardScores:
    columns, failures = [], []
    for outcome in outcomes:
        values = [s if isinstance(s, float) else float("nan") for s in outcome.scores]
        columns.append(torch.tensor(values, dtype=torch.float32))
        failures.append(torch.tensor([isinstance(s, Exception) for s in outcome.scores]).bool())
    scores = torch.stack(columns, dim=1)  # [N, R]
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float32)
    failed = torch.stack(failures, dim=1)  # [N, R]
    noted = list(zip(rewards, outcomes, strict=True))
    return RewardScores(
        names=[reward.name for reward in rewards],
        scores=scores,
        weights=weights,
        total=total_reward(scores, failed, weights, group_size=group_size),
        seconds=[outcome.seconds for outcome in outcomes],
        failed=failed,
        extra={name: values for _, o in noted for name, values in o.notes.extra.items()},
        metrics=[(f"{r.name}/{name}", value) for r, o in noted for name, value in o.notes.metrics],
    )
