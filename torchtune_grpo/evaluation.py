"""Accuracy and pass@k on a held-out split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.parallel import gather_over_ranks, rank, world_size
from torchtune_grpo.progress import make_bar
from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.rollout import RolloutEngine, SamplingParams, roll_out


def pass_rates(scores: Tensor) -> dict[str, float]:
    """How often a prompt is solved by one of its samples, and by any of them.

    Args:
        scores (Tensor): [P, n] of n samples for each prompt, 0 or 1; nan counts as 0.

    Returns:
        dict[str, float]: ``pass@1``, the mean score; and with several samples ``pass@n``, the share
        of prompts that have at least one right answer.
    """
    scores = scores.nan_to_num(0.0)
    rates = {"pass@1": scores.mean().item()}
    if scores.shape[1] > 1:
        rates[f"pass@{scores.shape[1]}"] = scores.amax(dim=1).mean().item()
    return rates


class Evaluator:
    """Measures a policy on a held-out split, always with the same noise.

    Args:
        dataset (RLDataset): the held-out prompts.
        tokenizer (Any): a torchtune tokenizer.
        rewards (RewardSet): the run's rewards.
        accuracy_reward (str | None): name of the reward whose mean is the accuracy (a 0/1 reward);
            None takes the first.
        params (SamplingParams): the training's; its temperature is used for the sampled responses.
        num_samples (int): sampled responses a prompt, 0 for greedy only.
        seed (int): of the sampler.

    Raises:
        ValueError: if there is no reward of the given name.
    """

    def __init__(
        self,
        *,
        dataset: RLDataset,
        tokenizer: Any,
        rewards: RewardSet,
        accuracy_reward: str | None,
        params: SamplingParams,
        num_samples: int,
        seed: int,
    ) -> None:
        if accuracy_reward is not None and accuracy_reward not in rewards.names:
            raise ValueError(
                f"eval_reward={accuracy_reward}: no reward of this name; rewards has "
                f"{', '.join(rewards.names)}."
            )
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._column = rewards.names.index(accuracy_reward) if accuracy_reward else 0
        self._params = params
        self._num_samples = num_samples
        self._seed = seed

    def __call__(
        self, engine: RolloutEngine, *, state: TrainerState | None = None
    ) -> dict[str, float]:
        """Evaluates a policy.

        Args:
            engine (RolloutEngine): of the policy.
            state (TrainerState | None): given to the rewards.

        Returns:
            dict[str, float]: ``eval/accuracy`` (greedy); with sampling also ``eval/`` and what
            :func:`pass_rates` returns.
        """
        total = len(self._mine) * (1 + self._num_samples)
        with make_bar("Evaluation", total=total, leave=False) as bar:
            scores = self._scores(engine, self._params.greedy, samples=1, state=state, bar=bar)
            result = {"eval/accuracy": pass_rates(scores)["pass@1"]}
            if self._num_samples > 0:
                n = self._num_samples
                scores = self._scores(engine, self._params, samples=n, state=state, bar=bar)
                result |= {f"eval/{name}": rate for name, rate in pass_rates(scores).items()}
        return result

    @property
    def _mine(self) -> range:
        """This rank's prompts."""
        return range(rank(), len(self._dataset), world_size())

    def _scores(
        self,
        engine: RolloutEngine,
        params: SamplingParams,
        *,
        samples: int,
        state: TrainerState | None,
        bar: Any,
    ) -> Tensor:
        """[prompts of all ranks, samples], rank by rank."""
        mine, before = self._mine, bar.n
        # A rank without a prompt rolls one out for nothing: a sharded model needs every rank.
        rows = roll_out(
            engine,
            collate_prompts([self._dataset[index] for index in mine or (0,)]),
            tokenizer=self._tokenizer,
            group_size=samples,
            params=params,
            prefill=self._dataset.prefill,
            seed=self._seed,
            step=-1,  # no training step's noise
            report=lambda now: bar.update(before + now.finished - bar.n),
        )
        bar.update(before + len(mine) * samples - bar.n)
        scored = self._rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
            trainer_state=state,
        )
        scores = scored.scores[:, self._column].view(-1, samples)
        return torch.cat(gather_over_ranks(scores[: len(mine)]))
