"""Rows to per-token log-probs, and weights for the gap between sampler and trainer.

Log-probs of given tokens are computed from hidden states, never holding ``[tokens, vocab]`` logits.

Where the output projection is a plain matrix W, the logits of all tokens are made for one block of
the vocabulary at a time, and a running maximum and sum make the softmax exact, as in flash
attention. W is read once, and its gradient is written block by block, each block one product over
all tokens. If W is frozen (LoRA), the forward pass also accumulates ``softmax(logits) W``, which is
all that the backward pass needs; if W is trained, the backward pass recomputes each block. Logits
are float32 even where W is bf16: rounded to bf16, a logit of 16 would be off by up to 1/16, and so
would the log-prob of its token. Sums over the vocabulary are float32, too: in a likely token's
gradient they nearly cancel the target's row of W.

Any other projection (LoRA on the output, a bias, quantized weights) is called on a chunk of tokens
at a time, and again in the backward pass. Its logits have the dtype that it returns: in a bf16
model they are rounded to bf16, and only later computations are float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_grpo.machine.segments import add_product, float32_product
from torchtune_grpo.models.layers import unembed_with
from torchtune_grpo.training.packing import Layout, MicroBatch

# Bytes of float32 logits that exist at once: on a CPU few enough to stay in the last-level cache
# and in blocks that the allocator reuses; on a GPU enough for products that fill it.
_CPU_CHUNK_BYTES = 8 * 2**20
_GPU_CHUNK_BYTES = 128 * 2**20
_LEAST_COLUMNS = 1024  # narrower blocks cost more in sums over blocks than they save
_BLOCK_UNIT = 128  # columns

Entropy = Literal["none", "value", "gradient"]  # what is computed of it


def response_logprobs(
    model: TransformerDecoder,
    layout: Layout,
    *,
    temperature: float,
    entropy: Entropy = "none",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute float32 log-probs and entropy [n, L] of n rows' response tokens; 0 where masked.

    For ``entropy`` and ``chunk_bytes`` see ``projection_logprobs``.
    """

    def unembed(h: Tensor) -> Tensor:
        values = projection_logprobs(
            model.output,
            model.norm(h[layout.row, layout.column]),  # [K, D]
            layout.targets,
            temperature=temperature,
            entropy=entropy,
            chunk_bytes=chunk_bytes,
        )
        return torch.stack(values)  # [2, K]

    with unembed_with(model, unembed, width=layout.tokens.shape[1]):
        values = model(layout.tokens, mask=layout.attention, input_pos=layout.positions)  # [2, K]
    mask = layout.response_mask
    out = values.new_zeros(2, mask.numel()).index_copy(1, layout.index, values)
    out = out.unflatten(1, mask.shape)  # [2, n, L]
    return out[0], out[1] if entropy == "gradient" else out[1].detach()


@torch.no_grad()
def trajectory_logprobs(
    model: TransformerDecoder, micro_batches: Sequence[MicroBatch], *, temperature: float
) -> Tensor:
    """Compute the log-probs [N, L] of a trajectory's rows, in its order, without gradient."""
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
    """Compute the policy term's weights [n, L], no gradient, 0 where masked; None = unweighted.

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


# --- Hidden states -> log-probs -----------------------------------------------------------------


def default_chunk_bytes(device: torch.device, *, tokens: int) -> int:
    """Return the default number of bytes of float32 logits that exist at once."""
    bytes_at_once = _CPU_CHUNK_BYTES if device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(bytes_at_once, 4 * tokens * _LEAST_COLUMNS)


def output_matrix(output: nn.Module) -> Tensor | None:
    """Return the output projection [V, D] if it is a plain matrix without bias; else None."""
    if isinstance(output, TiedLinear):
        output = output.tied_module
    if type(output) not in (nn.Linear, nn.Embedding) or getattr(output, "bias", None) is not None:
        return None
    weight = output.weight
    if not isinstance(weight, Tensor) or is_traceable_wrapper_subclass(weight.data):
        return None  # quantized or sharded
    return weight


def projection_logprobs(
    output: nn.Module,
    h: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy: Entropy = "none",
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute targets' log-probs and entropy (nats) under ``softmax(output(h) / temperature)``.

    h is [K, D] and normed; the targets and both results, float32, are [K]. The entropy is 0 as
    ``none``, and has no gradient as a ``value``. ``chunk_bytes`` of float32 logits exist at once;
    None = the device's default.
    """
    chunk_bytes = chunk_bytes or default_chunk_bytes(h.device, tokens=len(h))
    matrix = output_matrix(output)
    if matrix is not None:
        block = _block_size(len(matrix), tokens=len(h), chunk_bytes=chunk_bytes)
        return _BlockedLogprobs.apply(h, matrix, targets, temperature, entropy, block)

    def chunk_logprobs(h: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (output(h).float() / temperature).log_softmax(dim=-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        if entropy == "none":
            return logprobs, torch.zeros_like(logprobs)
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            return logprobs, -(log_p.exp() * log_p).sum(dim=-1)

    with torch.no_grad():
        vocab = output(h[:1]).shape[-1]
    size = max(1, chunk_bytes // (4 * vocab))
    parts = [
        checkpoint(chunk_logprobs, part, target, use_reentrant=False)
        for part, target in zip(h.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _block_size(vocab: int, *, tokens: int, chunk_bytes: int) -> int:
    """Return the width of blocks of the vocabulary: all about as wide, within ``chunk_bytes``.

    It is a multiple of 128 if so many columns fit, as products on a GPU are slow for odd widths.
    """
    most = max(1, chunk_bytes // (4 * max(1, tokens)))
    unit = _BLOCK_UNIT if most >= _BLOCK_UNIT else 1
    blocks = -(-vocab // (most // unit * unit))
    return min(vocab, -(-vocab // (blocks * unit)) * unit)


class _BlockedLogprobs(torch.autograd.Function):
    """Log-probs and entropy [K] of targets under the logits l = h W^T / temperature.

    With p = softmax(l) and H its entropy, per token

        d logprob / d l = onehot(target) - p,     d H / d l = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        wanted: Entropy,
        block: int,
    ) -> tuple[Tensor, Tensor]:
        trains_h, trains_weight = ctx.needs_input_grad[:2]
        keep_slope = trains_h and not trains_weight and wanted != "gradient"
        peak = h.new_full((len(h), 1), -torch.inf, dtype=torch.float32)  # [K, 1] largest logit
        total = torch.zeros_like(peak)  # sum of exp(l - peak)
        moment = torch.zeros_like(peak)  # sum of exp(l - peak) l
        picked = torch.zeros_like(peak)  # the target's logit
        mean = torch.zeros_like(h, dtype=torch.float32) if keep_slope else None  # [K, D]
        # Shared by all blocks: allocating for each would fragment the heap.
        size = len(h) * block
        kept_logits, kept_shares = peak.new_empty(size), peak.new_empty(size)
        for _, w, inside, column in _blocks(weight, targets, block):
            logits = _block_logits(h, w, temperature, buffer=kept_logits)  # [K, block]
            picked = torch.where(inside, logits.gather(1, column), picked)
            higher = torch.maximum(peak, logits.amax(dim=1, keepdim=True))
            shrink = (peak - higher).exp()
            peak = higher
            shares = torch.sub(logits, peak, out=_narrowed(kept_shares, h, w)).exp_()
            total = total * shrink + shares.sum(dim=1, keepdim=True)
            if wanted != "none":
                moment = moment * shrink + logits.mul_(shares).sum(dim=1, keepdim=True)
            if mean is not None:
                add_product(mean.mul_(shrink), shares, w)
        normalizer = peak + total.log()
        entropy = torch.zeros_like(peak) if wanted == "none" else normalizer - moment / total
        if mean is not None:
            # d logprob / d h = (W[target] - sum of p W) / temperature
            ctx.save_for_backward(
                mean.div_(-total).add_(weight[targets]).div_(temperature).to(h.dtype)
            )
        else:
            ctx.save_for_backward(h, weight, targets, normalizer, entropy)
        ctx.keep_slope, ctx.wanted = keep_slope, wanted
        ctx.temperature, ctx.block = temperature, block
        if wanted != "gradient":
            ctx.mark_non_differentiable(entropy)
        return (picked - normalizer)[:, 0], entropy[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Backpropagate ``grads``, the gradients of the log-probs [K] and the entropy [K]."""
        nothing = (None,) * 4
        if ctx.keep_slope:
            (slope,) = ctx.saved_tensors
            return (slope * grads[0][:, None].to(slope.dtype), None, *nothing)
        h, weight, targets, normalizer, entropy = ctx.saved_tensors
        trains_h, trains_weight = ctx.needs_input_grad[:2]
        grad_h = torch.zeros_like(h, dtype=torch.float32) if trains_h else None
        grad_weight = torch.empty_like(weight) if trains_weight else None
        size = len(h) * ctx.block
        kept_logits, kept_grad = normalizer.new_empty(size), normalizer.new_empty(size)
        of_logprobs, of_entropy = (grad[:, None] / -ctx.temperature for grad in grads)  # [K, 1]
        for start, w, inside, column in _blocks(weight, targets, ctx.block):
            logits = _block_logits(h, w, ctx.temperature, buffer=kept_logits)
            log_p = logits.sub_(normalizer)  # [K, block]
            grad = torch.exp(log_p, out=_narrowed(kept_grad, h, w))
            slope = of_logprobs
            if ctx.wanted == "gradient":
                slope = log_p.add_(entropy).mul_(of_entropy).add_(of_logprobs)
            grad.mul_(slope).scatter_add_(1, column, torch.where(inside, -of_logprobs, 0.0))
            if grad_h is not None:
                add_product(grad_h, grad, w)
            if grad_weight is not None:
                torch.mm(grad.to(h.dtype).t(), h, out=grad_weight[start : start + len(w)])
        return (None if grad_h is None else grad_h.to(h.dtype), grad_weight, *nothing)


def _blocks(
    weight: Tensor, targets: Tensor, size: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield W's rows [V, D] in blocks of a size, each after its start.

    Each comes with whether it holds each target, [K, 1], and the target's column or any, [K, 1].
    """
    number, column = targets[:, None] // size, targets[:, None] % size
    for i, part in enumerate(weight.detach().split(size)):
        yield i * size, part, number == i, column.clamp(max=len(part) - 1)


def _block_logits(h: Tensor, w: Tensor, temperature: float, *, buffer: Tensor) -> Tensor:
    """Write h w^T / temperature, float32, to the start of a buffer [K * block]; [K, len(w)]."""
    logits = float32_product(h, w, out=_narrowed(buffer, h, w))
    return logits.div_(temperature) if temperature != 1 else logits


def _narrowed(buffer: Tensor, h: Tensor, w: Tensor) -> Tensor:
    """View the start of a buffer as [K, len(w)]; the last block may be narrower than others."""
    return buffer[: len(h) * len(w)].view(len(h), len(w))
