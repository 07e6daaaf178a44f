"""Group sampling with torchtune's own modules and KV cache.

The prompt is prefilled once per group and its keys and values are then repeated for the group's
rows; only the last position is unembedded; the loop ends when every row has met a stop token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.common_utils import local_kv_cache

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.logprobs import unembed_with
from torchtune_grpo.rollout._sampling import sample_tokens
from torchtune_grpo.trajectory import Samples, length_mask


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    Attributes:
        max_generated_tokens (int): longest response, its stop token included.
        temperature (float): 0 is greedy.
        top_k (int | None): sample among the k most likely tokens only.
        top_p (float | None): sample within the nucleus of this mass only.
    """

    max_generated_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


def prefill_mask(lengths: Tensor, prompt_width: int, cache_width: int) -> Tensor:
    """Causal mask of a left-padded prompt over a cache that is wider than it.

    A padding position attends to itself, so that its softmax is not empty.

    Args:
        lengths (Tensor): [B] real prompt lengths.
        prompt_width (int): P.
        cache_width (int): columns of the cache, at least P.

    Returns:
        Tensor: [B, P, cache_width] bool, True = attend.
    """
    query = torch.arange(prompt_width, device=lengths.device)[:, None]
    key = torch.arange(cache_width, device=lengths.device)[None, :]
    start = (prompt_width - lengths)[:, None, None]  # [B, 1, 1] first real position
    return ((key <= query) & (key >= start)) | (key == query)


def repeat_caches(model: TransformerDecoder, group_size: int) -> None:
    """Gives each of the group's rows a copy of its prompt's keys and values."""
    for layer in model.layers:
        cache = layer.attn.kv_cache
        cache.k_cache = cache.k_cache.repeat_interleave(group_size, dim=0)
        cache.v_cache = cache.v_cache.repeat_interleave(group_size, dim=0)
        cache.batch_size *= group_size


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def generate(
    model: TransformerDecoder,
    prompts: PromptBatch,
    *,
    group_size: int,
    params: SamplingParams,
    stop_tokens: Sequence[int],
    generator: torch.Generator | None = None,
) -> Samples:
    """Samples ``group_size`` responses for each prompt.

    Args:
        model (TransformerDecoder): the policy, without caches set up.
        prompts (PromptBatch): B left-padded prompts.
        group_size (int): G.
        params (SamplingParams): temperature, filters, length.
        stop_tokens (Sequence[int]): a response ends with the first of these.
        generator (torch.Generator | None): on the model's device; None draws from the global one.

    Returns:
        Samples: N = B*G rows, prompt-major, L = the longest response.
    """
    device = prompts.tokens.device
    batch, width = prompts.tokens.shape
    rows, cache_width = batch * group_size, width + params.max_generated_tokens
    stops = torch.tensor(list(stop_tokens), device=device)
    starts = (width - prompts.lengths).repeat_interleave(group_size)  # [N] first real position
    visible = ~length_mask(starts, cache_width)[:, None, :]  # [N, 1, cache_width]
    key_position = torch.arange(cache_width, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    lengths = torch.zeros(rows, dtype=torch.long, device=device)

    def last_logits(h: Tensor) -> Tensor:
        return model.output(model.norm(h[:, -1]))  # [b, V]

    dtype = next(model.parameters()).dtype
    with (
        unembed_with(model, last_logits),
        local_kv_cache(
            model,
            batch_size=batch,
            device=device,
            dtype=dtype,
            decoder_max_seq_len=cache_width,
        ),
    ):
        position = torch.arange(width, device=device) - (width - prompts.lengths)[:, None]
        logits = model(
            prompts.tokens,
            mask=prefill_mask(prompts.lengths, width, cache_width),
            input_pos=position.clamp(min=0),
        )
        logits = logits.repeat_interleave(group_size, dim=0)  # [N, V]
        repeat_caches(model, group_size)
        for step in range(params.max_generated_tokens):
            token, logprob = sample_tokens(
                logits,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                generator=generator,
            )
            tokens.append(token)
            logprobs.append(logprob)
            lengths += ~finished
            finished |= torch.isin(token, stops)
            if step + 1 == params.max_generated_tokens or bool(finished.all()):
                break
            at = width + step
            logits = model(
                token[:, None],
                mask=visible & (key_position <= at),
                input_pos=(at - starts)[:, None],
            )
    return Samples(
        responses=torch.stack(tokens, dim=1),
        lengths=lengths,
        truncated=~finished,
        logprobs=torch.stack(logprobs, dim=1),
    )
