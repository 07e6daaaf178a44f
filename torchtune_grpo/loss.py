"""What a loss is, and the GRPO family: a surrogate, a KL penalty, an entropy bonus, aggregated.

    per token    l = surrogate(new - old, A) + kl_coeff * KL(ref - new) - entropy_coeff * entropy
    whole step   loss = sum over all tokens of l * weight

The weights carry the denominator of a whole optimizer step. Micro-batches and ranks then only add
up, so that the result does not depend on how the step is split.
"""

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from torchtune_grpo.config.components import instantiate
from torchtune_grpo.config.schema import SETTINGS, Float, Share
from torchtune_grpo.loss_terms import (
    cispo_surrogate,
    clipped_surrogate,
    dppo_surrogate,
    kl_penalty,
    probability_change,
    sequence_log_ratio,
)
from torchtune_grpo.loss_terms import loss_weights as loss_weights


@dataclass(frozen=True)
class LossOutput:
    """Loss of a micro-batch and the sums behind its metrics.

    Attributes:
        loss (Tensor): scalar; the micro-batch's share of the whole step's loss.
        sums (dict[str, Tensor]): scalars, sums over the trained tokens, without gradient. Each is
            logged under its name, divided by the step's trained tokens.
    """

    loss: Tensor
    sums: dict[str, Tensor]


class Loss(Protocol):
    """What the recipe asks of a loss; docs/loss.md shows how to write one."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ``ref_logprobs``; False spares the reference."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates ``entropy``; False spares its backward pass."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows whose advantage is 0 have a gradient; False spares them their passes."""

    def weights(
        self,
        response_mask: Tensor,
        *,
        prompt_indices: Tensor,
        num_rows: int,
        num_tokens: int,
        max_generated_tokens: int,
    ) -> Tensor:
        """Each token's share [N, L] of the whole step's loss; see :func:`loss_weights`."""

    def __call__(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor | None,
        ref_logprobs: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        response_mask: Tensor,
        entropy: Tensor,
        corrections: Tensor | None,
    ) -> LossOutput:
        """Computes a micro-batch's share of the step's loss.

        Args:
            logprobs (Tensor): [n, L] under the current policy, with gradient.
            old_logprobs (Tensor | None): [n, L] under the sampling policy; None means that it is
                the current one (ratio 1, plain policy gradient).
            ref_logprobs (Tensor | None): [n, L]; None unless ``needs_reference``.
            advantages (Tensor): [n].
            weights (Tensor): [n, L] from :meth:`weights`.
            response_mask (Tensor): [n, L] bool. Masked values must never contribute, NaN included.
            entropy (Tensor): [n, L]; with gradient if ``needs_entropy_gradient``.
            corrections (Tensor | None): [n, L] importance weights of the policy term for the gap
                between sampler and trainer; see ``importance.py``.
        """


def make_loss(node: DictConfig) -> Loss:
    """The config's loss.

    Raises:
        ValueError: if it lacks something that :class:`Loss` has.
    """
    loss = instantiate("loss", node)
    needed = ("weights", "__call__", "needs_reference", "needs_entropy_gradient", "needs_all_rows")
    problem = ", ".join(f"it has no {name}" for name in needed if not hasattr(loss, name))
    for name in needed[:2] if not problem else ():
        asked = list(inspect.signature(getattr(Loss, name)).parameters.values())[1:]
        positional = [p for p in asked if p.kind is not p.KEYWORD_ONLY]
        try:
            inspect.signature(getattr(loss, name)).bind(
                *positional, **{p.name: p for p in asked if p not in positional}
            )
        except TypeError as error:
            problem = f"its {name} is called with other arguments: {error}"
    if problem:
        raise ValueError(
            f"loss._component_={node._component_}: {problem}; docs/loss.md says what a loss is."
        )
    return loss


# The lower and the upper clipping distance of each kind of ratio, in its source.
EPSILONS = {
    "token": (0.2, 0.2),  # Schulman et al. 2017, arXiv:1707.06347, and GRPO
    "sequence": (3e-4, 4e-4),  # GSPO, arXiv:2507.18071, section 5.1
    "cispo": (1.0, 4.0),  # no lower one; the upper bound is 5: ScaleRL, arXiv:2510.13786
    "dppo": (0.15, 0.15),  # of probabilities: DPPO, arXiv:2602.04879
}
# A surrogate -> keys that mean nothing to it, and why.
_FOREIGN = {
    "cispo": {
        "dual_clip": "bounds every ratio already; set it to null",
        "epsilon_low": "bounds ratios from above only; set it to null",
    },
    "dppo": {
        "dual_clip": "bounds no ratio; set it to null",
        "importance_sampling_level": "compares tokens' probabilities; set it to token",
    },
}


@pydantic_dataclass(kw_only=True, config=SETTINGS)
class GRPOLoss:
    """The loss family, see :class:`Loss`; the defaults are the paper's objective."""

    kl_coeff: Annotated[Float, Field(ge=0)] = 0.04
    """Weight of the KL penalty (beta); 0 trains without a reference."""
    epsilon_low: Share | None = None
    """Lower clipping distance; null = that of the ratio's source."""
    epsilon_high: Annotated[Float, Field(ge=0)] | None = None
    """Upper clipping distance; null = that of the ratio's source."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token, or per sequence (GSPO)."""
    surrogate: Literal["clipped", "cispo", "dppo"] = "clipped"
    """PPO's; CISPO's, which clips the weight and keeps every token's gradient; or DPPO's, which
    leaves out tokens whose probability has moved too far."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Bound of the clipped surrogate where the advantage is negative; null = none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """See `kl_penalty`."""
    kl_on_uninformative: bool = True
    """The KL penalty is also that of rows whose advantage is 0; false spares them their passes."""
    aggregation: Literal["grpo", "dapo", "dr_grpo", "prompt"] = "grpo"
    """See `loss_weights`."""
    entropy_coeff: Annotated[Float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        for name, why in _FOREIGN.get(self.surrogate, {}).items():
            if (value := getattr(self, name)) not in (None, "token"):
                raise ValueError(f"loss.{name}={value}: {self.surrogate} {why}.")

    @property
    def epsilons(self) -> tuple[float, float]:
        """The lower and the upper clipping distance."""
        is_clipped = self.surrogate == "clipped"
        low, high = EPSILONS[self.importance_sampling_level if is_clipped else self.surrogate]
        return (
            low if self.epsilon_low is None else self.epsilon_low,
            high if self.epsilon_high is None else self.epsilon_high,
        )

    @property
    def needs_reference(self) -> bool:
        """See :class:`Loss`."""
        return self.kl_coeff > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """See :class:`Loss`."""
        return self.entropy_coeff > 0

    @property
    def needs_all_rows(self) -> bool:
        """See :class:`Loss`; of a class of one's own with another ``__call__``, nobody knows."""
        has_own = type(self).__call__ is not GRPOLoss.__call__
        has_kl = self.needs_reference and self.kl_on_uninformative
        return has_own or has_kl or self.needs_entropy_gradient

    def weights(self, response_mask: Tensor, **step: Any) -> Tensor:
        """See :func:`loss_weights`."""
        return loss_weights(response_mask, aggregation=self.aggregation, **step)

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
        """See :class:`Loss`; the sums are ``kl`` and, clipped tokens, those of ``_clip_sums``."""
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        log_ratio = (logprobs - old).where(response_mask, 0)
        if self.importance_sampling_level == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, response_mask).expand_as(logprobs)
        advantage = advantages[:, None]  # [n, 1]
        low, high = self.epsilons
        bounds = {"epsilon_low": low, "epsilon_high": high}
        own = logprobs.where(response_mask, 0)
        change = log_ratio.detach().expm1()  # of what is bounded
        if self.surrogate == "cispo":
            per_token = cispo_surrogate(log_ratio, own, advantage, epsilon_high=high)
        elif self.surrogate == "dppo":
            change = probability_change(log_ratio, own)
            per_token = dppo_surrogate(log_ratio, change, advantage, **bounds)
        else:
            per_token = clipped_surrogate(log_ratio, advantage, **bounds, dual_clip=self.dual_clip)
        if corrections is not None:
            per_token = per_token * corrections.where(response_mask, 0)
        sums = self._clip_sums(change, advantage, response_mask)
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

    def _clip_sums(self, change: Tensor, advantage: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """How many trained tokens are clipped where it stops them, under TRL's names."""
        epsilon_low, epsilon_high = self.epsilons
        low = ((change < -epsilon_low) & (advantage < 0) & mask).sum()
        high = ((change > epsilon_high) & (advantage > 0) & mask).sum()
        if self.surrogate == "cispo":  # which does not stop them; TRL counts the high ones
            return {"cispo_clip_ratio": high}
        names = ("low", "high", "region")
        return {f"clip_ratio/{n}_mean": v for n, v in zip(names, (low, high, low + high))}
