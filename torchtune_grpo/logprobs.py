"""Per-token log-probabilities of given tokens, without holding ``[tokens, vocab]`` logits.

Only the hidden states that predict a response token reach the output projection, in chunks that
are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TransformerDecoder

from torchtune_grpo.trajectory import Trajectory

# Rows of [chunk, vocab] float32 logits alive at once: 256 x 128,256 x 4 bytes = 131 MB.
CHUNK_TOKENS = 256


@contextmanager
def unembed_with(model: TransformerDecoder, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Lets ``model(...)`` return ``function(h)`` of the last layer's output h [b, s, D].

    The model's own forward still runs around it, so that hooks on the model (FSDP's, say) find the
    norm and the output projection gathered.
    """
    model.unembed = function
    try:
        yield
    finally:
        del model.unembed


def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets, and the entropy, under ``softmax(logits / temperature)``.

    Args:
        logits (Tensor): [K, V] of any floating dtype.
        targets (Tensor): [K] token ids.
        temperature (float): > 0.
        with_entropy (bool): False returns zeros for the entropy.
        entropy_gradient (bool): whether the entropy is differentiated.

    Returns:
        tuple[Tensor, Tensor]: log-probs [K] and entropy in nats [K], float32.
    """
    logits = logits.float() / temperature
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if not with_entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        log_p = logits.log_softmax(dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return logprobs, entropy


def response_logprobs(
    model: TransformerDecoder,
    batch: Trajectory,
    *,
    temperature: float,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the response tokens of a batch of rows.

    Args:
        model (TransformerDecoder): the policy, or the reference.
        batch (Trajectory): n rows; tokens [n, T], prompt_lengths [n], response_mask [n, L].
        temperature (float): the temperature that the rows were sampled with, > 0.
        with_entropy (bool): compute the entropy as well.
        entropy_gradient (bool): whether the entropy is differentiated.
        chunk_tokens (int): how many tokens' logits exist at once.

    Returns:
        tuple[Tensor, Tensor]: log-probs [n, L] and entropy [n, L], float32, 0 where
        ``response_mask`` is False.
    """
    total = batch.tokens.shape[1]
    position = torch.arange(total, device=batch.tokens.device)
    first = batch.prompt_lengths[:, None] - 1  # the last prompt token predicts the first response
    predicts = (position >= first) & (position < first + batch.response_lengths[:, None])  # [n, T]
    targets = batch.tokens.roll(-1, dims=1)[predicts]  # [K]

    def chunk_logprobs(h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = model.output(h)  # [chunk, V]
        return token_logprobs(
            logits,
            target,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
        )

    def unembed(h: Tensor) -> Tensor:
        h = model.norm(h[predicts])  # [K, D]
        parts = [
            checkpoint(chunk_logprobs, h_part, target, use_reentrant=False)
            for h_part, target in zip(h.split(chunk_tokens), targets.split(chunk_tokens))
        ]
        return torch.stack([torch.cat(column) for column in zip(*parts)])  # [2, K]

    with unembed_with(model, unembed):
        values = model(batch.tokens)  # [2, K]
    out = values.new_zeros(2, *batch.response_mask.shape)  # [2, n, L]
    out = out.masked_scatter(batch.response_mask.expand_as(out), values)
    return out[0], out[1] if entropy_gradient else out[1].detach()


@torch.no_grad()
def trajectory_logprobs(
    model: TransformerDecoder, trajectory: Trajectory, *, temperature: float, rows: int
) -> Tensor:
    """Log-probs of a whole trajectory without gradient, ``rows`` rows at a time.

    Args:
        model (TransformerDecoder): the policy or the reference.
        trajectory (Trajectory): N rows.
        temperature (float): > 0.
        rows (int): rows of one forward pass.

    Returns:
        Tensor: [N, L].
    """
    parts = [
        response_logprobs(model, part, temperature=temperature)[0]
        for part in trajectory.micro_batches(rows)
    ]
    return torch.cat(parts)
