"""Micro-batches hold every row once, and no more tokens than the budget."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import build_policy
from trajectories import make_groups

from torchtune_grpo.training import mini_batches, response_logprobs, trajectory_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.packing import packed_layout, row_layout

LENGTHS = st.lists(st.integers(0, 9), min_size=12, max_size=12).filter(any)


@settings(deadline=None)
@given(responses=LENGTHS, budget=st.integers(16, 60), pack=st.booleans())
def test_budget_is_kept_and_every_row_is_there_once(responses, budget, pack):
    """The longest row, prompt 7 + response 9 - 1, always fits."""
    trajectory = make_groups([7, 3, 5], responses)
    parts = micro_batches(trajectory, group_size=4, pack=pack, rows=12, token_budget=budget)
    assert all(part.layout.tokens.numel() <= budget for part in parts)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(12))
    for part in parts:
        wanted = trajectory.select(part.rows)
        first = wanted.prompt_lengths
        row, offset = wanted.response_mask.nonzero(as_tuple=True)
        assert torch.equal(part.layout.targets, wanted.tokens[row, first[row] + offset])


def test_a_budget_packs_what_fits_and_what_is_alike():
    """Group 1 (prompt 4, inputs 5 1 1 1) packs to 12; group 2 (prompt 2, 2 2 2 2) to 10.

    Under 14 each runs alone; under 24 both run together; under 10 group 1 is split.
    """
    trajectory = make_groups([4, 2], [6, 2, 2, 2, 3, 3, 3, 3])

    def plan(budget: int) -> list[list[int]]:
        parts = micro_batches(trajectory, group_size=4, pack=True, rows=8, token_budget=budget)
        return [part.rows.tolist() for part in parts]

    assert plan(14) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan(24) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert plan(10) == [[0, 1], [4, 5, 6, 7], [2, 3]]
    rows = micro_batches(trajectory, group_size=4, pack=False, rows=8, token_budget=10)
    # rows of 9, then 5 5 5, then 4 4 4 4
    assert [part.rows.tolist() for part in rows] == [[1, 2], [3, 4], [0], [5, 6], [7]]


@pytest.mark.parametrize("budget", [None, 20])
def test_the_largest_micro_batch_comes_first(budget):
    trajectory = make_groups([3, 5, 7], [1, 2, 2, 1, 2, 9, 9, 9, 1, 1, 1, 8])
    parts = micro_batches(trajectory, group_size=4, pack=True, rows=4, token_budget=budget)
    sizes = [part.layout.tokens.numel() for part in parts]
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("budget", [None, 60])
def test_rows_are_packed_by_their_prompts_when_some_are_dropped(budget):
    """Of groups of 4, the rows 0 2 3, 4 and 9 10: no pack mixes prompts."""
    whole = make_groups([3, 3, 3], [4, 9, 1, 2, 1, 1, 8, 3, 5, 2, 7, 6])
    trajectory = whole.select(torch.tensor([0, 2, 3, 4, 9, 10]))
    model = build_policy()
    parts = micro_batches(trajectory, group_size=4, pack=True, rows=12, token_budget=budget)
    assert [part.layout.attention is not None for part in parts] == [True]
    assert len(parts[0].layout.tokens) == 3
    one_by_one = micro_batches(trajectory, group_size=4, pack=False, rows=1)
    expected = trajectory_logprobs(model, one_by_one, temperature=0.7)
    values = trajectory_logprobs(model, parts, temperature=0.7)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)


def test_the_same_prompt_twice_makes_two_packs():
    trajectory = make_groups([3], [4, 9, 1, 2])
    parts = micro_batches(trajectory, group_size=2, pack=True, rows=2)
    assert sorted(part.rows.tolist() for part in parts) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("budget", [None, 60])
def test_a_rank_without_rows_takes_part_in_as_many_passes(monkeypatch, pack, budget):
    """Of which nothing is read, but every layer gets a gradient."""
    model = build_policy()
    nothing = make_groups([7, 3], [4, 9, 1, 2]).select(torch.zeros(4, dtype=torch.bool))
    settings = dict(group_size=2, pack=pack, rows=2, token_budget=budget)
    assert len(micro_batches(nothing, **settings)) == 1
    monkeypatch.setattr(mini_batches, "gather_over_ranks", lambda count: [count, 3])
    parts = micro_batches(nothing, **settings)
    assert [part.rows.tolist() for part in parts] == [[], [], []]
    assert trajectory_logprobs(model, parts, temperature=1.0).shape == (0, 9)
    logprobs, entropy = response_logprobs(
        model, parts[0].layout, temperature=1.0, with_entropy=True
    )
    assert logprobs.shape == entropy.shape == (0, 9)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.layers.parameters())


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("budget", [16, 25, 60, None])
def test_values_come_back_in_the_original_order(pack, budget):
    model = build_policy()
    trajectory = make_groups([7, 3, 5], [4, 9, 0, 2, 1, 1, 8, 3, 5, 2, 7, 6])
    one_by_one = micro_batches(trajectory, group_size=4, pack=False, rows=1)
    expected = trajectory_logprobs(model, one_by_one, temperature=0.7)
    parts = micro_batches(trajectory, group_size=4, pack=pack, rows=4, token_budget=budget)
    values = trajectory_logprobs(model, parts, temperature=0.7)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert (values != 0).equal(trajectory.response_mask)


def test_a_pass_holds_at_most_so_many_rows_and_packs_those_of_a_prompt():
    """Two groups of 4, whatever the bound."""
    trajectory = make_groups([7, 3], [4, 9, 1, 2, 1, 1, 8, 3])

    def cuts(rows: int, pack: bool = True) -> list[list[int]]:
        parts = micro_batches(trajectory, group_size=4, pack=pack, rows=rows)
        for part in parts:
            shares_a_prompt = len({row // 4 for row in part.rows.tolist()}) < len(part.rows)
            assert (part.layout.attention is not None) == (pack and shares_a_prompt)
        return sorted(part.rows.tolist() for part in parts)

    assert cuts(8) == cuts(9) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert cuts(4) == cuts(5) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cuts(3) == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert cuts(2) == cuts(2, pack=False) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cuts(1) == [[row] for row in range(8)]
    assert cuts(3, pack=False) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_packed_mask_lets_a_response_see_its_prompt_and_itself():
    """Every pair of positions, against the definition."""
    trajectory = make_groups([3, 2], [3, 1, 4, 2, 5, 1])
    packs = torch.tensor([0, 0, 0, 1, 1, 1])
    layout = packed_layout(trajectory, packs, dense=True)
    assert row_layout(trajectory).attention_mask(torch.float32) is None
    mask = layout.attention_mask(torch.float32)
    assert mask[mask != 0].unique().tolist() == [-torch.inf]
    for pack in range(2):
        owners = [None] * int(trajectory.prompt_lengths[3 * pack])
        for row in range(3 * pack, 3 * pack + 3):
            owners += [row] * max(int(trajectory.response_lengths[row]) - 1, 0)
        for query, owner in enumerate(owners):
            for key, other in enumerate(owners):
                sees = key <= query and (other is None or other == owner)
                assert (mask[pack, query, key].item() == 0) == sees, (pack, query, key)
