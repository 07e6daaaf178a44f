"""Accuracy and pass@k on a held-out split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.data import RLDataset, collate_prompts
from torchtune_grpo.parallel import gather_over_ranks, rank, world_size
from torchtune_grpo.rewards import RewardSet, TrainerState
from torchtune_grpo.rollout import RolloutEngine, SamplingParams, roll_out


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
        self._state: TrainerState | None = None

    def __call__(
        self, engine: RolloutEngine, *, device: torch.device, state: TrainerState | None = None
    ) -> dict[str, float]:
        """Evaluates a policy.

        Args:
            engine (RolloutEngine): of the policy.
            device (torch.device): where it is.
            state (TrainerState | None): given to the rewards.

        Returns:
            dict[str, float]: ``eval/accuracy`` (greedy); with sampling also ``eval/pass@1`` (mean)
            and ``eval/pass@n`` (share of prompts with at least one right answer among the n).
        """
        self._state = state
        greedy = replace(self._params, temperature=0.0, top_k=None, top_p=None, min_p=None)
        result = {"eval/accuracy": self._scores(engine, greedy, 1, device).mean().item()}
        if self._num_samples > 0:
            scores = self._scores(engine, self._params, self._num_samples, device)
            result["eval/pass@1"] = scores.mean().item()
            if self._num_samples > 1:
                result[f"eval/pass@{self._num_samples}"] = scores.amax(dim=1).mean().item()
        return result

    def _scores(
        self, engine: RolloutEngine, params: SamplingParams, samples: int, device: torch.device
    ) -> Tensor:
        mine = range(rank(), len(self._dataset), world_size())
        items = [self._dataset[index] for index in mine or (0,)]  # every rank rolls out
        rows = roll_out(
            engine,
            collate_prompts(items, pad_id=self._tokenizer.pad_id).to(device),
            tokenizer=self._tokenizer,
            group_size=samples,
            params=params,
            prefill=self._dataset.prefill,
            seed=self._seed,
            step=-1,  # no training step's noise
        )
        scored = self._rewards(
            prompts=rows.prompts,
            completions=rows.completions,
            columns=rows.columns,
            completion_ids=rows.completion_ids,
            trainer_state=self._state,
        )
        scores = scored.scores[:, self._column].nan_to_num(0.0).view(-1, samples)
        return torch.cat(gather_over_ranks(scores[: len(mine)]))  # [prompts of all ranks, samples]
