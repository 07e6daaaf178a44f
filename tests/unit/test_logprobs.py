"""Log-probs, entropy and their gradients equal the plain way: full logits, one row at a time."""

from dataclasses import replace

import pytest
import torch
from policies import KINDS, SHAPE, VOCAB, build_policy, response_rows
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from trajectories import make_groups

from torchtune_grpo.training import response_logprobs
from torchtune_grpo.training.logprobs import Entropy
from torchtune_grpo.training.packing import packed_layout, row_layout

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
