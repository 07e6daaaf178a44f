"""Dynamic sampling: groups that teach nothing are replaced while the others are still sampled.

Source: DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2). Of a step's B prompts some fail, that
is their groups do not pass the filter; as many of the next prompts come, of which some fail, and so
on, ``max_resamples`` times. Which prompts come depends on which groups fail and not on when that is
known: each failure makes one more prompt necessary, whatever becomes of the other groups. So it
begins at once, beside the rows that are still sampled, and its rows are never sampled in vain.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Collection
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config.keys import DynamicSamplingConfig, GRPOConfig
from torchtune_grpo.data import PromptBatch, RLDataset
from torchtune_grpo.machine.parallel import Bulletin, rank, world_size
from torchtune_grpo.monitor.metrics import StepMetrics
from torchtune_grpo.rewards import RewardScores, RewardSet, TrainerState
from torchtune_grpo.rewards.call import Outcome
from torchtune_grpo.rollout import decode_responses
from torchtune_grpo.trajectory import Samples, Trajectory

_POLL_SECONDS = 0.01  # between two looks at what other ranks have posted


class DynamicSampling:
    """What the steps of a run share; see :meth:`begin`.

    Args:
        cfg (GRPOConfig): ``dynamic_sampling`` and ``grpo_samples`` are read.
        rewards (RewardSet): the run's.
        tokenizer (Any): a torchtune tokenizer.
        dataset (RLDataset): its prompts may end with the beginning of the answer.

    Raises:
        ValueError: if there is no reward of the name that the config gives.
    """

    def __init__(
        self, cfg: GRPOConfig, *, rewards: RewardSet, tokenizer: Any, dataset: RLDataset
    ) -> None:
        self.settings, self.group_size = cfg.dynamic_sampling, cfg.grpo_samples
        self.batch_size = cfg.batch_size * world_size()
        self.rewards, self.tokenizer, self.prefill = rewards, tokenizer, dataset.prefill
        self.bulletin = Bulletin.of_all_ranks() if self.settings.max_resamples else None
        name = self.settings.reward
        if name is not None and name not in rewards.names:
            raise ValueError(
                f"dynamic_sampling.reward={name}: no reward of this name; rewards has "
                f"{', '.join(rewards.names)}."
            )

    def begin(self, prompts: PromptBatch, state: TrainerState) -> Resampling | None:
        """A step's; None if nothing is to be replaced.

        Args:
            prompts (PromptBatch): this rank's, the spare ones behind the others.
            state (TrainerState): for the rewards.
        """
        if not self.settings.max_resamples:
            return None
        return Resampling(self, prompts, state)


def wanted_prompts(failed: Collection[int], *, batch_size: int, rounds: int) -> int:
    """How many prompts a step takes if those at some places have failed.

    It only grows with them, so that what few failures ask for, more ask for as well.
    """
    count = batch_size
    for _ in range(rounds):
        count = batch_size + sum(place < count for place in failed)
    return count


def passes_filter(scores: RewardScores, settings: DynamicSamplingConfig) -> bool:
    """Whether a group's rewards [G] differ, and their mean is within the bounds."""
    values = scores.total
    if settings.reward is not None:
        column = scores.scores[:, scores.names.index(settings.reward)]
        values = column[~column.isnan()]
    if not len(values) or bool((values == values[0]).all()):
        return False
    low, high = settings.min_pass_rate, settings.max_pass_rate
    mean = float(values.double().mean())
    return (low is None or low <= mean) and (high is None or mean <= high)


class Resampling:
    """One step's rollout, which is scored group by group, by a thread of its own.

    An :class:`~torchtune_grpo.rollout.Admission`: the rollout tells it of each group that has
    ended, and is told how many prompts may begin.
    """

    def __init__(self, run: DynamicSampling, prompts: PromptBatch, state: TrainerState) -> None:
        self._run, self._prompts, self._state = run, prompts, state
        self._answers: dict[int, list[Outcome]] = {}  # by the prompt's place in the request
        self._is_kept: dict[int, bool] = {}  # by the group's place in the step, of all ranks
        self._wanted = run.batch_size
        self._lines: list[str] = []  # "place is_kept", of all ranks
        self._looked = 0.0
        self._work: SimpleQueue[tuple[int, Samples] | None] = SimpleQueue()
        self._news: SimpleQueue[tuple[int, list[Outcome], bool] | Exception] = SimpleQueue()
        threading.Thread(target=self._score, daemon=True).start()  # a reward may hang

    def allowed(self) -> int:
        """How many of this rank's prompts may begin."""
        self._look()
        return bisect_left(self._prompts.places, self._wanted)

    def is_final(self) -> bool:
        """Whether no more will, on any rank: all that may have begun have been judged."""
        self._look()
        return len(self._is_kept) == self._wanted

    def ended(self, prompt: int, samples: Samples) -> None:
        """Has a group scored, by its place among this rank's prompts."""
        self._work.put((prompt, samples.to(torch.device("cpu"))))

    def wait(self) -> None:
        """A moment."""
        time.sleep(_POLL_SECONDS)

    def scores(self) -> RewardScores:
        """Of all groups; every rank has to call it.

        Raises:
            ValueError, RewardFailure: see :class:`~torchtune_grpo.rewards.RewardSet`.
        """
        self._work.put(None)
        answers = [self._answers[prompt] for prompt in sorted(self._answers)]
        scores = self._run.rewards.combine(answers, group_size=self._run.group_size)
        if self._run.bulletin is not None and rank() == 0:
            self._run.bulletin.clear()  # all have read it, and none is in the next step
        return scores

    def kept(self, trajectory: Trajectory) -> Tensor:
        """Which rows are trained on: [N] bool, whole groups."""
        kept = [self._is_kept[place] for place in trajectory.places.tolist()]
        return torch.tensor(kept, dtype=torch.bool)

    def add_metrics(self, metrics: StepMetrics, trajectory: Trajectory) -> None:
        """Adds what was sampled besides, and for nothing."""
        failed, rounds = self._failed, self._run.settings.max_resamples
        sizes = {
            wanted_prompts(failed, batch_size=self._run.batch_size, rounds=n)
            for n in range(rounds + 1)
        }
        numbers = {
            "rounds": len(sizes) - 1,
            "kept": 1 - len(failed) / self._wanted,
            "missing": self._run.batch_size - (self._wanted - len(failed)),
        }
        for name, value in numbers.items():
            metrics.add_max(f"dynamic_sampling/{name}", float(value))
        dropped = ~self.kept(trajectory).to(trajectory.tokens.device)
        metrics.add_dropped(trajectory.response_lengths[dropped])

    @property
    def _failed(self) -> list[int]:
        return [place for place, is_kept in self._is_kept.items() if not is_kept]

    def _look(self) -> None:
        """Hears of the groups that were scored, here and on other ranks."""
        board = self._run.bulletin
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Exception):
                raise news
            prompt, self._answers[prompt], is_kept = news
            line = f"{self._prompts.places[prompt]} {is_kept:d}"
            self._lines.append(line) if board is None else board.post(line)
        if board is not None and time.monotonic() - self._looked > _POLL_SECONDS:
            self._lines, self._looked = board.read(), time.monotonic()
        if len(self._lines) > len(self._is_kept):
            verdicts = (map(int, line.split()) for line in self._lines)
            self._is_kept = {place: bool(is_kept) for place, is_kept in verdicts}
            rounds = self._run.settings.max_resamples
            size = self._run.batch_size
            self._wanted = wanted_prompts(self._failed, batch_size=size, rounds=rounds)

    def _score(self) -> None:
        """The thread: works until it is told to end, and tells of what it cannot do."""
        while (work := self._work.get()) is not None:
            try:
                self._news.put(self._scored(*work))
            except Exception as error:
                self._news.put(error)

    def _scored(self, prompt: int, samples: Samples) -> tuple[int, list[Outcome], bool]:
        run, count = self._run, self._run.group_size
        stops = run.tokenizer.stop_tokens
        lengths = samples.lengths.tolist()
        rows = zip(samples.responses.tolist(), lengths, strict=True)
        answers = run.rewards.call(
            prompts=[self._prompts.prompts[prompt]] * count,
            completions=decode_responses(
                run.tokenizer, samples, stop_tokens=stops, prefill=run.prefill
            ),
            columns={name: [v[prompt]] * count for name, v in self._prompts.columns.items()},
            completion_ids=[tokens[:length] for tokens, length in rows],
            trainer_state=self._state,
        )
        scores = run.rewards.scores(answers, group_size=count)
        return prompt, answers, scores is None or passes_filter(scores, run.settings)
