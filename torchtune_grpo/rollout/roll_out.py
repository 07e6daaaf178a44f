"""From a batch of prompts to the rows that are scored and trained on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.config.keys import SamplingParams
from torchtune_grpo.data import PromptBatch
from torchtune_grpo.machine import interrupt
from torchtune_grpo.rollout.noise import row_keys
from torchtune_grpo.rollout.request import Progress, RolloutEngine, RolloutRequest
from torchtune_grpo.rollout.text import decode_responses, decode_tokens
from torchtune_grpo.trajectory import Trajectory, join_rows, length_mask


def roll_out(
    engine: RolloutEngine,
    prompts: PromptBatch,
    *,
    tokenizer: Any,
    group_size: int,
    params: SamplingParams,
    prefill: str,
    seed: int,
    step: int,
    report: Callable[[Progress], None] | None = None,
) -> Trajectory:
    """Samples a group of responses for each prompt.

    Args:
        engine (RolloutEngine): of the policy.
        prompts (PromptBatch): B prompts.
        tokenizer (Any): a torchtune tokenizer.
        group_size (int): G.
        params (SamplingParams): how to sample.
        prefill (str): the beginning of the answer that the prompts end with.
        seed (int): of the run.
        step (int): of the run. The noise is a function of seed, step, prompt and sample.
        report (Callable[[Progress], None] | None): told of the progress now and then.

    Returns:
        Trajectory: N = B*G rows, prompt-major, not yet scored.

    Raises:
        Interrupted: if the run is to end, on all ranks.
    """
    stop_tokens = tokenizer.stop_tokens
    samples = engine.generate(
        RolloutRequest(
            prompts=prompts.tokens,
            group_size=group_size,
            params=params,
            stop_tokens=stop_tokens,
            keys=row_keys(
                seed=seed,
                step=step,
                prompt_indices=prompts.indices,
                group_size=group_size,
                uses=prompts.uses,
            ),
            decode=partial(decode_tokens, tokenizer),
            report=report,
        )
    )
    interrupt.check()
    tokens, prompt_lengths = join_rows(prompts.tokens, samples)

    def of_rows(of_prompts: list[int]) -> Tensor:
        return torch.tensor(of_prompts, device=tokens.device).repeat_interleave(group_size)  # [N]

    return Trajectory(
        tokens=tokens,
        prompt_indices=of_rows(prompts.indices),
        places=of_rows(prompts.places),
        prompt_lengths=prompt_lengths,
        response_lengths=samples.lengths,
        response_mask=length_mask(samples.lengths, samples.responses.shape[1]),
        truncated=samples.truncated,
        sampler_logprobs=samples.sampler_logprobs,
        behaviour_logprobs=samples.behaviour_logprobs,
        prompts=_repeat(prompts.prompts, group_size),
        completions=decode_responses(tokenizer, samples, stop_tokens=stop_tokens, prefill=prefill),
        columns={name: _repeat(values, group_size) for name, values in prompts.columns.items()},
    )


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]
