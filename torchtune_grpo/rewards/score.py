"""Scoring a batch of completions with several weighted rewards, on one rank or on many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torchtune.utils import get_logger

from torchtune_grpo.advantages import total_reward
from torchtune_grpo.config.text import shortened, visible
from torchtune_grpo.machine.interrupt import breakable
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank
from torchtune_grpo.rewards.call import Batch, Outcome, TrainerState, call_all
from torchtune_grpo.rewards.reward import Reward, make_reward
from torchtune_grpo.rewards.workers import ContractError

log = get_logger("INFO")


class RewardFailure(RuntimeError):
    """A reward failed on more completions than the config allows."""


@dataclass(frozen=True)
class RewardScores:
    """Scores of N completions by R rewards, in float32."""

    names: list[str]
    scores: Tensor  # [N, R] unweighted; nan where a reward does not apply or failed
    weights: Tensor  # [R]
    total: Tensor  # [N] the weighted sum; see torchtune_grpo.advantages.total_reward
    seconds: list[float]  # time that each of the R rewards took
    failed: Tensor  # [N, R] bool: the reward raised, timed out, or gave no finite number
    # N values each, from log_extra; a name that several rewards use is prefixed with the reward's.
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)  # "reward/name" of log_metric

    def of(self, name: str) -> Tensor:
        """Return the scores [N] of a reward."""
        return self.scores[:, self.names.index(name)]

    def select(self, rows: Tensor) -> RewardScores:
        extra = {name: [values[row] for row in rows] for name, values in self.extra.items()}
        return replace(
            self,
            scores=self.scores[rows],
            total=self.total[rows],
            failed=self.failed[rows],
            extra=extra,
        )

    @classmethod
    def join(cls, parts: Sequence[RewardScores]) -> RewardScores:
        names = {name for part in parts for name in part.extra}
        return replace(
            parts[0],
            scores=torch.cat([part.scores for part in parts]),
            total=torch.cat([part.total for part in parts]),
            failed=torch.cat([part.failed for part in parts]),
            seconds=[sum(of_reward) for of_reward in zip(*(part.seconds for part in parts))],
            extra={
                name: list(chain(*(p.extra.get(name, [None] * len(p.total)) for p in parts)))
                for name in sorted(names)
            },
            metrics=[metric for part in parts for metric in part.metrics],
        )


class RewardSet:
    """R weighted rewards, checked before the first completion is scored.

    ``max_failure_share`` is the share of a call's completions, over all ranks, on which a reward
    may fail; if it fails on more, the call raises.
    """

    def __init__(self, rewards: Sequence[Reward], *, max_failure_share: float = 0.0) -> None:
        self.rewards = list(rewards)
        self._max_failure_share = max_failure_share
        for index, reward in enumerate(self.rewards):
            if reward.name in self.names[:index]:
                raise ValueError(
                    f"rewards[{index}].name={reward.name!r}: used twice; give each reward a name "
                    "of its own."
                )
            reward.check(f"rewards[{index}]")
        _check_shaping(self.rewards)

    @classmethod
    def from_config(
        cls, cfg: Sequence[Mapping[str, Any] | Reward], *, max_failure_share: float = 0.0
    ) -> RewardSet:
        """Build the set that the config's list ``rewards`` describes; see docs/rewards.md."""
        made = [
            node if isinstance(node, Reward) else make_reward(node, f"rewards[{index}]")
            for index, node in enumerate(cfg)
        ]
        return cls(made, max_failure_share=max_failure_share)

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.rewards]

    def decider(self, wanted: str | None) -> str:
        """Name the reward that decides what is right: the one wanted, or the first known to decide.

        If none is known to, it is the first reward.
        """
        known = (reward.name for reward in self.rewards if reward.decides)
        return wanted or next(known, self.names[0])

    def measure(self, wanted: str | None) -> str:
        """Name the mean of :meth:`decider`: accuracy, or the reward's name if it is not known to
        tell right from wrong."""
        is_known = wanted or any(reward.decides for reward in self.rewards)
        return "accuracy" if is_known else self.decider(wanted)

    def check_data(self, dataset: Any, *, key: str) -> None:
        """Leave out the rows of the data set ``key`` for which a reward cannot score any answer.

        No reward is called, but a ``CodeReward`` tries rows' tests on the first rank. Raises a
        ValueError if more than half of the rows would have to be left out.
        """
        checked = getattr(dataset, "num_checked", len(dataset))
        rows = [dataset[index]["columns"] for index in range(checked)]
        for reward in self.rewards:
            reward.check_columns(rows[0], data=key)
            faults = reward.row_faults(rows)
            rows = _leave_out(dataset, rows, faults, len(rows), key=key, name=reward.name)
            tried = on_first_rank(reward.check_rows, rows)
            faults = {row: fault for row, fault in tried.items() if fault is not None}
            rows = _leave_out(dataset, rows, faults, len(tried), key=key, name=reward.name)

    def fault_of(self, columns: Mapping[str, Any]) -> str | None:
        """Return why a reward cannot score any answer to a row with these columns, or None."""
        faults = (reward.row_faults([columns]).get(0) for reward in self.rewards)
        return next(filter(None, faults), None)

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
        """Score N completions, ``group_size`` successive ones for each prompt; N may be 0.

        Completions begin with the prefill; their ``completion_ids`` do not. Without
        ``trainer_state``, rewards get neither it nor ``log_extra`` and ``log_metric``. Each rank
        calls it with its own completions, and what stops one rank here stops all: a broken reward
        (ContractError), too many failures (RewardFailure), or a signal (Interrupted).
        """
        for reward in self.rewards:
            reward.check_columns(columns)
        batch = Batch(prompts, completions, columns, completion_ids, trainer_state)
        outcomes = breakable(partial(call_all, self.rewards, batch))
        self._check_failures(outcomes)
        return self._scores(outcomes, group_size)

    def close(self) -> None:
        """End the processes of rewards that have any; the set can be used again."""
        for reward in self.rewards:
            reward.close()

    def _check_failures(self, outcomes: Sequence[Outcome]) -> None:
        """Raise on every rank if one has a broken reward, or if there are too many failures."""
        broken = next((visible(str(o.broken)) for o in outcomes if o.broken), None)
        ranks = gather_over_ranks((broken, [outcome.failures() for outcome in outcomes]))
        for text, _ in ranks:
            if text is not None:
                raise ContractError(text)
        for index, reward in enumerate(self.rewards):
            counts, failures, errors, places = zip(*(part[index] for _, part in ranks), strict=True)
            failed, count = sum(failures), sum(counts)
            if not failed:
                continue
            error, raised_at = next(pair for pair in zip(errors, places, strict=True) if pair[0])
            text = f"The reward {reward.name!r} failed on {failed} of {count} completions, {error}"
            if not reward.chat and "string indices must be" in error:
                text += " (does it want messages? set format: chat in its node)"
            elif reward.chat is None and ("expected string" in error or "'list' object" in error):
                text += " (does it want texts, not messages? set format: text in its node)"
            if failed > self._max_failure_share * count:
                failure = RewardFailure(
                    f"{text}. That is more than max_reward_failure_share="
                    f"{self._max_failure_share}; correct the reward, or raise the share."
                )
                failure.add_note(raised_at)
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
    """Check that shaping cannot give a wrong answer as much as a right one.

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


def _leave_out(
    dataset: Any,
    rows: list[dict[str, Any]],
    faults: Mapping[int, str],
    checked: int,
    *,
    key: str,
    name: str,
) -> list[dict[str, Any]]:
    """Leave out the rows with faults, and return the others; see :meth:`RewardSet.check_data`."""
    if not faults:
        return rows
    numbers = getattr(dataset, "row_numbers", range(len(dataset)))
    shown = [f"row {numbers[i]}: {shortened(fault, 200)}" for i, fault in faults.items()]
    if len(shown) > 3:
        shown[3:] = ["..."]
    text = (
        f"{key}: the reward {name!r} can score no answer to {len(faults)} of "
        f"{checked} rows (counted from 0): {'; '.join(shown)}."
    )
    if 2 * len(faults) > checked or not hasattr(dataset, "leave_out"):
        raise ValueError(
            f"{text} Correct or remove these rows, name another column in {key}.columns, "
            "or use another reward."
        )
    dataset.leave_out(faults.keys())
    if rank() == 0:
        log.info(f"{text} They are left out.")
    return [row for i, row in enumerate(rows) if i not in faults]
