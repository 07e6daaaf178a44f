"""Which rows share a forward pass, how they are laid out, and how packed ones attend.

Log-probs, entropy and their gradients equal the plain way: full logits, one row at a time.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import KINDS, SHAPE, VOCAB, build_policy, response_rows
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups, make_trajectory

from torchtune_grpo.config.check import read_config
from torchtune_grpo.config.command_line import load_config
from torchtune_grpo.machine.segments import Segments
from torchtune_grpo.models.layers import segment_attention
from torchtune_grpo.training import mini_batches, response_logprobs
from torchtune_grpo.training.logprobs import Entropy, trajectory_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.packing import packed_layout, row_layout
from torchtune_grpo.training.policy import make_policy

LENGTHS = st.lists(st.integers(0, 9), min_size=12, max_size=12).filter(any)
CPU = torch.device("cpu")


def test_rows_are_selected_with_their_texts_by_index_or_mask():
    """In the order asked for; or none at all."""
    texts = ["a", "b", "c"]
    of_rows = dict(prompts=texts, completions=texts, columns={"answer": texts})
    whole = replace(make_trajectory([2, 2, 1], [1, 2, 4]), **of_rows)
    for rows, expected in (([2, 0], [2, 0]), ([False, True, True], [1, 2]), ([False] * 3, [])):
        part = whole.select(torch.tensor(rows))
        assert part.prompt_indices.tolist() == expected
        assert part.response_mask.equal(whole.response_mask[expected])
        found = (part.prompts, part.completions, part.columns["answer"])
        assert found == ([texts[row] for row in expected],) * 3


@settings(deadline=None)
@given(responses=LENGTHS, rows=st.integers(1, 12), pack=st.booleans(), seed=st.integers(0, 99))
def test_a_pass_has_at_most_so_many_rows_and_every_row_is_there_once(responses, rows, pack, seed):
    """The largest pass comes first; masks may have holes anywhere."""
    trajectory, generator = make_groups([7, 3, 5], responses), torch.Generator().manual_seed(seed)
    kept = torch.rand(trajectory.response_mask.shape, generator=generator)
    trajectory.response_mask[kept < seed / 100] = False
    parts = micro_batches(trajectory, group_size=4, pack=pack, rows=rows)
    sizes = [part.layout.tokens.numel() for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(len(part.rows) for part in parts) <= rows
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == list(range(12))
    for part in parts:
        wanted = trajectory.select(part.rows)
        row, offset = wanted.response_mask.nonzero(as_tuple=True)
        targets = wanted.tokens[row, wanted.prompt_lengths[row] + offset]
        assert torch.equal(part.layout.targets, targets)


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
    parts = micro_batches(twice, group_size=2, pack=True, rows=2)
    assert sorted(part.rows.tolist() for part in parts) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("shared", "tokens"),
    [(0, (5 + 3 + 2) + (6 + 1 + 4)), (4, 4 + (1 + 3 + 2) + (2 + 1 + 4)), (5, 4 + 6 + 7)],
)
def test_what_all_prompts_begin_with_is_there_once(shared, tokens):
    """But each prompt's last token, which predicts its responses, is its own."""
    trajectory = make_groups([5, 6], [4, 3, 2, 5], shared=shared)
    (part,) = micro_batches(trajectory, group_size=2, pack=True, rows=4)
    assert part.layout.tokens.shape == (1, tokens)


@pytest.mark.parametrize("kind", ["llama", "lora_output"])
def test_a_rank_without_rows_takes_part_in_as_many_passes(monkeypatch, kind):
    """Of which nothing is read, but every layer gets a gradient."""
    model = build_policy(kind)
    nothing = make_groups([7, 3], [4, 9, 1, 2]).select(torch.zeros(4, dtype=torch.bool))
    way = dict(group_size=2, pack=True, rows=2)
    assert len(micro_batches(nothing, **way)) == 1
    monkeypatch.setattr(mini_batches, "gather_over_ranks", lambda count: [count, 3])
    parts = micro_batches(nothing, **way)
    assert [part.rows.tolist() for part in parts] == [[], [], []]
    assert trajectory_logprobs(model, parts, temperature=1.0).shape == (0, 9)
    logprobs, entropy = response_logprobs(model, parts[0].layout, temperature=1.0, entropy="value")
    assert logprobs.shape == entropy.shape == (0, 9)
    logprobs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.layers.parameters())


@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize("at_once", [40, 10_000])
def test_parts_attend_together_as_they_do_alone(monkeypatch, window, at_once):
    """Padding changes nothing, not even with queries whose keys are all padding."""
    prompts, parts, end = [range(7), range(7, 9)], [], 9
    for prompt, count in zip(prompts * 4, [1, 2, 9, 3, 0, 12, 1, 5], strict=True):
        parts.append([prompt, range(end, end := end + count)])
    parts = [[prompt] for prompt in prompts] + parts
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (
        torch.randn(end, heads, 8, generator=generator).double().requires_grad_()
        for heads in (4, 2, 2, 4)
    )

    def attended(scores: int) -> tuple[int, list[torch.Tensor]]:
        monkeypatch.setattr("torchtune_grpo.machine.segments._SCORES", scores)
        segments = Segments.from_ranges(parts, device=CPU)
        out = segment_attention(q, k, v, segments, window=window, dropout=0.0)
        return len(segments.batches), [out, *torch.autograd.grad(out, (q, k, v), g)]

    (alone, expected), (together, got) = attended(1), attended(at_once)
    assert alone == 9 and together == {40: 7, 10_000: 1}[at_once]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_dropout_drops_the_same_in_the_recomputed_forward_pass():
    """The output is linear in the values, so that <g, out> = <v, gradient> under one pattern."""
    prompt = range(5)
    parts = [[prompt], [prompt, range(5, 8)], [prompt, range(8, 8)], [prompt, range(8, 12)]]
    segments = Segments.from_ranges(parts, device=CPU)
    generator = torch.Generator().manual_seed(0)
    q, g, k, v = (
        torch.randn(12, heads, 8, generator=generator).requires_grad_() for heads in (4, 4, 2, 2)
    )

    def attend(dropout: float) -> torch.Tensor:
        return segment_attention(q, k, v, segments, dropout=dropout)

    out = attend(0.5)
    assert (out - attend(0.0)).abs().max() > 0.1
    (gradient,) = torch.autograd.grad(out, v, g)
    torch.testing.assert_close((g * out).sum(), (v * gradient).sum(), atol=1e-4, rtol=1e-4)


def test_other_attention_is_refused():
    """The window of torchtune's Gemma 2 would count the positions of the packed row."""
    cfg = load_config("llama3_2_1B_full_grpo")
    model = {"_component_": "torchtune.models.gemma2._component_builders.gemma2"}
    cfg.model = model | SHAPE | {"head_dim": 16}
    with pytest.raises(ValueError, match="Gemma2Attention. Set pack_groups to false"):
        make_policy(read_config(cfg), device=CPU)


# --- Log-probs -----------------------------------------------------------------------------------

PACKS = [0, 0, 0, 1, 1, 1]


def values_and_gradients(model, values: torch.Tensor) -> list[torch.Tensor]:
    """Of log-probs and entropy [2, N, L]."""
    trained = [p for p in model.parameters() if p.requires_grad]
    probe = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((values * probe).sum(), trained)
    return [values.detach().float(), *gradients]


def by_layout(model, layout, *, entropy: Entropy) -> list[torch.Tensor]:
    values = response_logprobs(
        model,
        layout,
        temperature=0.8,
        entropy=entropy,
        chunk_bytes=4 * 100,
    )
    return values_and_gradients(model, torch.stack(values))


@pytest.mark.parametrize("kind", [*KINDS, "lora_frozen", "dora_frozen"])
def test_values_and_gradients_equal_full_logits(kind):
    """For rows by themselves and packed by group, and prompts that begin alike.

    What is trained on has holes, which change nothing beside them, and may be nothing of a row. A
    packed row is longer than the model's context. Frozen: only adapters are trained, and entropy
    has no gradient, so that the frozen-head path is taken.
    """
    model, is_frozen = build_policy(kind.removesuffix("_frozen")), kind.endswith("_frozen")
    model.max_seq_len = 9
    if is_frozen:
        set_trainable_params(model, get_adapter_params(model))
    trajectory = make_groups([4, 3], [5, 1, 3, 2, 6, 4], shared=2)
    trajectory.response_mask[4] = False
    trajectory.response_mask[[0, 0, 2, 5], [0, 2, 2, 1]] = False
    logprobs, entropy = response_rows(model, trajectory, 0.8)
    entropy = entropy.detach() if is_frozen else entropy
    expected = values_and_gradients(model, torch.stack([logprobs, entropy]))
    for layout in (row_layout(trajectory), packed_layout(trajectory, PACKS)):
        results = by_layout(model, layout, entropy="value" if is_frozen else "gradient")
        torch.testing.assert_close(results[0], expected[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(results, expected, atol=2e-4, rtol=1e-4)


def test_forward_is_restored_after_an_error():
    model, trajectory = build_policy(), make_groups([3], [4])
    broken = replace(trajectory, tokens=trajectory.tokens + 10_000)
    with pytest.raises(IndexError):
        response_logprobs(model, row_layout(broken), temperature=1.0)
    assert model(trajectory.tokens).shape == (1, 7, VOCAB)
    assert model.max_seq_len == SHAPE["max_seq_len"]
