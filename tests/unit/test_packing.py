"""Which rows share a forward pass, how they are laid out, and how packed ones attend."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import SHAPE
from policies import build_policy as tiny_policy
from torch.nn import functional as F
from trajectories import make_groups

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.training import mini_batches, response_logprobs, trajectory_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.packing import (
    Segments,
    dense_mask,
    packed_layout,
    row_layout,
    segment_attention,
)
from torchtune_grpo.training.policy import build_policy

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
LENGTHS = st.lists(st.integers(0, 9), min_size=12, max_size=12).filter(any)
CPU = torch.device("cpu")


def rows_of(trajectory, **way) -> list[list[int]]:
    return [part.rows.tolist() for part in micro_batches(trajectory, **way)]


@settings(deadline=None)
@given(responses=LENGTHS, budget=st.integers(16, 60), pack=st.booleans())
def test_budget_is_kept_and_every_row_is_there_once(responses, budget, pack):
    """The longest row, prompt 7 + response 9 - 1, always fits."""
    trajectory = make_groups([7, 3, 5], responses)
    parts = micro_batches(trajectory, group_size=4, pack=pack, rows=12, token_budget=budget)
    sizes = [part.layout.tokens.numel() for part in parts]
    assert max(sizes) <= budget and sizes == sorted(sizes, reverse=True)
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(12))
    for part in parts:
        wanted = trajectory.select(part.rows)
        row, offset = wanted.response_mask.nonzero(as_tuple=True)
        targets = wanted.tokens[row, wanted.prompt_lengths[row] + offset]
        assert torch.equal(part.layout.targets, targets)


def test_a_budget_packs_what_fits_and_what_is_alike():
    """Group 1 (prompt 4, inputs 5 1 1 1) packs to 12; group 2 (prompt 2, 2 2 2 2) to 10.

    Under 14 each runs alone; under 24 both run together; under 10 group 1 is split.
    """
    trajectory = make_groups([4, 2], [6, 2, 2, 2, 3, 3, 3, 3])

    def plan(budget: int, pack: bool = True) -> list[list[int]]:
        return rows_of(trajectory, group_size=4, pack=pack, rows=8, token_budget=budget)

    assert plan(14) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert plan(24) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert plan(10) == [[0, 1], [4, 5, 6, 7], [2, 3]]
    # rows of 9, then 5 5 5, then 4 4 4 4
    assert plan(10, pack=False) == [[1, 2], [3, 4], [0], [5, 6], [7]]


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
    twice = make_groups([3], [4, 9, 1, 2])  # the same prompt twice makes two packs
    assert sorted(rows_of(twice, group_size=2, pack=True, rows=2)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("budget", [None, 60])
def test_a_rank_without_rows_takes_part_in_as_many_passes(monkeypatch, pack, budget):
    """Of which nothing is read, but every layer gets a gradient."""
    model = tiny_policy()
    nothing = make_groups([7, 3], [4, 9, 1, 2]).select(torch.zeros(4, dtype=torch.bool))
    way = dict(group_size=2, pack=pack, rows=2, token_budget=budget)
    assert len(micro_batches(nothing, **way)) == 1
    monkeypatch.setattr(mini_batches, "gather_over_ranks", lambda count: [count, 3])
    parts = micro_batches(nothing, **way)
    assert [part.rows.tolist() for part in parts] == [[], [], []]
    assert trajectory_logprobs(model, parts, temperature=1.0).shape == (0, 9)
    logprobs, entropy = response_logprobs(
        model, parts[0].layout, temperature=1.0, with_entropy=True
    )
    assert logprobs.shape == entropy.shape == (0, 9)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.layers.parameters())


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


WIDTH, SIZES = 12, [[5, 3, 0, 4], [2, 6, 1, 1]]  # one without inputs, and a shorter packed row
SEGMENTS = Segments.of(SIZES, width=WIDTH, device=CPU)


def qkv(dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, WIDTH, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def for_each_head(q, k, v):
    """As torchtune's attention copies keys and values."""
    return q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)


def attend(*inputs, dropout=0.0):
    """As a prepared model's attention does it."""
    call = tiny_policy().layers[0].attn._attention_call
    return call(*for_each_head(*inputs), mask=SEGMENTS, dropout_p=dropout, is_causal=False)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_by_segments_are_those_of_the_dense_mask(dtype, atol):
    segments = torch.tensor(
        [[0, 0, 0, 0, 0, 1, 1, 1, 3, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3]]
    )
    ends = [sum(sizes) for sizes in SIZES]
    inputs = qkv(dtype)
    mask = dense_mask(segments, dtype)[:, None]
    dense = F.scaled_dot_product_attention(*for_each_head(*inputs), attn_mask=mask)
    outputs = []
    for out in (dense, segment_attention(*inputs, segments=SEGMENTS), attend(*inputs)):
        read = torch.cat([row[:, :end] for row, end in zip(out, ends, strict=True)], dim=1)
        outputs.append([read, *torch.autograd.grad(read.square().sum(), inputs)])
    for by_segments in outputs[1:]:
        torch.testing.assert_close(by_segments, outputs[0], atol=atol, rtol=atol)


def test_dense_masks_are_aligned():
    """Memory-efficient attention on CUDA refuses others."""
    for width in (5, 12, 16):
        mask = dense_mask(torch.zeros(2, width, dtype=torch.long), torch.bfloat16)
        assert mask.shape == (2, width, width) and mask.storage_offset() == 0
        assert mask.stride(2) == 1 and mask.stride(1) % 8 == mask.stride(0) % 8 == 0


def test_dropout_drops_the_same_in_the_recomputed_forward_pass():
    """The output is linear in the values, so that <g, out> = <v, gradient> under one pattern."""
    q, k, v = qkv()
    torch.manual_seed(0)
    out = attend(q, k, v, dropout=0.5)
    assert (out - attend(q, k, v)).abs().max() > 0.1
    g = torch.randn(out.shape)
    (gradient,) = torch.autograd.grad(out, v, g)
    torch.testing.assert_close((g * out).sum(), (v * gradient).sum(), atol=1e-4, rtol=1e-4)


def test_other_attention_is_refused():
    """Gemma 2's sliding window would count the positions of the packed row."""
    cfg = load_config("llama3_2_1B_full_grpo")
    model = {"_component_": "torchtune.models.gemma2._component_builders.gemma2"}
    cfg.model = model | SHAPE | {"head_dim": 16}
    with pytest.raises(ValueError, match="Gemma2Attention. Set pack_groups to false"):
        build_policy(read_config(cfg), {}, device=CPU)
