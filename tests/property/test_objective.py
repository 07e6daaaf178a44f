"""Properties of loss and advantages that hold for any numbers."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchtune_grpo.advantages import (
    group_advantages,
    reward_advantages,
    total_reward,
)
from torchtune_grpo.config.keys import Advantage, RewardAggregation
from torchtune_grpo.loss import GRPOLoss

RATIOS = {
    "token": {},
    "gspo": {"importance_sampling_level": "sequence"},
    "cispo": {"surrogate": "cispo"},
    "dppo": {"surrogate": "dppo"},
}
LOSSES = {
    f"{name}-{aggregation}": GRPOLoss(
        **options, aggregation=aggregation, kl_estimator=kl, entropy_coeff=0.1
    )
    for name, options in RATIOS.items()
    for aggregation, kl in (("grpo", "k3"), ("dapo", "k1"), ("dr_grpo", "k2"), ("prompt", "k3"))
}
FIELDS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy", "corrections")
losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
few = settings(deadline=None, max_examples=25)


@st.composite
def batches(draw) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of random rows, float64, and its mask; rows may be fully masked."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    width = max(lengths) + draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.01, 1.0, 5.0]))

    def values() -> torch.Tensor:
        return -spread * torch.rand(len(lengths), width, generator=generator, dtype=torch.float64)

    batch = {name: values() for name in FIELDS}
    batch["advantages"] = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    batch["prompts"] = torch.randint(3, (len(lengths),), generator=generator)
    return batch, torch.arange(width) < torch.tensor(lengths)[:, None]


def weights_of(loss: GRPOLoss, prompts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    totals = dict(num_rows=len(mask), num_tokens=int(mask.sum()), max_generated_tokens=9)
    return loss.weights(mask, prompt_indices=prompts, **totals).double()


def evaluate(loss: GRPOLoss, batch: dict[str, torch.Tensor], mask: torch.Tensor, weights=None):
    """Loss, metric sums, and the gradients of log-probs and entropy."""
    leaves = [batch[name].clone().requires_grad_() for name in ("logprobs", "entropy")]
    if weights is None:
        weights = weights_of(loss, batch["prompts"], mask)
    given = {**batch, "logprobs": leaves[0], "entropy": leaves[1]}
    del given["prompts"]
    output = loss(**given, weights=weights, response_mask=mask)
    return output.loss.detach(), output.sums, torch.autograd.grad(output.loss, leaves)


@losses
@few
@given(data=batches(), shuffle=st.randoms(), size=st.integers(1, 6))
def test_order_of_rows_and_micro_batches_do_not_matter(loss, data, shuffle, size):
    batch, mask = data
    value, sums, grads = evaluate(loss, batch, mask)
    weights = weights_of(loss, batch["prompts"], mask)
    order = list(range(len(mask)))
    shuffle.shuffle(order)
    total, seen = torch.zeros_like(value), {name: 0 for name in sums}
    for rows in torch.tensor(order).split(size):
        part = {name: values[rows] for name, values in batch.items()}
        value_of_part, sums_of_part, grads_of_part = evaluate(
            loss, part, mask[rows], weights=weights[rows]
        )
        total += value_of_part
        seen = {name: seen[name] + number for name, number in sums_of_part.items()}
        for of_part, grad in zip(grads_of_part, grads, strict=True):
            torch.testing.assert_close(of_part, grad[rows], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(total, value, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(seen, sums)


@losses
@few
@given(data=batches(), poison=st.sampled_from([math.nan, math.inf, -math.inf, 1e300]))
def test_what_stands_at_masked_positions_changes_nothing(loss, data, poison):
    batch, mask = data
    value, sums, grads = evaluate(loss, batch, mask)
    dirty = {k: v.masked_fill(~mask, poison) if v.dim() == 2 else v for k, v in batch.items()}
    dirty_value, dirty_sums, dirty_grads = evaluate(loss, dirty, mask)
    assert torch.equal(dirty_value, value)
    assert all(torch.equal(dirty_sums[name], sums[name]) for name in sums)
    for dirty_grad, grad in zip(dirty_grads, grads, strict=True):
        assert torch.equal(dirty_grad, grad) and (dirty_grad[~mask] == 0).all()


def of_any_sign(scores: torch.Tensor, normalization: str) -> torch.Tensor:
    """MaxRL's may not be negative."""
    return scores.abs() if normalization == "max_rl" else scores


rewards = st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6)


@pytest.mark.parametrize("normalization", get_args(Advantage))
@few
@given(values=rewards, shuffle=st.randoms())
def test_order_within_a_group_does_not_matter(normalization, values, shuffle):
    """Two groups of three; each is shuffled by itself."""
    scores = of_any_sign(torch.tensor(values, dtype=torch.float64), normalization)
    order = [0, 1, 2]
    shuffle.shuffle(order)
    rows = torch.tensor([*order, *(3 + i for i in reversed(order))])
    kw = dict(group_size=3, normalization=normalization)
    torch.testing.assert_close(
        group_advantages(scores[rows], **kw),
        group_advantages(scores, **kw)[rows],
        atol=1e-8,  # of advantages that may be as large as the rewards
        rtol=1e-8,
    )


@pytest.mark.parametrize("aggregation", get_args(RewardAggregation))
@pytest.mark.parametrize("normalization", get_args(Advantage))
@few
@given(
    equal=st.floats(-1e30, 1e30),
    other=st.lists(st.floats(-9, 9), min_size=3, max_size=3),
    fails=st.none() | st.integers(0, 2),
)
def test_equal_rewards_give_exactly_zero(normalization, aggregation, equal, other, fails):
    """In float32, for any value, next to a group that has spread; one of them may have failed."""
    assume(len(set(other)) > 1)
    column = torch.tensor([equal] * 3 + other, dtype=torch.float32)
    scores = torch.stack([column, column.new_tensor([1.0] * 3 + other)], dim=1)  # [6, 2]
    scores = of_any_sign(scores, normalization)
    failed = torch.zeros_like(scores).bool()
    if fails is not None:
        failed[fails, 0], scores[fails, 0] = True, math.nan
    weights = torch.tensor([0.3, 0.7])
    advantages = reward_advantages(
        total_reward(scores, failed, weights, group_size=3),
        scores,
        weights,
        group_size=3,
        normalization=normalization,
        aggregation=aggregation,
    )
    assert (advantages[:3] == 0).all()
