"""Which of a step's groups are kept for reading, whole, and what is kept of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchtune_grpo.config.text import plain
from torchtune_grpo.machine.parallel import gather_over_ranks
from torchtune_grpo.rewards import RewardScores
from torchtune_grpo.trajectory import Trajectory, length_mask

_LONGEST_COLUMN = 2_000  # characters of a data set's column; the rest is left out

Records = list[dict[str, Any]]


def why_ended(
    trajectory: Trajectory, *, stop_tokens: Sequence[int], max_generated_tokens: int
) -> list[str]:
    """What ended each of N responses: ``stop_token``, ``stop_string``, ``length`` or ``deadline``.

    One that a stop token ended after it had completed a stop string counts as the former.
    """
    ends = (trajectory.prompt_lengths + trajectory.response_lengths - 1).clamp(min=0)
    last = trajectory.tokens.gather(1, ends[:, None])[:, 0].tolist()
    rows = zip(
        trajectory.truncated.tolist(), last, trajectory.response_lengths.tolist(), strict=True
    )
    return [
        ("length" if length >= max_generated_tokens else "deadline")
        if truncated
        else ("stop_token" if token in stop_tokens else "stop_string")
        for truncated, token, length in rows
    ]


class GroupRecorder:
    """Chooses groups of a step, and makes their records.

    Args:
        num_groups (int): kept of each step, of all ranks together.
        group_size (int): G.
        accuracy_reward (str | None): the reward whose mean is a group's pass rate; None takes the
            first.
        stop_tokens (Sequence[int]): of the tokenizer.
        max_generated_tokens (int): the longest response.
        seed (int): of the choice. Informative groups come first.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        group_size: int,
        accuracy_reward: str | None,
        stop_tokens: Sequence[int],
        max_generated_tokens: int,
        seed: int,
    ) -> None:
        self._num_groups = num_groups
        self._size = group_size
        self._accuracy_reward = accuracy_reward
        self._why_ended = partial(
            why_ended, stop_tokens=stop_tokens, max_generated_tokens=max_generated_tokens
        )
        self._seed = seed
        self._scored: list[tuple[Trajectory, RewardScores]] = []
        self._trained: list[tuple[Trajectory, Tensor]] = []

    def scored(self, trajectory: Trajectory, scores: RewardScores) -> None:
        """Takes note of N rows with advantages, whole groups."""
        self._scored.append((trajectory, scores))

    def trained(self, trajectory: Trajectory, logprobs: Tensor) -> None:
        """Takes note of the trainer's log-probs [N, L], of the rows that were trained on."""
        self._trained.append((trajectory, logprobs))

    def take(self, step: int) -> tuple[list[Records], dict[str, list[Any]]]:
        """What the step's groups say; it forgets them. Every rank has to call it.

        Returns:
            tuple[list[Records], dict[str, list[Any]]]: the chosen groups, a record for each
            completion; and of all groups ``prompt_index``, ``pass_rate`` and ``reward``.
        """
        candidates, summary = [], []
        for trajectory, scores in self._scored:
            candidates += self._ranked(trajectory, scores, step)
            summary += self._summary(trajectory, scores)
        candidates = sorted(candidates, key=lambda each: each[0])[: self._num_groups]
        logprobs = self._trainer_logprobs() if candidates else {}
        mine = [
            (key, self._records(t, s, first, step, logprobs)) for key, t, s, first in candidates
        ]
        self._scored, self._trained = [], []
        ranks = gather_over_ranks((mine, summary))
        chosen = sorted(sum((found for found, _ in ranks), []), key=lambda each: each[0])
        names = ("prompt_index", "pass_rate", "reward")
        groups = sorted(sum((of_rank for _, of_rank in ranks), []), key=lambda each: each[0])
        columns = [[*values] for values in zip(*groups, strict=True)][1:]
        return (
            [records for _, records in chosen[: self._num_groups]],
            dict(zip(names, columns, strict=False)),
        )

    def _trainer_logprobs(self) -> dict[tuple[int, ...], float]:
        found: dict[tuple[int, ...], float] = {}
        for trajectory, logprobs in self._trained:
            means = _mean_logprobs(trajectory, logprobs)
            found |= dict(zip(_keys(trajectory), means, strict=True))
        return found

    def _ranked(self, trajectory: Trajectory, scores: RewardScores, step: int) -> list[Any]:
        """A sort key for each group, and where the group is."""
        assert trajectory.advantages is not None
        teaches = (trajectory.advantages.view(-1, self._size) != 0).any(dim=1).tolist()  # [B]
        indices = trajectory.prompt_indices[:: self._size].tolist()
        return [
            (
                (not useful, random.Random(f"{self._seed} {step} {index}").random(), index),
                trajectory,
                scores,
                group * self._size,
            )
            for group, (useful, index) in enumerate(zip(teaches, indices, strict=True))
        ]

    def _summary(self, trajectory: Trajectory, scores: RewardScores) -> list[tuple[Any, ...]]:
        name = self._accuracy_reward or scores.names[0]
        right = scores.scores[:, scores.names.index(name)].nan_to_num(0.0)
        of_groups = (values.view(-1, self._size).mean(dim=1) for values in (right, scores.total))
        of_prompts = (trajectory.places, trajectory.prompt_indices)
        columns = (*(values[:: self._size] for values in of_prompts), *of_groups)
        return [*zip(*(plain(values) for values in columns), strict=True)]

    def _records(
        self,
        trajectory: Trajectory,
        scores: RewardScores,
        first: int,
        step: int,
        logprobs: dict[tuple[int, ...], float],
    ) -> Records:
        rows = trajectory.select(_range(first, self._size, trajectory.tokens))
        assert rows.advantages is not None
        ended = self._why_ended(rows)
        own = _mean_logprobs(rows, rows.sampler_logprobs)
        records = []
        for sample, key in enumerate(_keys(rows)):
            row = first + sample
            failed = zip(scores.names, scores.failed[row].tolist(), strict=True)
            record = {
                "step": step,
                "prompt_index": key[0],
                "sample": sample,
                "prompt": rows.prompts[sample],
                "columns": {name: _cut(values[sample]) for name, values in rows.columns.items()},
                "completion": rows.completions[sample],
                "tokens": rows.response_lengths[sample],
                "ended": ended[sample],
                "reward": scores.total[row],
                "rewards": dict(zip(scores.names, scores.scores[row].tolist(), strict=True)),
                "failed": [name for name, is_failed in failed if is_failed],
                "advantage": rows.advantages[sample],
                "sampler_logprob": own[sample],
                "trainer_logprob": logprobs.get(key),
                "extra": {name: values[row] for name, values in scores.extra.items()},
            }
            records.append(plain(record))
        return records


def _range(first: int, count: int, like: Tensor) -> Tensor:
    return like.new_tensor(range(first, first + count))


def _keys(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """What tells completions apart, wherever a fork has moved their rows: prompt and tokens."""
    indices = trajectory.prompt_indices.tolist()
    return [(i, *ids) for i, ids in zip(indices, trajectory.completion_ids, strict=True)]


def _mean_logprobs(trajectory: Trajectory, logprobs: Tensor) -> list[float]:
    """Over all of a response's tokens, trained on or not: [N, L] -> N numbers."""
    lengths = trajectory.response_lengths
    total = logprobs.where(length_mask(lengths, logprobs.shape[1]), 0).sum(dim=1)
    means: list[float] = (total / lengths.clamp(min=1)).tolist()
    return means


def _cut(value: Any) -> Any:
    value = plain(value)
    return value[:_LONGEST_COLUMN] if isinstance(value, str) else value
