"""Correction for the gap between the sampler's and the trainer's log-probs of the same tokens.

Sampler and trainer are the same weights in different arithmetic (and, with top-k or top-p, another
distribution), so the samples are slightly off-policy. Importance weights ``exp(trainer - sampler)``
on the policy term correct that; they are truncated, or rows and tokens beyond the cap are dropped.
Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
Ionides 2008, "Truncated importance sampling".
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CORRECTIONS: tuple[str, ...] = get_args(Correction)


def importance_weights(
    *,
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    correction: str | None,
    cap: float,
) -> Tensor | None:
    """Weights of the policy term, without gradient.

        token_*      w = exp(trainer - sampler) of each token
        sequence_*   w = exp(sum over the row's tokens of trainer - sampler)
        *_truncate   min(w, cap)
        *_mask       w where w <= cap, else 0

    Args:
        trainer_logprobs (Tensor): [n, L] of the policy that sampled, as the trainer computes them.
        sampler_logprobs (Tensor): [n, L] as the sampler reported them.
        response_mask (Tensor): [n, L] bool.
        correction (str | None): which of the four; None for no correction.
        cap (float): > 1.

    Returns:
        Tensor | None: [n, L], 0 where the mask is False; None for no correction.
    """
    if correction is None:
        return None
    difference = (trainer_logprobs.detach() - sampler_logprobs).where(response_mask, 0)
    if correction.startswith("sequence"):
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = difference.exp()
    if correction.endswith("truncate"):
        weights = weights.clamp(max=cap)
    else:
        weights = weights.where(weights <= cap, 0)
    return weights.where(response_mask, 0)
