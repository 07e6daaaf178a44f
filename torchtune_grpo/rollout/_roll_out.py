"""From a batch of prompts to the rows that are scored and trained on."""

from __future__ import annotations

from typing import Any

import torch
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout._torchtune import SamplingParams, generate
from torchtune_grpo.text import decode_responses
from torchtune_grpo.trajectory import Trajectory, join_rows, length_mask


def roll_out(
    model: TransformerDecoder,
    prompts: PromptBatch,
    *,
    tokenizer: Any,
    group_size: int,
    params: SamplingParams,
    prefill: str,
    generator: torch.Generator,
) -> Trajectory:
    """Samples a group of responses for each prompt.

    Args:
        model (TransformerDecoder): the policy.
        prompts (PromptBatch): B prompts on the model's device.
        tokenizer (Any): a torchtune tokenizer.
        group_size (int): G.
        params (SamplingParams): how to sample.
        prefill (str): the beginning of the answer that the prompts end with.
        generator (torch.Generator): on the model's device.

    Returns:
        Trajectory: N = B*G rows, prompt-major, not yet scored.
    """
    stop_tokens = tokenizer.stop_tokens
    samples = generate(
        model,
        prompts,
        group_size=group_size,
        params=params,
        stop_tokens=stop_tokens,
        generator=generator,
    )
    tokens, prompt_lengths = join_rows(
        prompt_tokens=prompts.tokens, prompt_lengths=prompts.lengths, samples=samples
    )
    return Trajectory(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        response_mask=length_mask(samples.lengths, samples.responses.shape[1]),
        truncated=samples.truncated,
        sampler_logprobs=samples.logprobs,
        prompts=_repeat(prompts.prompts, group_size),
        completions=decode_responses(tokenizer, samples, stop_tokens=stop_tokens, prefill=prefill),
        columns={name: _repeat(values, group_size) for name, values in prompts.columns.items()},
    )


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]
