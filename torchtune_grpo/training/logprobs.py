"""Rows to per-token log-probs, and weights for the gap between sampler and trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.models import unembed_with
from torchtune_grpo.training.packing import Layout, MicroBatch
from torchtune_grpo.training.softmax import projection_logprobs


def response_logprobs(
    model: TransformerDecoder,
    layout: Layout,
    *,
    temperature: float,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [n, L] of the response tokens of n rows, float32; 0 where masked.

    For ``chunk_bytes`` see :func:`projection_logprobs`.
    """

    def unembed(h: Tensor) -> Tensor:
        logprobs, entropy = projection_logprobs(
            model.output,
            model.norm(h[layout.row, layout.column]),  # [K, D]
            layout.targets,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            chunk_bytes=chunk_bytes,
        )
        return torch.stack([logprobs, entropy])  # [2, K]

    attention = layout.attention_mask(model.tok_embeddings.weight.dtype)
    with unembed_with(model, unembed, width=layout.tokens.shape[1]):
        values = model(layout.tokens, mask=attention, input_pos=layout.positions)  # [2, K]
    mask = layout.response_mask
    out = values.new_zeros(2, mask.numel()).index_copy(1, layout.place, values)
    out = out.unflatten(1, mask.shape)  # [2, n, L]
    return out[0], out[1] if entropy_gradient else out[1].detach()


@torch.no_grad()
def trajectory_logprobs(
    model: TransformerDecoder, micro_batches: Sequence[MicroBatch], *, temperature: float
) -> Tensor:
    """Log-probs [N, L] of a trajectory's rows, in its order, without gradient."""
    parts = [
        response_logprobs(model, part.layout, temperature=temperature)[0] for part in micro_batches
    ]
    return in_order(parts, micro_batches)


def in_order(values: Sequence[Tensor], micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Join each micro-batch's values [n, L] to [N, L] in the trajectory's order."""
    rows = torch.cat([part.rows for part in micro_batches])  # [N] a permutation
    return torch.cat(list(values))[rows.argsort()]


def importance_weights(
    *,
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    mode: str | None,
    cap: float,
) -> Tensor | None:
    """Weights [n, L] of the policy term, without gradient, 0 where masked; None = unweighted.

        token_*      w = exp(trainer - behaviour) of each token
        sequence_*   w = exp(sum over the row's tokens of trainer - behaviour)
        *_truncate   min(w, cap)
        *_mask       w where w <= cap, else 0
        old_logprobs unweighted: the loss's own ratio starts from the sampler's log-probs

    The trainer's log-probs are those of the policy that sampled.
    """
    if mode is None or mode == "old_logprobs":
        return None
    difference = (trainer_logprobs.detach() - behaviour_logprobs).where(response_mask, 0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = difference.exp()
    if mode.endswith("truncate"):
        weights = weights.clamp(max=cap)
    else:
        weights = weights.where(weights <= cap, 0)
    return weights.where(response_mask, 0)
