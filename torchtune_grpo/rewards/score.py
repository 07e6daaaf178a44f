"""Scoring a batch of completions with several weighted rewards, on one rank or on many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torchtune.utils import get_logger, log_rank_zero

from torchtune_grpo.advantages import total_reward
from torchtune_grpo.config.text import shortened, visible
from torchtune_grpo.data.dataset import Item, PromptData
from torchtune_grpo.machine.interrupt import breakable
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank
from torchtune_grpo.rewards.call import Batch, Outcome, TrainerState, call_all
from torchtune_grpo.rewards.reward import Reward, make_reward
from torchtune_grpo.rewards.workers import ContractError
from torchtune_grpo.trajectory import Completion, Prompt

log = get_logger("INFO")

_OF_ROWS = ("scores", "total", "failed")  # tensors [N, ...] of RewardScores


class RewardFailure(RuntimeError):
    """A reward failed on more completions than the config allows."""

    says_all = True  # no traceback is shown


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
    extra: dict[str, list[object]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)  # "reward/name" of log_metric
    wrong: str | None = None  # if no answer is right: one of them, beside what it should be

    def of(self, name: str) -> Tensor:
        """Return the scores [N] of a reward."""
        return self.scores[:, self.names.index(name)]

    def select(self, rows: Tensor) -> RewardScores:
        extra = {name: [values[row] for row in rows] for name, values in self.extra.items()}
        tensors: Any = {name: getattr(self, name)[rows] for name in _OF_ROWS}
        return replace(self, **tensors, extra=extra)

    @classmethod
    def join(cls, parts: Sequence[RewardScores]) -> RewardScores:
        tensors: Any = {n: torch.cat([getattr(part, n) for part in parts]) for n in _OF_ROWS}
        names = sorted({name for part in parts for name in part.extra})
        return replace(
            parts[0],
            **tensors,
            seconds=[sum(of_reward) for of_reward in zip(*(part.seconds for part in parts))],
            extra={
                name: list(chain(*(p.extra.get(name, [None] * len(p.total)) for p in parts)))
                for name in names
            },
            metrics=[metric for part in parts for metric in part.metrics],
        )


@dataclass(frozen=True)
class Decider:
    """The reward that decides which answers are right; every part of a run follows this one."""

    reward: Reward
    is_known: bool  # the config names it, or it declares that it tells right from wrong

    @property
    def name(self) -> str:
        return self.reward.name

    @property
    def measure(self) -> str:
        """The name of its mean: accuracy, or its own name if nobody says that it decides."""
        return "accuracy" if self.is_known else self.name


class RewardSet:
    """R weighted rewards, checked before the first completion is scored.

    Rewards of the same name, with other rows to score each (``only``), are parts of one.
    ``deciding`` names the reward that decides what is right. Without it, that is the first one that
    declares so: of those that train, if any does. If none declares so, it is the first reward.
    ``max_failure_share`` is the share of a call's completions, over all ranks, on which a reward
    may fail; if it fails on more, the call raises. ``seed`` is the run's, for isolated rewards.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        deciding: str | None = None,
        max_failure_share: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.rewards = list(rewards)
        self._deciding, self._seed = deciding, seed
        self._max_failure_share = max_failure_share
        if not self.rewards:
            raise ValueError(
                "rewards: there is none; give a list of components, or an environment with "
                "get_reward() or step(text)."
            )
        for index, reward in enumerate(self.rewards):
            for other in self.rewards[:index]:
                if other.name == reward.name and not _are_parts(other, reward):
                    raise ValueError(
                        f"rewards[{index}].name={reward.name!r}: used twice; give each reward a "
                        "name of its own, or the same weight and rows of its own (`only`)."
                    )
            reward.check(f"rewards[{index}]")
        if deciding is not None and deciding not in self.names:
            raise ValueError(
                f"deciding_reward={deciding}: no reward of this name; rewards has "
                f"{', '.join(self.names)}."
            )
        _check_shaping(self.rewards)

    @classmethod
    def from_config(
        cls,
        cfg: Sequence[Mapping[str, object] | Reward],
        objects: Mapping[str, object] | None = None,
        **keys: Any,
    ) -> RewardSet:
        """Build the set that the config's list ``rewards`` describes; see docs/rewards.md.

        ``objects`` holds components that no config can name, by key, such as ``rewards.0``.
        """
        made = [
            node
            if isinstance(node, Reward)
            else make_reward(node, f"rewards[{index}]", (objects or {}).get(f"rewards.{index}"))
            for index, node in enumerate(cfg)
        ]
        return cls(made, **keys)

    @property
    def names(self) -> list[str]:
        return [*dict.fromkeys(reward.name for reward in self.rewards)]

    def answer_of(self, name: str) -> Callable[[str], str | None] | None:
        """Return what finds the answer that a reward reads; None if there is none, or several."""
        first, *others = [reward.answer_of for reward in self.rewards if reward.name == name]
        return None if others else first

    @property
    def ranges(self) -> dict[str, tuple[float, float] | None]:
        """The lowest and the highest value that each reward declares."""
        return {reward.name: reward.reward_range for reward in self.rewards}

    @property
    def decider(self) -> Decider:
        """The reward that decides what is right."""
        return self.deciders[0]

    @cached_property
    def deciders(self) -> list[Decider]:
        """The rewards that tell right from wrong, the deciding one first; or else the first one."""
        known = [r for r in self.rewards if r.name == self._deciding or r.decides]
        # The one that is named comes first, and then those that train.
        known.sort(key=lambda reward: (reward.name != self._deciding, reward.weight == 0))
        first = {reward.name: Decider(reward, True) for reward in reversed(known)}
        names = dict.fromkeys(reward.name for reward in known)
        return [first[name] for name in names] or [Decider(self.rewards[0], False)]

    def gate(self, wanted: bool | None) -> str | None:
        """Name the reward that has to differ within a group before the others may train on it.

        It is the deciding one, if that trains or is named, and others train, too; None: no gate.
        ``wanted``: the key ``objective.outcome_gate``; None is "where it can be".
        """
        reward, is_known = self.decider.reward, self.decider.is_known
        others = {r.name: None for r in self.rewards if r.name != reward.name and r.weight}
        decides = is_known and (reward.weight != 0 or reward.name == self._deciding)
        if wanted and not decides:
            raise ValueError(
                "objective.outcome_gate=True: no reward is known to decide; name it in "
                "deciding_reward."
            )
        if wanted is False or not decides or not others:
            return None
        text = f"Groups in which {reward.name} is the same for all are skipped, so that "
        log_rank_zero(log, f"{text}{', '.join(others)} alone trains none (objective.outcome_gate).")
        return reward.name

    def check_data(self, dataset: PromptData, *, key: str) -> None:
        """Leave out the rows of the data set ``key`` for which a reward cannot score any answer.

        No reward is called, but a ``CodeReward`` tries rows' tests on the first rank. Raises a
        ValueError if more than half of the rows would have to be left out.
        """
        remedy = (
            f"Correct or remove these rows, name another column in {key}.columns, or use another "
            "reward."
        )
        for reward in self.rewards:
            if reward.only:
                _check_own_columns(reward, dataset, key)
            else:
                reward.check_columns(dataset[0]["columns"], data=key)
            faults = partial(_row_faults, reward.name, reward.row_faults)
            dataset.check(faults, where=key, remedy=remedy)
            tried = partial(_row_faults, reward.name, partial(on_first_rank, reward.tried_faults))
            dataset.check(tried, where=key, remedy=remedy, drawn_rows=False)

    def __call__(
        self,
        *,
        prompts: Sequence[str | Prompt],
        completions: Sequence[str | Completion],
        columns: Mapping[str, Sequence[object]],
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
            reward.check_only(columns)
            reward.check_columns(columns)
        batch = Batch(
            [*map(Prompt.of, prompts)],
            [*map(Completion.of, completions)],
            columns,
            completion_ids,
            trainer_state,
            self._seed,
        )
        outcomes = breakable(partial(call_all, self.rewards, batch))
        self._check_failures(outcomes)
        return self._with_answers(self._scores(outcomes, group_size), batch)

    def _with_answers(self, scores: RewardScores, batch: Batch) -> RewardScores:
        """Add the share of completions without an answer for the deciding reward, and a wrong one.

        A reward that finds no answers by itself (``answer_of``) adds nothing.
        """
        reward = self.decider.reward
        outcomes, answer_of = scores.of(reward.name), self.answer_of(reward.name)
        known = int((~outcomes.isnan()).sum())
        if answer_of is None or not known:
            return scores
        rows = (outcomes <= 0).nonzero()[:, 0].tolist()
        answers = {row: answer_of(batch.completions[row].text) for row in rows}
        stated = {row: answer for row, answer in answers.items() if answer is not None}
        share = (len(answers) - len(stated)) / known
        metrics = [*scores.metrics, (f"{reward.name}/no_answer", share)]
        if not stated or len(answers) < known:
            return replace(scores, metrics=metrics)
        row, answer = next(iter(stated.items()))
        read = [name for name in reward.columns if name in batch.columns]
        golds = [f"{name} is {shortened(str(batch.columns[name][row]))}" for name in read]
        text = f"{shortened(str(answer))} where {', '.join(golds)}"
        return replace(scores, metrics=metrics, wrong=text)

    def close(self) -> None:
        """End the processes of rewards that have any; the set can be used again."""
        for reward in self.rewards:
            reward.close()

    def _check_failures(self, outcomes: Mapping[str, Outcome]) -> None:
        """Raise on every rank if one has a broken reward, or if there are too many failures."""
        broken = next((visible(str(o.broken)) for o in outcomes.values() if o.broken), None)
        first = {reward.name: reward for reward in reversed(self.rewards)}
        failures = [outcomes[name].failures(first[name].format) for name in self.names]
        ranks = gather_over_ranks((broken, failures))
        for text, _ in ranks:
            if text is not None:
                raise ContractError(text)
        for index, name in enumerate(self.names):
            counts, numbers, errors, places = zip(*(part[index] for _, part in ranks), strict=True)
            failed, count = sum(numbers), sum(counts)
            if not failed:
                continue
            error, raised_at = next(pair for pair in zip(errors, places, strict=True) if pair[0])
            text = f"The reward {name!r} failed on {failed} of {count} completions, {error}"
            if failed > self._max_failure_share * count:
                failure = RewardFailure(
                    f"{text}. That is more than max_reward_failure_share="
                    f"{self._max_failure_share}; correct the reward, or raise the share."
                )
                failure.add_note(raised_at)
                raise failure
            if rank() == 0:
                log.warning(text)

    def _scores(self, named: Mapping[str, Outcome], group_size: int) -> RewardScores:
        outcomes = named.values()
        rows = [[s if isinstance(s, float) else math.nan for s in o.scores] for o in outcomes]
        failures = [[isinstance(s, BaseException) for s in o.scores] for o in outcomes]
        scores = torch.tensor(rows, dtype=torch.float32).T.contiguous()  # [N, R]
        failed = torch.tensor(failures, dtype=torch.bool).T.contiguous()  # [N, R]
        weights = {reward.name: reward.weight for reward in self.rewards}
        weighted = torch.tensor([*weights.values()], dtype=torch.float32)
        given = Counter(column for outcome in outcomes for column in outcome.extra)
        return RewardScores(
            names=self.names,
            scores=scores,
            weights=weighted,
            total=total_reward(scores, failed, weighted, group_size=group_size),
            seconds=[outcome.seconds for outcome in outcomes],
            failed=failed,
            extra={
                column if given[column] == 1 else f"{name}/{column}": values
                for name, outcome in named.items()
                for column, values in outcome.extra.items()
            },
            metrics=[
                (f"{name}/{metric}", x) for name, o in named.items() for metric, x in o.metrics
            ],
        )


def _check_shaping(rewards: Sequence[Reward]) -> None:
    """Check that shaping cannot give a wrong answer as much as a right one.

    A reward that ``decides`` gives a right answer at least 1 more than a wrong one; any other with
    a ``reward_range`` can favour a wrong answer by at most the width of that range.
    """
    for each in rewards:  # on the rows that it scores
        scoring = [reward for reward in rewards if reward.covers(each)]
        deciding = [reward for reward in scoring if reward.decides and reward.weight]
        gap = sum(reward.weight for reward in deciding)
        spans = {
            reward.name: abs(reward.weight) * (reward.reward_range[1] - reward.reward_range[0])
            for reward in scoring
            if reward.reward_range and not reward.decides
        }
        for reward in deciding:
            if reward.weight < 0:
                key = f"rewards.{rewards.index(reward)}.weight={reward.weight:g}"
                raise ValueError(f"{key}: wrong answers would score above right ones.")
        if deciding and sum(spans.values()) >= gap:
            listed = ", ".join(f"{name} {span:g}" for name, span in spans.items())
            raise ValueError(
                f"rewards: together {listed} can outweigh what makes a right answer better than a "
                f"wrong one ({gap:g}); lower their weights until their sum is less."
            )


def _are_parts(one: Reward, other: Reward) -> bool:
    """Whether two rewards of the same name never score the same row, with the same weight."""
    return one.excludes(other) and one.weight == other.weight


def _check_own_columns(reward: Reward, dataset: PromptData, key: str) -> None:
    """Check that a reward with ``only`` has rows, and that they have the columns it needs."""
    scored = list[Mapping[str, object]]()
    reward.check_only(dataset[0]["columns"], data=key)

    def check(items: Sequence[Item]) -> dict[int, str | None]:
        rows = [item["columns"] for item in items if reward.applies_to(item["columns"])]
        for row in rows[:1]:
            reward.check_columns([n for n, value in row.items() if value is not None], data=key)
        scored.extend(rows)
        return {}

    dataset.check(check, where=key, drawn_rows=False)
    if key == "dataset" and not scored:
        only = f"The reward {reward.name!r} has only={dict(reward.only)}"
        raise ValueError(f"{only}, but no row of {key} has these; correct it.")


def _row_faults(
    name: str, check: Callable[..., Mapping[int, str | None]], items: Sequence[Item]
) -> dict[int, str | None]:
    """Return what keeps the reward ``name`` from scoring answers to items, as its check says."""
    faults = check([item["columns"] for item in items])
    begin = f"the reward {name!r} can score no answer: "
    return {i: None if fault is None else f"{begin}{fault}" for i, fault in faults.items()}
