"""Log-probs, entropy and their gradients equal the plain way: full logits, one row at a time."""

from dataclasses import replace

import pytest
import torch
from policies import SHAPE, VOCAB, build_policy, full_logprobs
from torchtune import training
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups, make_trajectory

from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.packing import packed_layout, row_layout
from torchtune_grpo.trajectory import Trajectory

KINDS = ["llama", "untied", "qwen", "lora", "dora", "lora_output"]


def plain(model, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    rows = torch.zeros(trajectory.response_mask.shape, dtype=torch.float64)
    for i, (prompt, response) in enumerate(
        zip(trajectory.prompt_lengths.tolist(), trajectory.response_lengths.tolist(), strict=True)
    ):
        tokens = trajectory.tokens[i, : prompt + response]
        values = full_logprobs(model, tokens, temperature)[prompt - 1 :]
        rows = rows.index_put((torch.tensor(i), torch.arange(response)), values)
    return rows


@pytest.mark.parametrize("kind", [*KINDS, "lora_frozen", "dora_frozen"])
def test_values_and_gradients_equal_full_logits(kind):
    """Frozen: only adapters are trained, so that the gradient comes from the frozen-head path."""
    model = build_policy(kind.removesuffix("_frozen"))
    trajectory = make_trajectory([3, 6, 1], [5, 2, 7])
    if kind.endswith("_frozen"):
        set_trainable_params(model, get_adapter_params(model))
    probe = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))

    def gradients(values: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (values * probe).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = plain(model, trajectory, 0.8)
    expected_grads = gradients(expected)
    values, _ = response_logprobs(
        model, row_layout(trajectory), temperature=0.8, chunk_bytes=4 * 100
    )
    grads = gradients(values)
    torch.testing.assert_close(values.double(), expected, atol=2e-5, rtol=0)
    assert grads.keys() == expected_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], expected_grads[name], atol=2e-4, rtol=1e-4)


def test_entropy_and_its_gradient_are_those_of_the_tempered_distribution():
    model, trajectory = build_policy(), make_trajectory([3], [4])
    layout, trained = row_layout(trajectory), list(model.parameters())
    log_p = (model(trajectory.tokens)[0, 2:6] / 0.5).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    expected_grads = torch.autograd.grad(expected.sum(), trained)

    _, entropy = response_logprobs(model, layout, temperature=0.5, with_entropy=True)
    torch.testing.assert_close(entropy[0], expected, atol=1e-5, rtol=0)
    assert not entropy.requires_grad
    with_gradient = dict(with_entropy=True, entropy_gradient=True, chunk_bytes=4 * 100)
    _, entropy = response_logprobs(model, layout, temperature=0.5, **with_gradient)
    grads = torch.autograd.grad(entropy.sum(), trained)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("kind", "dense"), [*((kind, False) for kind in KINDS), ("llama", True)])
def test_packed_groups_equal_single_rows(kind, dense):
    """Values and gradients of one row per group are those of one row each, also for masked rows.

    One packed row is longer than the model's context, as large groups are.
    """
    model = build_policy(kind)
    model.max_seq_len = 9
    trajectory = make_groups([4, 2], [5, 1, 3, 2, 6, 4])
    trajectory.response_mask[4] = False
    probe = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    results = []
    packs = torch.tensor([0, 0, 0, 1, 1, 1])
    for layout in (row_layout(trajectory), packed_layout(trajectory, packs, dense=dense)):
        values, _ = response_logprobs(model, layout, temperature=0.8)
        grads = torch.autograd.grad((values * probe).sum(), list(model.parameters()))
        results.append([values, *grads])
    for expected, packed in zip(*results, strict=True):
        torch.testing.assert_close(packed, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "kind, dtype",
    [("llama", torch.float32), ("lora_output", torch.float32), ("lora", torch.bfloat16)],
)
def test_compiled_layers_equal_eager_ones(kind, dtype, monkeypatch):
    """With ``compile: True``: the tied output trained, frozen, and with LoRA, packed, in chunks."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    model = build_policy(kind, dtype)
    if kind != "llama":
        set_trainable_params(model, get_adapter_params(model))
    trajectory = make_groups([4], [5, 1, 3])
    layout = packed_layout(trajectory, torch.zeros(3, dtype=torch.long), dense=True)
    probe = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    trained = [p for p in model.parameters() if p.requires_grad]

    def step() -> list[torch.Tensor]:
        values, entropy = response_logprobs(
            model, layout, temperature=0.8, with_entropy=True, chunk_bytes=4 * 100
        )
        gradients = torch.autograd.grad((values * probe).sum(), trained)
        return [values.detach(), entropy, *gradients]

    expected = step()
    torch._dynamo.utils.counters.clear()
    training.compile_model(model, verbose=False)
    results = step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0  # it was compiled
    # In bf16, compiled code may round once where eager code rounds after every operation.
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(results, expected, strict=True):
        scale = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got, want, atol=atol * scale, rtol=0)


def test_what_stands_in_the_padding_and_the_size_of_chunks_do_not_matter():
    model = build_policy()
    clean = make_trajectory([3, 6, 1], [5, 2, 7])
    dirty = make_trajectory([3, 6, 1], [5, 2, 7], garbage=11)
    with torch.no_grad():
        expected, _ = response_logprobs(model, row_layout(clean), temperature=1.0)
    for size in (1, 1000, 100_000):
        values, _ = response_logprobs(model, row_layout(dirty), temperature=1.0, chunk_bytes=size)
        torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)
    assert (expected[~clean.response_mask] == 0).all()


def test_forward_is_restored_after_an_error():
    model, trajectory = build_policy(), make_trajectory([3], [4])
    broken = replace(trajectory, tokens=trajectory.tokens + 10_000)
    with pytest.raises(IndexError):
        response_logprobs(model, row_layout(broken), temperature=1.0)
    assert model(trajectory.tokens).shape == (1, 7, VOCAB)
    assert model.max_seq_len == SHAPE["max_seq_len"]
