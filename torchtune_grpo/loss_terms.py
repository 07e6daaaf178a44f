"""The terms of a loss: each token's weight, ratios, surrogates and the KL penalty."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from torchtune_grpo.machine.parallel import gather_over_ranks


def loss_weights(
    response_mask: Tensor,
    *,
    aggregation: str,
    prompt_indices: Tensor,
    num_rows: int,
    num_tokens: int,
    max_generated_tokens: int,
) -> Tensor:
    """Each token's share of the loss; the denominators are of the whole optimizer step.

        grpo       1 / (num_rows * tokens of the row)        Shao et al. 2024, equation 3
        dapo       1 / num_tokens                            Yu et al. 2025, arXiv:2503.14476, eq. 8
        dr_grpo    1 / (num_rows * max_generated_tokens)     Liu et al. 2025, arXiv:2503.20783
        prompt     1 / (prompts * tokens of the prompt)      Khatri et al. 2025, arXiv:2510.13786

    For ``prompt``, every rank has to call it: a prompt's tokens are those of all its rows of the
    step, on whichever rank.

    Args:
        response_mask (Tensor): [N, L] bool. A fully masked row counts as 0 in ``grpo``, and a fully
            masked prompt in ``prompt``.
        aggregation (str): which of the four.
        prompt_indices (Tensor): [N] which rows are of one prompt.
        num_rows (int): rows of the whole step, over all micro-batches and ranks.
        num_tokens (int): trained tokens of the whole step.
        max_generated_tokens (int): longest possible response.

    Returns:
        Tensor: [N, L] float32, 0 where the mask is False.
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
    """The trained tokens [N, 1] of each row's prompt, and the number of prompts, over all ranks."""
    prompts, tokens = prompt_indices.tolist(), response_mask.sum(dim=1).tolist()
    total: Counter[int] = Counter()
    for rows in gather_over_ranks(list(zip(prompts, tokens, strict=True))):
        for prompt, count in rows:
            total[prompt] += count
    own = torch.tensor([total[prompt] for prompt in prompts], device=response_mask.device)
    return own[:, None], len(total)


def sequence_log_ratio(log_ratio: Tensor, response_mask: Tensor) -> Tensor:
    """GSPO's one ratio per row [n, 1]: the mean over its tokens of new - old.

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
    log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, epsilon_high: float
) -> Tensor:
    """``-stopgrad(min(r, 1 + high)) A new`` [n, L]: every token keeps a gradient.

    ``logprobs`` [n, L] are the new ones, and the other arguments those of
    :func:`clipped_surrogate`. Source: MiniMax 2025 (arXiv:2506.13585), equations 4 and 5, with no
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

    with ``change`` [n, L] from :func:`probability_change`, and the other arguments those of
    :func:`clipped_surrogate`. Unlike a ratio, it bounds likely tokens more than rare ones.
    Source: Qi et al. 2026 (arXiv:2602.04879), equations 11 to 13 (binary total variation).
    """
    stale = ((advantages > 0) & (change > epsilon_high)) | (
        (advantages < 0) & (change < -epsilon_low)
    )
    return (-log_ratio.exp() * advantages).where(~stale, 0)


def kl_penalty(d: Tensor, *, estimator: str) -> Tensor:
    """Per-token estimates [n, L] of KL(policy || reference) with ``d = ref - new`` log-prob [n, L].

        k1  -d;   k2  d * d / 2;   k3  exp(d) - d - 1, unbiased and never negative (the paper's)

    Source: Schulman 2020, "Approximating KL divergence"; Shao et al. 2024, equation 4.
    """
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.expm1() - d
