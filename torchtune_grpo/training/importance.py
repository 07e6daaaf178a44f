"""Correction for the gap between the sampler's and the trainer's log-probs of the same tokens.

Sampler and trainer are the same weights in different arithmetic (and, with top-k or top-p, another
distribution), so the samples are slightly off-policy. Importance weights of the policy term correct
that; they are truncated, or rows and tokens beyond the cap are dropped.
Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training";
Ionides 2008, "Truncated importance sampling".
"""

from __future__ import annotations

from torch import Tensor

CORRECTIONS = (
    "old_logprobs",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)


def importance_weights(
    *,
    trainer_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    response_mask: Tensor,
    mode: str | None,
    cap: float,
) -> Tensor | None:
    """Weights [n, L] of the policy term, without gradient, 0 where masked; None for no weights.

        token_*      w = exp(trainer - behaviour) of each token
        sequence_*   w = exp(sum over the row's tokens of trainer - behaviour)
        *_truncate   min(w, cap)
        *_mask       w where w <= cap, else 0
        old_logprobs no weights: the loss's own ratio starts from the sampler's log-probs

    The trainer's log-probs are of the policy that sampled, the behaviour's those of the
    distribution that the tokens were drawn from; cap > 1.
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
