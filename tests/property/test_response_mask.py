"""What is trained on is one thing, how long a response is another: masks with holes anywhere."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import build_policy
from trajectories import make_groups

from torchtune_grpo.loss import GRPOLoss
from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.trajectory import Trajectory

GROUP = 4
MODEL = build_policy()
LOSS = GRPOLoss(kl_coeff=0.3, entropy_coeff=0.1)
WAYS = {
    "one by one": dict(pack=False, rows=1),
    "padded": dict(pack=False, rows=8),
    "packed": dict(pack=True, rows=4),
    "packed together": dict(pack=True, rows=8),
    "packed, dense": dict(pack=True, rows=4, dense=True),
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
    generator = torch.Generator().manual_seed(0)
    trajectory = replace(
        trajectory,
        response_mask=trained,
        advantages=torch.randn(8, generator=generator),
        ref_logprobs=-torch.rand(trained.shape, generator=generator),
        weights=LOSS.weights(
            trained,
            prompt_indices=trajectory.prompt_indices,
            num_rows=8,
            num_tokens=int(trained.sum()),
            max_generated_tokens=9,
        ),
    )
    kept = draw(st.none() | st.sets(st.integers(0, 7), min_size=1).map(sorted))
    return trajectory if kept is None else trajectory.select(torch.tensor(kept))


def step(trajectory: Trajectory, **way) -> list[torch.Tensor]:
    """Log-probs [rows, L], 0 where nothing is trained on, the step's loss, and its gradients."""
    MODEL.zero_grad()
    logprobs = torch.zeros(trajectory.response_mask.shape)
    total = torch.zeros(())
    for part in micro_batches(trajectory, group_size=GROUP, **way):
        rows = trajectory.select(part.rows)
        new, entropy = response_logprobs(
            MODEL, part.layout, temperature=0.8, with_entropy=True, entropy_gradient=True
        )
        logprobs[part.rows] = new.detach()
        output = LOSS(
            logprobs=new,
            old_logprobs=None,
            ref_logprobs=rows.ref_logprobs,
            advantages=rows.advantages,
            weights=rows.weights,
            response_mask=rows.response_mask,
            entropy=entropy,
        )
        output.loss.backward()
        total += output.loss.detach()
    return [logprobs, total, *(p.grad.clone() for p in MODEL.parameters())]


@settings(deadline=None, max_examples=10)
@given(trajectory=trajectories())
def test_however_rows_are_laid_out_a_hole_is_a_hole(trajectory):
    """Log-probs, loss and gradients are those of one row at a time.

    And the log-probs of what is trained on do not depend on what else is: they are those of the
    full mask.
    """
    expected = step(trajectory, **WAYS["one by one"])
    for name, way in WAYS.items():
        for got, want in zip(step(trajectory, **way), expected, strict=True):
            error = (got - want).abs().max() / want.abs().max().clamp(min=0.1)
            assert error < 1e-5, (name, tuple(want.shape), error)
    assert (expected[0] != 0).equal(trajectory.response_mask)
    columns = torch.arange(trajectory.response_mask.shape[1])
    whole = replace(trajectory, response_mask=columns < trajectory.response_lengths[:, None])
    full = step(whole, **WAYS["packed"])[0]
    torch.testing.assert_close(
        full.where(trajectory.response_mask, 0), expected[0], atol=2e-5, rtol=0
    )


@settings(deadline=None)
@given(trajectory=trajectories())
def test_lengths_and_completions_do_not_depend_on_the_mask(trajectory):
    other = replace(trajectory, response_mask=~trajectory.response_mask)
    assert trajectory.completion_ids == other.completion_ids
    assert [len(ids) for ids in trajectory.completion_ids] == trajectory.response_lengths.tolist()
