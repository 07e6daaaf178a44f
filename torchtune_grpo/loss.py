"""The GRPO loss family: ratio, clipping, KL penalty, and an aggregation with its denominator.

    per token    l = surrogate(new - old, A) + kl_coeff * KL(ref - new) - entropy_coeff * entropy
    whole step   loss = sum over all tokens of l * weight

The weights carry the denominator of a whole optimizer step. Micro-batches and ranks then only add
up, so that the result does not depend on how the step is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Ratio = Literal["token", "gspo", "cispo"]
KL = Literal["k1", "k2", "k3"]
Aggregation = Literal["grpo", "dapo", "dr_grpo"]


def loss_weights(
    response_mask: Tensor,
    *,
    aggregation: Aggregation,
    num_rows: int,
    num_tokens: int,
    max_generated_tokens: int,
) -> Tensor:
    """Each token's share of the loss; the denominators are of the whole optimizer step.

        grpo       1 / (num_rows * tokens of the row)        Shao et al. 2024, equation 3
        dapo       1 / num_tokens                            Yu et al. 2025, arXiv:2503.14476, eq. 8
        dr_grpo    1 / (num_rows * max_generated_tokens)     Liu et al. 2025, arXiv:2503.20783

    Args:
        response_mask (Tensor): [N, L] bool. A fully masked row counts as 0 in ``grpo``.
        aggregation (Aggregation): which of the three.
        num_rows (int): rows of the whole step, over all micro-batches and ranks.
        num_tokens (int): trained tokens of the whole step.
        max_generated_tokens (int): longest possible response.

    Returns:
        Tensor: [N, L] float32, 0 where the mask is False.
    """
    if aggregation == "grpo":
        tokens = response_mask.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
        return response_mask / (tokens * num_rows)
    denominator = max(num_tokens, 1) if aggregation == "dapo" else num_rows * max_generated_tokens
    return response_mask / torch.tensor(denominator, device=response_mask.device)


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """GSPO's one ratio per row: the mean over its tokens of new - old.

    Source: Zheng et al. 2025 (arXiv:2507.18071), equation 7.

    Args:
        log_ratio (Tensor): [n, L], 0 where the mask is False.
        response_mask (Tensor): [n, L] bool.

    Returns:
        Tensor: [n, 1].
    """
    return log_ratio.sum(dim=1, keepdim=True) / response_mask.sum(dim=1, keepdim=True).clamp(min=1)


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r = exp(log_ratio)``.

    With ``dual_clip`` c the loss of a negative advantage is at most ``-c A``, so that a huge ratio
    cannot blow it up. Sources: Schulman et al. 2017 (arXiv:1707.06347), equation 7; separate
    bounds: Yu et al. 2025 (arXiv:2503.14476), equation 10; dual clip: Ye et al. 2020
    (arXiv:1912.09729), equation 5.

    Args:
        log_ratio (Tensor): [n, L] or [n, 1] new - old log-prob.
        advantages (Tensor): [n, 1].
        epsilon_low (float): the ratio is clipped below 1 - epsilon_low.
        epsilon_high (float): the ratio is clipped above 1 + epsilon_high.
        dual_clip (float | None): c > 1, or None.

    Returns:
        Tensor: of the shape of ``log_ratio``.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def cispo_surrogate(
    log_ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    """``-stopgrad(clip(r, 1 - low, 1 + high)) A new``: every token keeps a gradient.

    Source: MiniMax 2025 (arXiv:2506.13585), equations 4 and 5.

    Args:
        log_ratio (Tensor): [n, L] new - old log-prob.
        logprobs (Tensor): [n, L] new.
        advantages (Tensor): [n, 1].
        epsilon_low (float): the ratio is clipped below 1 - epsilon_low.
        epsilon_high (float): the ratio is clipped above 1 + epsilon_high.

    Returns:
        Tensor: [n, L].
    """
    ratio = log_ratio.detach().exp().clamp(1 - epsilon_low, 1 + epsilon_high)
    return -ratio * advantages * logprobs


def kl_penalty(d: Tensor, *, estimator: KL) -> Tensor:
    """Per-token estimates of KL(policy || reference) with ``d = ref - new`` log-prob.

        k1  -d;   k2  d * d / 2;   k3  exp(d) - d - 1, unbiased and never negative (the paper's)

    Source: Schulman 2020, "Approximating KL divergence"; Shao et al. 2024, equation 4.

    Args:
        d (Tensor): [n, L].
        estimator (KL): which of the three.

    Returns:
        Tensor: [n, L].
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.expm1() - d


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
    """The loss family; the defaults are the paper's objective.

    Args:
        kl_coeff (float): weight of the KL penalty (beta), >= 0. 0 switches the reference off.
        epsilon_low (float): lower clipping distance, in [0, 1].
        epsilon_high (float): upper clipping distance, >= 0.
        ratio (Ratio): ``token``; ``gspo``, one ratio per sequence; or ``cispo``.
        dual_clip (float | None): bound of the loss of negative advantages, > 1; not with ``cispo``.
        kl_estimator (KL): ``k1``, ``k2`` or ``k3``.
        aggregation (Aggregation): ``grpo``, ``dapo`` or ``dr_grpo``; see :func:`loss_weights`.
        entropy_coeff (float): weight of the entropy bonus, >= 0.

    Raises:
        ValueError: if a value is out of its range, naming the key.
    """

    def __init__(
        self,
        *,
        kl_coeff: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        ratio: Ratio = "token",
        dual_clip: float | None = None,
        kl_estimator: KL = "k3",
        aggregation: Aggregation = "grpo",
        entropy_coeff: float = 0.0,
    ) -> None:
        for key, value, valid, remedy in (
            ("kl_coeff", kl_coeff, kl_coeff >= 0, "give 0 or more; 0 trains without a reference"),
            ("epsilon_low", epsilon_low, 0 <= epsilon_low <= 1, "give a number in [0, 1]"),
            ("epsilon_high", epsilon_high, epsilon_high >= 0, "give 0 or more"),
            ("ratio", ratio, ratio in get_args(Ratio), "give token, gspo or cispo"),
            (
                "dual_clip",
                dual_clip,
                dual_clip is None or dual_clip > 1,
                "give more than 1, or null",
            ),
            ("kl_estimator", kl_estimator, kl_estimator in get_args(KL), "give k1, k2 or k3"),
            (
                "aggregation",
                aggregation,
                aggregation in get_args(Aggregation),
                "give grpo, dapo or dr_grpo",
            ),
            ("entropy_coeff", entropy_coeff, entropy_coeff >= 0, "give 0 or more"),
        ):
            if not valid:
                raise ValueError(f"loss.{key}={value}: {remedy}.")
        if dual_clip is not None and ratio == "cispo":
            raise ValueError(
                f"loss.dual_clip={dual_clip}: cispo clips every ratio already; set it to null."
            )
        self.kl_coeff = kl_coeff
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.ratio = ratio
        self.dual_clip = dual_clip
        self.kl_estimator: KL = kl_estimator
        self.aggregation: Aggregation = aggregation
        self.entropy_coeff = entropy_coeff

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ``ref_logprobs``."""
        return self.kl_coeff > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates ``entropy``."""
        return self.entropy_coeff > 0

    def weights(
        self, response_mask: Tensor, *, num_rows: int, num_tokens: int, max_generated_tokens: int
    ) -> Tensor:
        """Each token's share [N, L] of the whole step's loss; see :func:`loss_weights`."""
        return loss_weights(
            response_mask,
            aggregation=self.aggregation,
            num_rows=num_rows,
            num_tokens=num_tokens,
            max_generated_tokens=max_generated_tokens,
        )

    def __call__(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        response_mask: Tensor,
        entropy: Tensor | None = None,
        corrections: Tensor | None = None,
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
            entropy (Tensor | None): [n, L]; needed when ``needs_entropy_gradient``.
            corrections (Tensor | None): [n, L] importance weights of the policy term that correct
                the gap between sampler and trainer; see ``importance.py``.

        Returns:
            LossOutput: the loss, and sums named ``kl``, ``clip_ratio/low``, ``clip_ratio/high``.
        """
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        log_ratio = (logprobs - old).where(response_mask, 0)
        if self.ratio == "gspo":
            log_ratio = sequence_log_ratio(log_ratio, response_mask).expand_as(logprobs)
        advantage = advantages[:, None]  # [n, 1]
        per_token = self._policy_term(log_ratio, logprobs.where(response_mask, 0), advantage)
        if corrections is not None:
            per_token = per_token * corrections.where(response_mask, 0)
        ratio = log_ratio.detach().exp()
        low = (ratio < 1 - self.epsilon_low) & (advantage < 0) & response_mask
        high = (ratio > 1 + self.epsilon_high) & (advantage > 0) & response_mask
        sums = {"clip_ratio/low": low.sum(), "clip_ratio/high": high.sum()}
        if self.needs_reference:
            assert ref_logprobs is not None
            d = (ref_logprobs - logprobs).where(response_mask, 0)
            kl = kl_penalty(d, estimator=self.kl_estimator)
            per_token = per_token + self.kl_coeff * kl
            sums["kl"] = kl.detach().sum()
        if self.needs_entropy_gradient:
            assert entropy is not None
            per_token = per_token - self.entropy_coeff * entropy.where(response_mask, 0)
        return LossOutput(loss=(per_token * weights).where(response_mask, 0).sum(), sums=sums)

    def _policy_term(self, log_ratio: Tensor, logprobs: Tensor, advantage: Tensor) -> Tensor:
        if self.ratio == "cispo":
            return cispo_surrogate(
                log_ratio,
                logprobs,
                advantage,
                epsilon_low=self.epsilon_low,
                epsilon_high=self.epsilon_high,
            )
        return clipped_surrogate(
            log_ratio,
            advantage,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
            dual_clip=self.dual_clip,
        )
