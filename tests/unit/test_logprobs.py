"""Log-probs, entropy and their gradients equal the plain way: full logits, one row at a time."""

from dataclasses import replace

import pytest
import torch
from policies import KINDS, SHAPE, VOCAB, build_policy, response_rows
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups

from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.mini_batches import micro_batches
from torchtune_grpo.training.packing import compile_layers, packed_layout, row_layout

PACKS = [0, 0, 0, 1, 1, 1]


def values_and_gradients(model, values: torch.Tensor) -> list[torch.Tensor]:
    """Of log-probs and entropy [2, N, L]."""
    trained = [p for p in model.parameters() if p.requires_grad]
    probe = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    gradients = torch.autograd.grad((values * probe).sum(), trained)
    return [values.detach().float(), *gradients]


def by_layout(model, layout, *, entropy_gradient: bool) -> list[torch.Tensor]:
    values = response_logprobs(
        model,
        layout,
        temperature=0.8,
        with_entropy=True,
        entropy_gradient=entropy_gradient,
        chunk_bytes=4 * 100,
    )
    return values_and_gradients(model, torch.stack(values))


@pytest.mark.parametrize("kind", [*KINDS, "lora_frozen", "dora_frozen"])
def test_values_and_gradients_equal_full_logits(kind):
    """For rows by themselves and packed by group, also masked ones, and prompts that begin alike.

    A packed row is longer than the model's context. Frozen: only adapters are trained, and entropy
    has no gradient, so that the frozen-head path is taken.
    """
    model, is_frozen = build_policy(kind.removesuffix("_frozen")), kind.endswith("_frozen")
    model.max_seq_len = 9
    if is_frozen:
        set_trainable_params(model, get_adapter_params(model))
    trajectory = make_groups([4, 3], [5, 1, 3, 2, 6, 4], shared=2)
    trajectory.response_mask[4] = False
    logprobs, entropy = response_rows(model, trajectory, 0.8)
    entropy = entropy.detach() if is_frozen else entropy
    expected = values_and_gradients(model, torch.stack([logprobs, entropy]))
    for layout in (
        row_layout(trajectory),
        packed_layout(trajectory, PACKS),
    ):
        results = by_layout(model, layout, entropy_gradient=not is_frozen)
        torch.testing.assert_close(results[0], expected[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(results, expected, atol=2e-4, rtol=1e-4)


def one_layer(model):
    """The model without its other layers, whose graphs would take long and be the same."""
    model.layers = model.layers[:1]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_compiled_layers_equal_eager_ones(kind, monkeypatch):
    """With ``compile: True``, in chunks; tests/recipes trains adapters so."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    model = one_layer(build_policy(kind))
    layout = row_layout(make_groups([4, 2], [5, 1, 3, 2, 6, 4]))
    expected = by_layout(model, layout, entropy_gradient=False)
    torch._dynamo.utils.counters.clear()
    compile_layers(model)
    results = by_layout(model, layout, entropy_gradient=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled
    for got, want in zip(results, expected, strict=True):
        scale = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got, want, atol=1e-5 * scale, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "window"])
def test_all_lengths_are_one_graph_and_single_rows_another(kind, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = one_layer(build_policy(kind))
    compile_layers(model)
    for prompts, responses in (
        ([4, 2], [5, 1, 3, 2, 6, 4]),
        ([9, 3], [2, 2, 7, 9, 1, 1]),
        ([8, 3], [2, 2, 7, 9, 1, 1]),
        ([3, 30], [25, 3, 3, 1, 1, 2]),
        ([5], [4, 3, 2]),
        ([2], [2, 1, 2]),
        ([8], [1, 6, 2]),
    ):
        rows = make_groups(prompts, responses)
        (part,) = micro_batches(rows, group_size=3, pack=False, rows=6)
        response_logprobs(model, part.layout, temperature=1.0)
    nothing = rows.select(torch.empty(0, dtype=torch.long))
    (part,) = micro_batches(nothing, group_size=3, pack=False, rows=6)
    response_logprobs(model, part.layout, temperature=1.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
def test_layers_with_and_without_a_window_are_all_compiled(monkeypatch):
    """In 12 variants, where torch itself would stop at 8: for each window, mode and batch."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build_policy("window")
    compile_layers(model)
    for is_trained, has_gradient in ((False, False), (True, False), (True, True)):
        model.train(is_trained)
        for prompts, responses in (([9, 3], [2, 7, 9, 1]), ([7, 3], [2, 5, 1, 1]), ([8], [6])):
            layout = row_layout(make_groups(prompts, responses))
            with torch.set_grad_enabled(has_gradient):
                response_logprobs(model, layout, temperature=1.0)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] == 12


def test_forward_is_restored_after_an_error():
    model, trajectory = build_policy(), make_groups([3], [4])
    broken = replace(trajectory, tokens=trajectory.tokens + 10_000)
    with pytest.raises(IndexError):
        response_logprobs(model, row_layout(broken), temperature=1.0)
    assert model(trajectory.tokens).shape == (1, 7, VOCAB)
    assert model.max_seq_len == SHAPE["max_seq_len"]
