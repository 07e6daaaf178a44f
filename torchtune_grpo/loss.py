"""The GRPO loss: ratio, clipping, KL penalty, and an aggregation with an explicit denominator.

    per token    l = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coeff * KL,  r = exp(new - old)
    whole step   loss = sum of l * weight;  weight = 1 / (rows * trained tokens of the row)

The weights are made once for a whole optimizer step. Micro-batches and ranks then only add up, so
that the result does not depend on how the step is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def row_mean_weights(response_mask: Tensor, *, num_rows: int) -> Tensor:
    """Weights of the paper's objective: the mean over all rows of each row's mean over its tokens.

    The denominator is ``num_rows * |o_i|``: rows of the whole step (all micro-batches and ranks)
    times the row's own trained tokens. A fully masked row counts as 0.
    Source: Shao et al. 2024 (arXiv:2402.03300), equation 3.

    Args:
        response_mask (Tensor): [N, L] bool.
        num_rows (int): rows of the whole step.

    Returns:
        Tensor: [N, L] float32, 0 where the mask is False.
    """
    tokens = response_mask.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
    return response_mask / (tokens * num_rows)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(log_ratio)``.

    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7; separate bounds after
    Yu et al. 2025 (arXiv:2503.14476), equation 10.

    Args:
        log_ratio (Tensor): [n, L] new - old log-prob.
        advantages (Tensor): [n, 1].
        epsilon_low (float): the ratio is clipped below 1 - epsilon_low.
        epsilon_high (float): the ratio is clipped above 1 + epsilon_high.

    Returns:
        Tensor: [n, L].
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def kl_k3(log_ratio: Tensor) -> Tensor:
    """The unbiased, never negative KL estimate ``exp(d) - d - 1``, ``d = ref - new`` log-prob.

    Source: Schulman 2020, "Approximating KL divergence" (k3); Shao et al. 2024, equation 4.

    Args:
        log_ratio (Tensor): [n, L] d.

    Returns:
        Tensor: [n, L].
    """
    return log_ratio.expm1() - log_ratio


@dataclass
class LossOutput:
    """Loss of a micro-batch and the sums behind its metrics.

    Attributes:
        loss (Tensor): scalar; the micro-batch's share of the whole step's loss.
        sums (dict[str, Tensor]): scalars, sums over the trained tokens, without gradient.
    """

    loss: Tensor
    sums: dict[str, Tensor]


class GRPOLoss:
    """The paper's objective: clipped surrogate, k3 penalty, mean of the rows' token means.

    Args:
        kl_coeff (float): weight of the KL penalty (beta), >= 0. 0 switches the reference off.
        epsilon_low (float): lower clipping distance, in [0, 1).
        epsilon_high (float): upper clipping distance, >= 0.

    Raises:
        ValueError: if a value is out of its range.
    """

    def __init__(
        self, *, kl_coeff: float = 0.04, epsilon_low: float = 0.2, epsilon_high: float = 0.2
    ) -> None:
        for key, value, valid, bounds in (
            ("kl_coeff", kl_coeff, kl_coeff >= 0, "at least 0; 0 trains without a reference"),
            ("epsilon_low", epsilon_low, 0 <= epsilon_low < 1, "in [0, 1); the paper uses 0.2"),
            ("epsilon_high", epsilon_high, epsilon_high >= 0, "at least 0; the paper uses 0.2"),
        ):
            if not valid:
                raise ValueError(f"loss.{key}={value}: give a number {bounds}.")
        self.kl_coeff = kl_coeff
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ``ref_logprobs``."""
        return self.kl_coeff > 0

    def weights(self, response_mask: Tensor, *, num_rows: int) -> Tensor:
        """Each token's share of the whole step's loss; see :func:`row_mean_weights`."""
        return row_mean_weights(response_mask, num_rows=num_rows)

    def __call__(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        response_mask: Tensor,
    ) -> LossOutput:
        """Computes a micro-batch's share of the step's loss.

        Args:
            logprobs (Tensor): [n, L] under the current policy, with gradient.
            old_logprobs (Tensor | None): [n, L] under the sampling policy; None means that it is
                the current one (ratio 1, plain policy gradient).
            ref_logprobs (Tensor | None): [n, L]; needed when ``needs_reference``.
            advantages (Tensor): [n].
            weights (Tensor): [n, L] from :meth:`weights`.
            response_mask (Tensor): [n, L] bool. Masked values never contribute, NaN included.

        Returns:
            LossOutput: the loss, and sums named ``kl``, ``clip_ratio/low``, ``clip_ratio/high``.
        """
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        log_ratio = (logprobs - old).where(response_mask, 0)
        advantage = advantages[:, None]  # [n, 1]
        per_token = clipped_surrogate(
            log_ratio, advantage, epsilon_low=self.epsilon_low, epsilon_high=self.epsilon_high
        )
        ratio = log_ratio.detach().exp()
        low = (ratio < 1 - self.epsilon_low) & (advantage < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantage > 0)
        sums = {"clip_ratio/low": low.sum(), "clip_ratio/high": high.sum()}
        if self.needs_reference:
            assert ref_logprobs is not None
            kl = kl_k3((ref_logprobs - logprobs).where(response_mask, 0))
            per_token = per_token + self.kl_coeff * kl
            sums["kl"] = kl.detach().sum()
        return LossOutput(loss=(per_token * weights).where(response_mask, 0).sum(), sums=sums)
