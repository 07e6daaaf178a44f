"""Masks with holes anywhere: a response's length does not follow from what is trained on."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import build_policy, response_rows
from trajectories import make_groups

from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.trajectory import Trajectory

GROUP = 4
MODEL = build_policy()
EXACT = deepcopy(MODEL).double()
WAYS = {
    "one by one": dict(pack=False, rows=1),
    "padded": dict(pack=False, rows=8),
    "packed": dict(pack=True, rows=4),
    "packed together": dict(pack=True, rows=8),
    "budgeted": dict(pack=True, rows=8, token_budget=30),
    "budgeted rows": dict(pack=False, rows=8, token_budget=30),
}


@st.composite
def trajectories(draw) -> Trajectory:
    """Some rows of two groups of four, whose masks have holes anywhere, or are empty."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=8, max_size=8).filter(any))
    trajectory = make_groups([5, 2], lengths)
    trained = torch.zeros_like(trajectory.response_mask)
    for row, length in enumerate(lengths):
        kept = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        trained[row, :length] = torch.tensor(kept, dtype=torch.bool)
    trajectory = replace(trajectory, response_mask=trained)
    kept = draw(st.none() | st.sets(st.integers(0, 7), min_size=1).map(sorted))
    return trajectory if kept is None else trajectory.select(torch.tensor(kept))


def with_gradients(values: torch.Tensor, model) -> list[torch.Tensor]:
    """Return values [2, rows, L], and the gradients of a random sum of them."""
    model.zero_grad()
    probe = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    (values * probe).sum().backward()
    return [values.detach(), *(p.grad.clone() for p in model.parameters())]


def step(trajectory: Trajectory, **way) -> list[torch.Tensor]:
    """Log-probs and entropy [2, rows, L], 0 where nothing is trained on, and gradients of both."""
    values = torch.zeros(2, *trajectory.response_mask.shape)
    for part in micro_batches(trajectory, group_size=GROUP, **way):
        new = response_logprobs(
            MODEL, part.layout, temperature=0.8, with_entropy=True, entropy_gradient=True
        )
        values[:, part.rows] = torch.stack(new)
    return with_gradients(values, MODEL)


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(trajectory=trajectories())
def test_however_rows_are_laid_out_a_hole_is_a_hole(trajectory):
    """Log-probs, entropy and gradients are those of plain rows, one at a time in float64.

    And the log-probs of what is trained on do not depend on what else is: they are those of the
    full mask.
    """
    expected = with_gradients(response_rows(EXACT, trajectory, temperature=0.8), EXACT)
    for name, way in WAYS.items():
        for got, want in zip(step(trajectory, **way), expected, strict=True):
            error = (got - want).abs().max() / want.abs().max().clamp(min=0.1)
            assert error < 1e-5, (name, tuple(want.shape), error)
    assert (expected[0][0] != 0).equal(trajectory.response_mask)
    columns = torch.arange(trajectory.response_mask.shape[1])
    whole = replace(trajectory, response_mask=columns < trajectory.response_lengths[:, None])
    full = step(whole, **WAYS["packed"])[0]
    full = full.where(trajectory.response_mask, 0)
    torch.testing.assert_close(full.double(), expected[0], atol=2e-5, rtol=0)
