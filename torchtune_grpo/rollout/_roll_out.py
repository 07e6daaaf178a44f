"""From a batch of prompts to the rows that are scored and trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.rollout._engine import RolloutEngine
from torchtune_grpo.rollout._noise import row_keys
from torchtune_grpo.rollout._params import Progress, SamplingParams
from torchtune_grpo.rollout._text import decode_responses, decode_tokens
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
        prompts (PromptBatch): B prompts on the model's device.
        tokenizer (Any): a torchtune tokenizer.
        group_size (int): G.
        params (SamplingParams): how to sample.
        prefill (str): the beginning of the answer that the prompts end with.
        seed (int): of the run.
        step (int): of the run. The noise is a function of seed, step, prompt and sample.
        report (Callable[[Progress], None] | None): told of the progress now and then.

    Returns:
        Trajectory: N = B*G rows, prompt-major, not yet scored.
    """
    stop_tokens = tokenizer.stop_tokens
    samples = engine.generate(
        prompts,
        group_size=group_size,
        params=params,
        stop_tokens=stop_tokens,
        keys=row_keys(seed=seed, step=step, prompt_indices=prompts.indices, group_size=group_size),
        decode=lambda tokens: decode_tokens(tokenizer, tokens),
        report=report,
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
        drawn_logprobs=samples.drawn_logprobs if params.changes_distribution else None,
        prompts=_repeat(prompts.prompts, group_size),
        completions=decode_responses(tokenizer, samples, stop_tokens=stop_tokens, prefill=prefill),
        columns={name: _repeat(values, group_size) for name, values in prompts.columns.items()},
    )


def _repeat(values: list[Any], times: int) -> list[Any]:
    return [value for value in values for _ in range(times)]
