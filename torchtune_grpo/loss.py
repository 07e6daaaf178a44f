"""The loss protocol, and the GRPO family: surrogate, KL penalty and entropy bonus, aggregated.

    per token    l = surrogate(new - old, A) + kl_coeff * KL(ref - new) - entropy_coeff * entropy
    whole step   loss = sum over all tokens of l * weight

The weights carry the denominator of a whole optimizer step. Micro-batches and ranks are then summed
up, so that the result does not depend on how the step is split.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from omegaconf import DictConfig
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from torchtune_grpo.config.check import instantiate
from torchtune_grpo.config.keys import SETTINGS, Float, Share
from torchtune_grpo.machine.parallel import gather_over_ranks


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the step's loss, and the sums behind its metrics."""

    loss: Tensor  # scalar
    # Scalars without gradient, summed over the trained tokens; each is logged under its name,
    # divided by the step's trained tokens.
    sums: dict[str, Tensor]


class Loss(Protocol):
    """Members that the recipe needs of a loss; docs/extending.md shows how to write one."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads ``ref_logprobs``; if False, there is no reference."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the loss differentiates ``entropy``; False skips its backward pass."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether rows whose advantage is 0 have a gradient; False skips their passes."""

    def weights(
        self,
        response_mask: Tensor,
        *,
        prompt_indices: Tensor,
        num_rows: int,
        num_tokens: int,
        max_generated_tokens: int,
    ) -> Tensor:
        """Return each token's share [N, L] of the whole step's loss; see ``loss_weights``."""

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
        """Compute a micro-batch's share of the step's loss.

        All are [n, L], except advantages [n]. ``logprobs`` are the current policy's, with gradient,
        and so is ``entropy`` if ``needs_entropy_gradient``.
        ``old_logprobs`` are the sampling policy's, None if that is the current one (ratio 1);
        ``ref_logprobs`` are None unless ``needs_reference``. Masked values must never contribute,
        NaN included. ``corrections`` are the policy term's importance weights, see
        ``torchtune_grpo.training.importance_weights``.
        """


def make_loss(node: DictConfig) -> Loss:
    """Build the config's loss, and check what it has and returns for two responses."""
    loss = instantiate("loss", node)
    needed = ("weights", "__call__", "needs_reference", "needs_entropy_gradient", "needs_all_rows")
    if missing := [name for name in needed if not hasattr(loss, name)]:
        raise ValueError(
            f"loss._component_={node._component_}: it has no {', '.join(missing)}; "
            "docs/extending.md says what a loss is."
        )
    returned: object = None
    values, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    given: dict[str, object] = {"old_logprobs": None, "ref_logprobs": values.detach()}
    given |= {"entropy": values, "advantages": torch.tensor([1.0, -1.0]), "corrections": None}
    with suppress(Exception):  # it may need a GPU
        returned = loss(logprobs=values, weights=mask / 6, response_mask=mask, **given)
    if not (returned is None or hasattr(returned, "loss") and hasattr(returned, "sums")):
        raise ValueError(
            f"loss._component_={node._component_}: returns a {type(returned).__name__}; return "
            "LossOutput(loss, sums) of torchtune_grpo.loss."
        )
    return loss


# The lower and the upper clipping distance of each kind of ratio, from its source.
EPSILONS = {
    "token": (0.2, 0.2),  # Schulman et al. 2017, arXiv:1707.06347, and GRPO
    "sequence": (3e-4, 4e-4),  # GSPO, arXiv:2507.18071, section 5.1
    "cispo": (1.0, 4.0),  # no lower bound; the upper one is 5: ScaleRL, arXiv:2510.13786
    "dppo": (0.15, 0.15),  # in probability: DPPO, arXiv:2602.04879
}
# The keys that a surrogate does not use, and why.
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
    """The loss family, see ``Loss``; the defaults are the paper's objective."""

    kl_coeff: Annotated[Float, Field(ge=0)] = 0.04
    """Weight of the KL penalty (beta); 0 trains without a reference."""
    epsilon_low: Share | None = None
    """Lower clipping distance; null = as in the ratio's source."""
    epsilon_high: Annotated[Float, Field(ge=0)] | None = None
    """Upper clipping distance; null = as in the ratio's source."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """One ratio per token, or per sequence (GSPO)."""
    surrogate: Literal["clipped", "cispo", "dppo"] = "clipped"
    """PPO's surrogate; CISPO's, which clips the weight and keeps every token's gradient; or DPPO's,
    which leaves out tokens whose probability has moved too far."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Bound of the clipped surrogate where the advantage is negative; null = none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """See `kl_penalty`."""
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
        """See ``Loss``."""
        return self.kl_coeff > 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """See ``Loss``."""
        return self.entropy_coeff > 0

    @property
    def needs_all_rows(self) -> bool:
        """See ``Loss``; assumed of a subclass with its own ``__call__``."""
        has_own = type(self).__call__ is not GRPOLoss.__call__
        return has_own or self.needs_reference or self.needs_entropy_gradient

    def weights(self, response_mask: Tensor, **step: Any) -> Tensor:
        """See ``loss_weights``."""
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
        """See ``Loss``; the sums are ``kl`` and the counts of clipped tokens."""
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        advantage = advantages[:, None]  # [n, 1]
        # Where the advantage is 0, so is the surrogate, whatever the ratio; but 0 * inf is NaN.
        log_ratio = (logprobs - old).where(response_mask & (advantage != 0), 0)
        if self.importance_sampling_level == "sequence":
            log_ratio = sequence_log_ratio(log_ratio, response_mask).expand_as(logprobs)
        low, high = self.epsilons
        bounds = {"epsilon_low": low, "epsilon_high": high}
        own = logprobs.where(response_mask, 0)
        change = log_ratio.detach().expm1()  # in what is bounded
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
        """Count the trained tokens that clipping stops, under TRL's names."""
        epsilon_low, epsilon_high = self.epsilons
        low = ((change < -epsilon_low) & (advantage < 0) & mask).sum()
        high = ((change > epsilon_high) & (advantage > 0) & mask).sum()
        if self.surrogate == "cispo":  # stops no token; TRL counts the high ones
            return {"cispo_clip_ratio": high}
        names = ("low", "high", "region")
        return {f"clip_ratio/{n}_mean": v for n, v in zip(names, (low, high, low + high))}


# --- The terms -------------------------------------------------------------------------------


def loss_weights(
    response_mask: Tensor,
    *,
    aggregation: str,
    prompt_indices: Tensor,
    num_rows: int,
    num_tokens: int,
    max_generated_tokens: int,
) -> Tensor:
    """Return each token's share [N, L] of the loss, with the whole step's denominators.

        grpo       1 / (num_rows * tokens of the row)        Shao et al. 2024, equation 3
        dapo       1 / num_tokens                            Yu et al. 2025, arXiv:2503.14476, eq. 8
        dr_grpo    1 / (num_rows * max_generated_tokens)     Liu et al. 2025, arXiv:2503.20783
        prompt     1 / (prompts * tokens of the prompt)      Khatri et al. 2025, arXiv:2510.13786

    ``num_rows`` and ``num_tokens`` (trained on) cover all ranks and micro-batches. ``prompt`` sums
    the tokens of a prompt's rows over the ranks, so every rank has to call it. A fully masked row
    counts as 0 in ``grpo``, as does a fully masked prompt in ``prompt``.
    """
    if aggregation == "grpo":
        tokens = response_mask.sum(dim=1, keepdim=True).clamp(min=1)  # [N, 1]
        return response_mask / (tokens * num_rows)
    if aggregation == "prompt":
        tokens, prompts = _prompt_tokens(response_mask, prompt_indices)
        return response_mask / (tokens.clamp(min=1) * prompts)
    denominator = max(num_tokens, 1) if aggregation == "dapo" else num_rows * max_generated_tokens
    return response_mask / torch.tensor(denominator, device=response_mask.device)


def _prompt_tokens(response_mask: Tensor, prompt_indices: Tensor) -> tuple[Tensor, int]:
    """Count the trained tokens [N, 1] of each row's prompt, and the prompts, over all ranks."""
    prompts, tokens = prompt_indices.tolist(), response_mask.sum(dim=1).tolist()
    total: Counter[int] = Counter()
    for rows in gather_over_ranks(list(zip(prompts, tokens, strict=True))):
        for prompt, count in rows:
            total[prompt] += count
    own = torch.tensor([total[prompt] for prompt in prompts], device=response_mask.device)
    return own[:, None], len(total)


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """Compute GSPO's one ratio per row [n, 1]: the mean over its tokens of new - old.

    ``log_ratio`` [n, L] is 0 where the mask [n, L] is False. Source: Zheng et al. 2025
    (arXiv:2507.18071), equation 7.
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
    (arXiv:1912.09729), equation 5. ``log_ratio`` and the result are [n, L], advantages [n, 1].
    """
    # The same as -A times a ratio that is bounded on the side to which A pushes it.
    ratio = log_ratio.detach().exp()
    least, most = 1 - epsilon_low, 1 + epsilon_high
    bounded = torch.where(advantages < 0, ratio.clamp(least, dual_clip), ratio.clamp(max=most))
    inside = ratio == bounded
    # Outside there is no gradient; the ratio is selected away, because 0 * inf is NaN.
    ratio = torch.where(inside, log_ratio.where(inside, 0).exp(), bounded)
    return -ratio * advantages


def cispo_surrogate(
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, epsilon_high: float
) -> Tensor:
    """``-stopgrad(min(r, 1 + high)) A new`` [n, L]: every token keeps a gradient.

    ``logprobs`` [n, L] are the new ones; the other arguments are those of
    ``clipped_surrogate``. Source: MiniMax 2025 (arXiv:2506.13585), equations 4 and 5, with no
    lower bound, as in its experiments.
    """
    ratio = log_ratio.detach().exp().clamp(max=1 + epsilon_high)
    return -ratio * advantages * logprobs


def probability_change(log_ratio: Tensor, logprobs: Tensor) -> Tensor:
    """``p_new - p_old`` [n, L] of each token, without gradient, from new - old and new log-probs.

    Its size is the total variation between the policies' choices of this token or any other.
    """
    new = logprobs.detach()
    return new.exp() - (new - log_ratio.detach()).exp()


def dppo_surrogate(
    log_ratio: Tensor,
    change: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    """``-M r A`` [n, L]: tokens that have moved far already, and would move on, are left out.

        M = 0   if A > 0 and change > high, or A < 0 and change < -low;   else 1

    with ``change`` [n, L] from ``probability_change``; the other arguments are those of
    ``clipped_surrogate``. Unlike a ratio, it bounds likely tokens more than rare ones.
    Source: Qi et al. 2026 (arXiv:2602.04879), equations 11 to 13 (binary total variation).
    """
    stale = ((advantages > 0) & (change > epsilon_high)) | (
        (advantages < 0) & (change < -epsilon_low)
    )
    return (-log_ratio.where(~stale, 0).exp() * advantages).where(~stale, 0)


def kl_penalty(d: Tensor, *, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) per token [n, L], from ``d = ref - new`` log-prob [n, L].

        k1  -d;   k2  d * d / 2;   k3  exp(d) - d - 1, unbiased and never negative (the paper's)

    Source: Schulman 2020, "Approximating KL divergence"; Shao et al. 2024, equation 4.
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.expm1() - d
