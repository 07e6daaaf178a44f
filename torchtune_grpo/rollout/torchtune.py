"""Group sampling with torchtune's own modules and KV cache, one group at a time.

Its prompt is prefilled once, and the keys and values are then repeated for its rows; only the last
position is unembedded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.common_utils import local_kv_cache

from torchtune_grpo.config.keys import RolloutConfig
from torchtune_grpo.machine.interrupt import is_interrupted
from torchtune_grpo.rollout.buffers import Buffers
from torchtune_grpo.rollout.request import (
    Admission,
    Progress,
    RolloutRequest,
    end_of_rollout,
)
from torchtune_grpo.rollout.transcript import Transcript
from torchtune_grpo.training import unembed_with
from torchtune_grpo.trajectory import Samples


class TorchtuneEngine:
    """Generation with the model's own forward: slower, and right for every torchtune decoder.

    Args:
        model (TransformerDecoder): the policy, without caches set up.
        settings (RolloutConfig): of which ``max_rows`` and ``deadline`` are used.
    """

    def __init__(self, model: TransformerDecoder, settings: RolloutConfig) -> None:
        self._model = model
        self._settings = settings

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def generate(self, request: RolloutRequest) -> Samples:
        """See :meth:`torchtune_grpo.rollout.RolloutEngine.generate`."""
        end = end_of_rollout(self._settings.deadline)
        device = next(self._model.parameters()).device
        group = request.group_size
        at_once = min(self._settings.max_rows or group, group)
        vocab = self._model.tok_embeddings.num_embeddings
        said = Transcript(request, places=at_once, vocab=vocab, buffers=Buffers(device))
        lengths: list[int] = []
        truncated: list[bool] = []
        groups = torch.arange(request.num_rows, device=device).split(group)
        for number, (prompt, of_group) in enumerate(zip(request.prompts, groups, strict=True)):
            if not _may_begin(number, request.admission):
                break
            for rows in of_group.split(at_once):
                ends, count = [0] * len(rows), 0
                if time.monotonic() <= end and not is_interrupted():
                    ends, count = self._sample(said, rows=rows, prompt=prompt, end=end)
                lengths += [length or count for length in ends]
                truncated += [length == 0 for length in ends]
            if request.admission is not None:
                mine = slice(number * group, None)
                samples = said.samples(
                    lengths=lengths[mine], truncated=truncated[mine], first=mine.start
                )
                request.admission.ended(number, samples)
            if request.report is not None:
                done, total = len(lengths), request.allowed_rows
                request.report(Progress(tokens=sum(lengths), finished=done, live=0, rows=total))
        _may_begin(len(request.prompts), request.admission)  # other ranks may wait for this one
        return said.samples(lengths=lengths, truncated=truncated)

    def _sample(
        self, said: Transcript, *, rows: Tensor, prompt: Sequence[int], end: float
    ) -> tuple[list[int], int]:
        """Samples rows [n] of one prompt of P tokens until all have ended, or it is time to stop.

        Returns:
            tuple[list[int], int]: the lengths at which they ended, 0 for those that did not, and
            the number of tokens sampled for each.
        """
        model, n, limit = self._model, len(rows), said.tokens.shape[1]
        position = torch.arange(len(prompt) + limit, device=rows.device)
        ends = [0] * n

        def last_logits(h: Tensor) -> Tensor:
            return model.output(model.norm(h[:, -1]))  # [b, V]

        def forward(tokens: Tensor, at: Tensor) -> Tensor:
            """tokens [b, s] at positions [s] -> logits [b, V] of the token behind them."""
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
            said.begin([prompt] * n, places=range(n))
            for count in range(limit):
                last = None if count == 0 else torch.full_like(rows, count - 1)
                said.sample(logits, rows=rows, last=last, places=slice(n))
                new = said.ends(rows, counts=[count + 1] * n, unseen=1)
                ends = [old or length for old, length in zip(ends, new, strict=True)]
                if all(ends) or count + 1 == limit:
                    break
                if time.monotonic() > end or is_interrupted():
                    break
                logits = forward(
                    said.tokens[rows, count, None], position[len(prompt) + count, None]
                )
        return ends, count + 1


def _may_begin(prompt: int, admission: Admission | None) -> bool:
    """Whether a prompt's turn comes; waits until that is known."""
    while admission is not None and not is_interrupted():
        if prompt < admission.allowed():
            return True
        if admission.is_final():
            return False
        admission.wait()
    return admission is None
