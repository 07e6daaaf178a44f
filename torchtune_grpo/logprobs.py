"""Per-token log-probabilities of given tokens, without holding ``[tokens, vocab]`` logits.

Only the hidden states that predict a response token reach the output projection, a chunk of tokens
at a time. Where the projection is frozen (LoRA), the forward pass keeps the gradient
``d logprob / d h`` instead of logits, and the backward pass only scales it; otherwise each chunk is
recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_grpo.packing import group_layout, row_layout
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


class _FrozenHeadLogprobs(torch.autograd.Function):
    """Log-probs and entropy of one chunk under a frozen output projection W.

    ``d logprob / d h = (W[target] - softmax(h W^T / temperature) W) / temperature`` is known in the
    forward pass, where the softmax is at hand; per token the backward pass is one factor.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(h, weight)  # [K, V]
        values = token_logprobs(logits, targets, temperature=temperature, with_entropy=entropy)
        if ctx.needs_input_grad[0]:
            probs = (logits.float() / temperature).softmax(dim=-1).to(weight.dtype)
            ctx.save_for_backward((weight[targets] - probs @ weight) / temperature)  # [K, D]
        ctx.mark_non_differentiable(values[1])
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return (slope * grads[0][:, None]).to(slope.dtype), None, None, None, None


def frozen_head(model: TransformerDecoder) -> Tensor | None:
    """The output projection [V, D], if it is a plain matrix that is not trained; else None."""
    output = model.output
    if isinstance(output, TiedLinear):
        output = output.tied_module
    if type(output) not in (nn.Linear, nn.Embedding) or getattr(output, "bias", None) is not None:
        return None
    weight = output.weight
    return None if weight.requires_grad or type(weight.data) is not Tensor else weight


def response_logprobs(
    model: TransformerDecoder,
    batch: Trajectory,
    *,
    temperature: float,
    group_size: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the response tokens of a batch of rows.

    Args:
        model (TransformerDecoder): the policy, or the reference.
        batch (Trajectory): n rows; tokens [n, T], prompt_lengths [n], response_mask [n, L].
        temperature (float): the temperature that the rows were sampled with, > 0.
        group_size (int | None): G if the rows are whole groups and each group is to be packed into
            one row, so that its prompt is computed once; None = one row each.
        with_entropy (bool): compute the entropy as well.
        entropy_gradient (bool): whether the entropy is differentiated.
        chunk_tokens (int): how many tokens' logits exist at once.

    Returns:
        tuple[Tensor, Tensor]: log-probs [n, L] and entropy [n, L], float32, 0 where
        ``response_mask`` is False.
    """
    layout = row_layout(batch) if group_size is None else group_layout(batch, group_size=group_size)
    head = None if entropy_gradient else frozen_head(model)

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
        h = model.norm(h[layout.row, layout.column])  # [K, D]
        chunks = zip(h.split(chunk_tokens), layout.targets.split(chunk_tokens), strict=True)
        if head is not None:
            parts = [
                _FrozenHeadLogprobs.apply(part, head, target, temperature, with_entropy)
                for part, target in chunks
            ]
        else:
            parts = [
                checkpoint(chunk_logprobs, part, target, use_reentrant=False)
                for part, target in chunks
            ]
        return torch.stack([torch.cat(column) for column in zip(*parts, strict=True)])  # [2, K]

    with unembed_with(model, unembed):
        values = model(layout.tokens, mask=layout.mask, input_pos=layout.positions)  # [2, K]
    out = values.new_zeros(2, *batch.response_mask.shape)  # [2, n, L]
    out = out.masked_scatter(batch.response_mask.expand_as(out), values)
    return out[0], out[1] if entropy_gradient else out[1].detach()


@torch.no_grad()
def trajectory_logprobs(
    model: TransformerDecoder,
    trajectory: Trajectory,
    *,
    temperature: float,
    rows: int,
    group_size: int | None = None,
) -> Tensor:
    """Log-probs of a whole trajectory without gradient, ``rows`` rows at a time.

    Args:
        model (TransformerDecoder): the policy or the reference.
        trajectory (Trajectory): N rows.
        temperature (float): > 0.
        rows (int): rows of one forward pass.
        group_size (int | None): see :func:`response_logprobs`.

    Returns:
        Tensor: [N, L].
    """
    parts = [
        response_logprobs(model, part, temperature=temperature, group_size=group_size)[0]
        for part in trajectory.micro_batches(rows)
    ]
    return torch.cat(parts)
