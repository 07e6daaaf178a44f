"""What a policy is worth on a held-out split: accuracy, pass@k and maj@k, with intervals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from torchtune import utils

from torchtune_grpo.checkpoint import Checkpoints
from torchtune_grpo.config.keys import GRPOConfig
from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.evaluation.statistics import bootstrap_interval, majority, pass_at_k
from torchtune_grpo.evaluation.stopping import best_step, passes, should_stop
from torchtune_grpo.machine.parallel import gather_over_ranks, on_first_rank, rank, world_size
from torchtune_grpo.monitor.progress import make_bar
from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.rollout import RolloutEngine, SamplingParams, roll_out

log = utils.get_logger("INFO")


@dataclass(frozen=True)
class Answer:
    """One response to a prompt."""

    completion: str  # as rewards see it
    tokens: int  # its length
    truncated: bool  # no stop token came in time
    scores: dict[str, float]  # of each reward; 0 where it does not apply or failed
    stated: dict[str, str | None]  # which answer each reward sees, of those that can say it


@dataclass(frozen=True)
class Answered:
    """A prompt and a policy's answers to it."""

    index: int  # in the data set
    prompt: str
    columns: dict[str, Any]  # what rewards know of it
    greedy: Answer  # the most probable one
    samples: list[Answer]  # k of them, drawn as ``eval_sampling`` says


@dataclass(frozen=True)
class Evaluation:
    """A policy's answers to a split, the same on every rank."""

    answered: list[Answered]  # P prompts, in the order of the data set
    reward: str  # the one that decides what is right
    seconds: float  # that the answers and their scores took

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of a line of ``metrics.jsonl``; docs/metrics.md says what they are."""
        return metrics_of(self.answered, self.reward) | {"time/eval": self.seconds}

    @property
    def record(self) -> dict[str, Any]:
        """A line of ``evaluations.jsonl``, but for its step."""
        record: dict[str, Any] = {
            "reward": self.reward,
            "prompt_index": [each.index for each in self.answered],
            "greedy": [each.greedy.scores[self.reward] for each in self.answered],
        }
        if self.answered[0].samples:
            record["samples"] = [[a.scores[self.reward] for a in p.samples] for p in self.answered]
        return record


def metrics_of(answered: Sequence[Answered], reward: str) -> dict[str, float]:
    """What the answers to some prompts are worth, with 95 % intervals, as one reward judges."""
    metrics: dict[str, float] = {}
    for name, values in scores_of(answered, reward).items():
        low, high = bootstrap_interval(values)
        metrics |= {name: float(np.mean(values)), f"{name}/low": low, f"{name}/high": high}
    greedy = [each.greedy for each in answered]
    metrics["eval/mean_length"] = float(np.mean([answer.tokens for answer in greedy]))
    metrics["eval/clipped_ratio"] = float(np.mean([answer.truncated for answer in greedy]))
    return metrics


def scores_of(answered: Sequence[Answered], reward: str) -> dict[str, list[float]]:
    """Metric -> the P numbers, one for each prompt, that it is the mean of."""
    scores = {"eval/accuracy": [each.greedy.scores[reward] for each in answered]}
    samples = [[answer.scores[reward] for answer in each.samples] for each in answered]
    k = len(samples[0])
    for n in passes(k):
        scores[f"eval/pass@{n}"] = [pass_at_k(each, n) for each in samples]
    if k > 1 and reward in answered[0].greedy.stated:
        votes = [majority([a.stated[reward] for a in each.samples]) for each in answered]
        scores[f"eval/maj@{k}"] = [
            0.0 if vote is None else each[vote] for each, vote in zip(samples, votes, strict=True)
        ]
    return scores


class Evaluator:
    """Measures a policy on a held-out split, always with the same noise.

    Args:
        cfg (GRPOConfig): ``eval_reward``, ``eval_samples``, ``eval_sampling`` and the seed are the
            run's.
        dataset (RLDataset): the held-out prompts.
        tokenizer (Any): a torchtune tokenizer.
        rewards (RewardSet): the run's rewards; ``eval_reward`` is the one that decides, or the
            first.

    Raises:
        ValueError: if there is no such reward, or it cannot say what ``keep_best`` needs.
    """

    def __init__(
        self, cfg: GRPOConfig, dataset: RLDataset, *, tokenizer: Any, rewards: RewardSet
    ) -> None:
        if cfg.evaluation.reward is not None and cfg.evaluation.reward not in rewards.names:
            raise ValueError(
                f"evaluation.reward={cfg.evaluation.reward}: no reward of this name; rewards has "
                f"{', '.join(rewards.names)}."
            )
        self._cfg = cfg
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._reward = cfg.evaluation.reward or rewards.names[0]
        named = {reward.name: reward.answer_of for reward in rewards.rewards}
        self._stated = {name: stated for name, stated in named.items() if stated is not None}
        if (cfg.evaluation.keep_best or "").startswith(
            "eval/maj@"
        ) and self._reward not in self._stated:
            raise ValueError(
                f"evaluation.keep_best={cfg.evaluation.keep_best}: the reward {self._reward!r} "
                "cannot say which answer it sees; give eval/accuracy or eval/pass@1."
            )

    def __call__(self, engine: RolloutEngine, *, state: TrainerState | None = None) -> Evaluation:
        """Evaluates a policy; every rank has to call it.

        Args:
            engine (RolloutEngine): of the policy.
            state (TrainerState | None): given to the rewards.
        """
        begun = time.perf_counter()
        mine = range(rank(), len(self._dataset), world_size())
        # A rank without a prompt answers one for nothing: a sharded model needs every rank.
        items = [self._dataset[index] for index in mine or (0,)]
        k, params = self._cfg.evaluation.samples, self._cfg.eval_sampling_params
        with make_bar("Evaluation ", total=len(items) * (1 + k), leave=False) as bar:
            greedy = self._answers(engine, items, params.greedy, 1, state, bar)
            samples = self._answers(engine, items, params, k, state, bar)
        answered = [
            Answered(item["index"], str(item["prompt"]), item["columns"], first[0], more)
            for item, first, more in zip(items, greedy, samples, strict=True)
        ]
        everyone = chain.from_iterable(gather_over_ranks(answered[: len(mine)]))
        return Evaluation(
            answered=sorted(everyone, key=lambda each: each.index),
            reward=self._reward,
            seconds=time.perf_counter() - begun,
        )

    def _answers(
        self,
        engine: RolloutEngine,
        items: list[dict[str, Any]],
        params: SamplingParams,
        samples: int,
        state: TrainerState | None,
        bar: Any,
    ) -> list[list[Answer]]:
        """For each item, so many responses."""
        if samples == 0:
            return [[] for _ in items]
        before = bar.n
        rows = roll_out(
            engine,
            collate_prompts(items),
            tokenizer=self._tokenizer,
            group_size=samples,
            params=params,
            prefill=self._dataset.prefill,
            seed=self._cfg.seed,
            step=-1,  # no training step's noise
            report=lambda now: bar.update(before + now.finished - bar.n),
        )
        bar.update(before + len(items) * samples - bar.n)
        scored = self._rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
            trainer_state=state,
        )
        answers = [
            Answer(
                completion=text,
                tokens=tokens,
                truncated=truncated,
                scores=dict(zip(scored.names, scores, strict=True)),
                stated={name: stated(text) for name, stated in self._stated.items()},
            )
            for text, tokens, truncated, scores in zip(
                rows.completions,
                rows.response_lengths.tolist(),
                rows.truncated.tolist(),
                scored.scores.nan_to_num(0.0).tolist(),
                strict=True,
            )
        ]
        return [answers[i : i + samples] for i in range(0, len(answers), samples)]


class Course:
    """Ends a run and keeps its best checkpoint, as ``keep_best``, ``stop_at`` and ``patience`` say.

    Args:
        cfg (GRPOConfig): the run's config.
        checkpoints (Checkpoints): the run's.
    """

    def __init__(self, cfg: GRPOConfig, checkpoints: Checkpoints) -> None:
        self._cfg, self._checkpoints = cfg, checkpoints
        self.is_over = False

    def judge(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Every rank calls it after an evaluation or a resume; the first one's record decides."""
        best, self.is_over = on_first_rank(self._judge, records)
        self._checkpoints.keep_best(best)

    def _judge(self, records: Sequence[Mapping[str, Any]]) -> tuple[int | None, bool]:
        cfg = self._cfg
        reason = should_stop(
            records,
            metric=cfg.evaluation.keep_best,
            stop_at=cfg.evaluation.stop_at,
            patience=cfg.evaluation.patience,
        )
        if reason is not None:
            log.info(reason)
        return best_step(records, cfg.evaluation.keep_best), reason is not None
