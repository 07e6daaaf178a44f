"""The GRPO loss against hand-computed numbers and a plain float64 loop over tokens."""

import math

import pytest
import torch

from torchtune_grpo.advantages import group_advantages
from torchtune_grpo.loss import GRPOLoss, clipped_surrogate, kl_k3, row_mean_weights


def test_advantages_by_hand():
    """Group 1: 1,0,0,1 has mean .5 and std(ddof=1) sqrt(1/3); group 2 has no spread."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    torch.testing.assert_close(
        group_advantages(rewards, group_size=4),
        torch.tensor([expected, -expected, -expected, expected, 0, 0, 0, 0]),
    )


def test_surrogate_by_hand():
    """Ratio 1.5: clipped to 1.3 when that is worse for the objective, else left alone."""
    log_ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    loss = clipped_surrogate(log_ratio, advantages, epsilon_low=0.2, epsilon_high=0.3)
    torch.testing.assert_close(loss, torch.tensor([[-2.6, 3.0, -1.0, 1.6]]))


def test_k3_by_hand():
    d = torch.tensor([0.0, 1.0, -2.0])
    expected = torch.tensor([0.0, math.e - 2, math.exp(-2) + 1])
    torch.testing.assert_close(kl_k3(d), expected)


def random_batch(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    lengths = [3, 5, 1, 0, 4, 2]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    new, old, ref = (-torch.rand(6, 5, generator=g, dtype=torch.float64) * 2 for _ in range(3))
    advantages = torch.randn(6, generator=g, dtype=torch.float64)
    return dict(logprobs=new, old_logprobs=old, ref_logprobs=ref, advantages=advantages), mask


def loop_loss(batch, mask, *, kl_coeff, low, high, num_rows) -> torch.Tensor:
    """The paper's equation 3, written as it stands there."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(mask.shape[0]):
        tokens = int(mask[i].sum())
        for t in range(tokens):
            new, old = batch["logprobs"][i, t], batch["old_logprobs"][i, t]
            ratio, a = torch.exp(new - old), batch["advantages"][i]
            policy = torch.min(ratio * a, torch.clamp(ratio, 1 - low, 1 + high) * a)
            d = batch["ref_logprobs"][i, t] - new
            total = total - (policy - kl_coeff * (torch.exp(d) - d - 1)) / tokens / num_rows
    return total


@pytest.mark.parametrize("kl_coeff", [0.0, 0.04, 1.5])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.4)])
def test_loss_and_gradient_equal_the_loop(kl_coeff, low, high):
    batch, mask = random_batch()
    batch["logprobs"].requires_grad_()
    loss = GRPOLoss(kl_coeff=kl_coeff, epsilon_low=low, epsilon_high=high)
    weights = loss.weights(mask, num_rows=6).double()
    value = loss(**batch, weights=weights, response_mask=mask).loss
    (grad,) = torch.autograd.grad(value, batch["logprobs"])
    expected = loop_loss(batch, mask, kl_coeff=kl_coeff, low=low, high=high, num_rows=6)
    (expected_grad,) = torch.autograd.grad(expected, batch["logprobs"])
    torch.testing.assert_close(value, expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(grad, expected_grad, atol=1e-7, rtol=0)


def test_masked_positions_never_contribute_whatever_stands_there():
    batch, mask = random_batch()
    loss = GRPOLoss()
    weights = loss.weights(mask, num_rows=6)
    clean = loss(**batch, weights=weights, response_mask=mask)
    for poison in (math.nan, math.inf, -math.inf):
        dirty = {k: v.masked_fill(~mask, poison) if v.dim() == 2 else v for k, v in batch.items()}
        dirty["logprobs"] = dirty["logprobs"].clone().requires_grad_()
        output = loss(**dirty, weights=weights, response_mask=mask)
        assert torch.equal(output.loss.detach(), clean.loss)
        assert all(torch.equal(output.sums[k], clean.sums[k]) for k in clean.sums)
        (grad,) = torch.autograd.grad(output.loss, dirty["logprobs"])
        assert grad.isfinite().all() and (grad[~mask] == 0).all()


def test_on_policy_gradient_is_the_plain_policy_gradient():
    """Without old log-probs the ratio is 1, and the gradient of -A log p remains."""
    batch, mask = random_batch()
    batch |= {"old_logprobs": None, "ref_logprobs": None}
    batch["logprobs"].requires_grad_()
    loss = GRPOLoss(kl_coeff=0)
    weights = loss.weights(mask, num_rows=6)
    value = loss(**batch, weights=weights, response_mask=mask).loss
    (grad,) = torch.autograd.grad(value, batch["logprobs"])
    torch.testing.assert_close(grad, -batch["advantages"][:, None] * weights.double())


def test_micro_batches_add_up():
    batch, mask = random_batch()
    loss = GRPOLoss()
    weights = loss.weights(mask, num_rows=6)
    whole = loss(**batch, weights=weights, response_mask=mask).loss
    parts = [
        loss(
            **{k: v[i : i + 2] for k, v in batch.items()},
            weights=weights[i : i + 2],
            response_mask=mask[i : i + 2],
        ).loss
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(sum(parts), whole, atol=1e-12, rtol=0)


def test_weights_sum_to_the_share_of_rows_with_tokens():
    _, mask = random_batch()
    weights = row_mean_weights(mask, num_rows=6)
    torch.testing.assert_close(weights.sum(dim=1), torch.tensor([1, 1, 1, 0, 1, 1]) / 6)


def test_clip_ratio_counts_tokens_where_clipping_bites():
    """Clipped is a low ratio that would still be pushed down, or a high one pushed up."""
    old = torch.zeros(1, 4)
    new = torch.tensor([[0.5, 0.5, 1.5, 1.5]]).log()
    mask = torch.ones(1, 4, dtype=torch.bool)
    loss = GRPOLoss(kl_coeff=0)
    for advantage, low, high in ((1.0, 0, 2), (-1.0, 2, 0)):
        sums = loss(
            logprobs=new,
            old_logprobs=old,
            ref_logprobs=None,
            advantages=torch.tensor([advantage]),
            weights=loss.weights(mask, num_rows=1),
            response_mask=mask,
        ).sums
        assert (int(sums["clip_ratio/low"]), int(sums["clip_ratio/high"])) == (low, high)


@pytest.mark.parametrize(
    "bad", [{"kl_coeff": -1}, {"epsilon_low": 1.0}, {"epsilon_low": -0.1}, {"epsilon_high": -1}]
)
def test_bad_coefficients_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=rf"loss\.{next(iter(bad))}="):
        GRPOLoss(**bad)
