"""Per-token log-probabilities of given tokens, without holding ``[tokens, vocab]`` logits.

Only the hidden states that predict a response token reach the output projection, in the model's own
forward pass; ``projection.py`` turns them into log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.packing import group_layout, row_layout
from torchtune_grpo.projection import projection_logprobs
from torchtune_grpo.trajectory import Trajectory


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


def response_logprobs(
    model: TransformerDecoder,
    batch: Trajectory,
    *,
    temperature: float,
    group_size: int | None = None,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
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
        chunk_bytes (int | None): bytes of float32 logits that exist at once; None = the device's
            default.

    Returns:
        tuple[Tensor, Tensor]: log-probs [n, L] and entropy [n, L], float32, 0 where
        ``response_mask`` is False.
    """
    layout = row_layout(batch) if group_size is None else group_layout(batch, group_size=group_size)

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
