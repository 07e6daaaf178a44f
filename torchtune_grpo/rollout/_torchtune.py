"""Group sampling with torchtune's own modules and KV cache.

The prompt is prefilled once per group and its keys and values are then repeated for the group's
rows; only the last position is unembedded; the loop ends when every row has met a stop token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.common_utils import local_kv_cache

from torchtune_grpo.data import PromptBatch
from torchtune_grpo.logprobs import unembed_with
from torchtune_grpo.rollout._noise import uniforms
from torchtune_grpo.rollout._params import Progress, SamplingParams
from torchtune_grpo.rollout._sampling import Sampler
from torchtune_grpo.rollout._stop_strings import Decode, StopStrings, stop_strings_of
from torchtune_grpo.trajectory import Samples, cat_samples, length_mask


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


class TorchtuneEngine:
    """Generation with the model's own forward: slower, and right for every torchtune decoder.

    Args:
        model (TransformerDecoder): the policy, without caches set up.
        max_rows (int): most responses that are worked on at once; at least one whole group is.
        deadline (float | None): seconds after which a rollout cuts its rows where they are.
    """

    def __init__(
        self, model: TransformerDecoder, *, max_rows: int, deadline: float | None = None
    ) -> None:
        self._model = model
        self._max_rows = max_rows
        self._deadline = deadline

    def generate(
        self,
        prompts: PromptBatch,
        *,
        group_size: int,
        params: SamplingParams,
        stop_tokens: Sequence[int],
        keys: Tensor,
        decode: Decode | None = None,
        report: Callable[[Progress], None] | None = None,
    ) -> Samples:
        """See :meth:`torchtune_grpo.rollout.RolloutEngine.generate`."""
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        rows = len(prompts.lengths) * group_size
        at_once = max(1, self._max_rows // group_size)
        parts = []
        for start in range(0, len(prompts.lengths), at_once):
            part = slice(start, start + at_once)
            parts.append(
                _generate_groups(
                    self._model,
                    prompts.tokens[part],
                    prompts.lengths[part],
                    group_size=group_size,
                    params=params,
                    stop_tokens=stop_tokens,
                    stop_strings=stop_strings_of(params, decode),
                    noise=uniforms(
                        keys.view(-1, group_size)[part].flatten(), params.max_generated_tokens
                    ),
                    out_of_time=lambda: time.monotonic() > end,
                )
            )
            if report is not None:
                done = sum(len(p.lengths) for p in parts)
                tokens = sum(int(p.lengths.sum()) for p in parts)
                report(Progress(tokens=tokens, finished=done, live=0, rows=rows))
        return cat_samples(parts)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def _generate_groups(
    model: TransformerDecoder,
    prompt_tokens: Tensor,
    prompt_lengths: Tensor,
    *,
    group_size: int,
    params: SamplingParams,
    stop_tokens: Sequence[int],
    stop_strings: StopStrings | None,
    noise: Tensor,
    out_of_time: Callable[[], bool],
) -> Samples:
    """Samples whole groups side by side: prompts [B, P] left-padded, noise [B*G, L]."""
    device = prompt_tokens.device
    batch, width = prompt_tokens.shape
    rows, cache_width = batch * group_size, width + params.max_generated_tokens
    sampler = Sampler(params, stop_tokens=stop_tokens, device=device)
    starts = (width - prompt_lengths).repeat_interleave(group_size)  # [N] first real position
    visible = ~length_mask(starts, cache_width)[:, None, :]  # [N, 1, cache_width]
    key_position = torch.arange(cache_width, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    sampled: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens and both log-probs, each [N]
    lengths = torch.zeros(rows, dtype=torch.long, device=device)
    seen = None

    def last_logits(h: Tensor) -> Tensor:
        return model.output(model.norm(h[:, -1]))  # [b, V]

    dtype = model.tok_embeddings.weight.dtype
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
        position = torch.arange(width, device=device) - (width - prompt_lengths)[:, None]
        logits = model(
            prompt_tokens,
            mask=prefill_mask(prompt_lengths, width, cache_width),
            input_pos=position.clamp(min=0),
        )
        logits = logits.repeat_interleave(group_size, dim=0)  # [N, V]
        repeat_caches(model, group_size)
        if params.repetition_penalty != 1:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row in range(rows):
                seen[row, prompt_tokens[row // group_size, starts[row] :]] = True
        for step in range(params.max_generated_tokens):
            token, logprob, drawn = sampler(
                logits,
                uniforms=noise[:, step],
                counts=torch.full_like(lengths, step),
                seen=seen,
            )
            sampled.append((token, logprob, drawn))
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            lengths += ~finished
            finished |= sampler.is_stop(token)
            if stop_strings is not None and step + 1 >= params.min_new_tokens:
                so_far = torch.stack([tokens for tokens, _, _ in sampled], dim=1).tolist()
                ended = [stop_strings.end(tokens, start=step) is not None for tokens in so_far]
                finished |= torch.tensor(ended, device=device)
            if step + 1 == params.max_generated_tokens or bool(finished.all()) or out_of_time():
                break
            at = width + step
            logits = model(
                token[:, None],
                mask=visible & (key_position <= at),
                input_pos=(at - starts)[:, None],
            )
    responses, logprobs, drawn_logprobs = (torch.stack(x, dim=1) for x in zip(*sampled))
    return Samples(
        responses=responses,
        lengths=lengths,
        truncated=~finished,
        logprobs=logprobs,
        drawn_logprobs=drawn_logprobs,
    )
