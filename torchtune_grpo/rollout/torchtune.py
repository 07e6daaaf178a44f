"""Generation with torchtune's own modules and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchtune.modules.common_utils import local_kv_cache

from torchtune_grpo.models.layers import unembed_with
from torchtune_grpo.rollout.batch import Transcript
from torchtune_grpo.rollout.graphs import Buffers
from torchtune_grpo.rollout.request import (
    ONE_TURN,
    Capabilities,
    EngineContext,
    Progress,
    RolloutEngine,
    RolloutRequest,
    must_stop,
)
from torchtune_grpo.trajectory import Samples


class TorchtuneEngine(RolloutEngine):
    """Generation with the model's own forward: slower, but for any torchtune decoder.

    It samples one group at a time, or ``max_rows`` of its rows: the prompt is prefilled once into
    torchtune's KV cache, and its keys and values are then repeated for the rows.
    """

    def __init__(self, context: EngineContext) -> None:
        if context.is_sharded:  # it would gather every layer for every token, as do other ranks
            raise ValueError(
                "rollout.engine=torchtune: cannot run a sharded model; set "
                "distributed.sharding=never."
            )
        self._model, self._settings = context.model, context.settings

    @classmethod
    def capabilities(cls, **arguments: object) -> Capabilities:
        return Capabilities(filters=True, reproducible=True)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def generate(self, request: RolloutRequest) -> Samples:
        if request.turns is not None:  # it may stand in for the native engine
            raise ValueError(f"rollout.engine: {type(self).__name__} {ONE_TURN}")
        stop = must_stop(self._settings.deadline)
        device = next(self._model.parameters()).device
        group, total = request.group_size, request.num_rows
        at_once = min(self._settings.max_rows or group, group)
        vocab = self._model.tok_embeddings.num_embeddings
        transcript = Transcript(request, slots=at_once, vocab=vocab, buffers=Buffers(device))
        lengths: list[int] = []
        truncated: list[bool] = []
        groups = torch.arange(total, device=device).split(group)
        for prompt, of_group in zip(request.prompts, groups, strict=True):
            for rows in of_group.split(at_once):
                ends, count = [0] * len(rows), 0
                if not stop():
                    ends, count = self._sample(transcript, rows=rows, prompt=prompt, must_stop=stop)
                lengths += [length or count for length in ends]
                truncated += [length == 0 for length in ends]
            if request.report is not None:
                progress = Progress(sum(lengths), finished=len(lengths), live=0, rows=total)
                request.report(progress)
        return transcript.samples(lengths=lengths, truncated=truncated)

    def _sample(
        self,
        transcript: Transcript,
        *,
        rows: Tensor,
        prompt: Sequence[int],
        must_stop: Callable[[], bool],
    ) -> tuple[list[int], int]:
        """Sample rows [n] of one prompt of P tokens until all have ended or ``must_stop()``.

        Returns the lengths at which they ended, 0 for those that did not, and the number of tokens
        sampled for each.
        """
        model, n, slots = self._model, len(rows), torch.arange(len(rows), device=rows.device)
        limit = min(transcript.params.max_generated_tokens, transcript.tokens.shape[1])
        position = torch.arange(len(prompt) + limit, device=rows.device)
        ends = [0] * n

        def last_logits(h: Tensor) -> Tensor:
            return model.output(model.norm(h[:, -1]))  # [b, V]

        def forward(tokens: Tensor, at: Tensor) -> Tensor:
            """Map tokens [b, s] at positions [s] to the logits [b, V] of the token after them."""
            mask = (position <= at[:, None]).expand(len(tokens), -1, -1)  # [b, s, P + limit]
            return model(tokens, mask=mask, input_pos=at.expand(len(tokens), -1))

        with (
            unembed_with(model, last_logits),
            local_kv_cache(
                model,
                batch_size=1,
                device=rows.device,
                dtype=model.tok_embeddings.weight.dtype,
                decoder_max_seq_len=len(position),
            ),
        ):
            tokens = torch.tensor([prompt], device=rows.device)
            logits = forward(tokens, position[: len(prompt)]).expand(n, -1)
            for layer in model.layers:
                cache = layer.attn.kv_cache
                cache.k_cache = cache.k_cache.repeat_interleave(n, dim=0)
                cache.v_cache = cache.v_cache.repeat_interleave(n, dim=0)
                cache.batch_size = n
            transcript.begin([prompt] * n, slots=range(n))
            for count in range(limit):
                last = None if count == 0 else torch.full_like(rows, count - 1)
                transcript.sample(logits, numbers=rows, last=last, slots=slots)
                new = transcript.ends(rows, counts=[count + 1] * n, begins=[0] * n, unseen=1)
                ends = [old or length for old, length in zip(ends, new, strict=True)]
                if all(ends) or count + 1 == limit or must_stop():
                    break
                tokens = transcript.tokens[rows, count, None]
                logits = forward(tokens, position[len(prompt) + count, None])
        return ends, count + 1
