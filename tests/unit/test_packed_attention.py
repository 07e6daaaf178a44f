"""A packed row's responses attend by themselves as they do under the dense mask."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from policies import SHAPE
from policies import build_policy as tiny_policy
from torch.nn import functional as F

from torchtune_grpo.config.check import read_config
from torchtune_grpo.training.packing import Segments, dense_mask, segment_attention
from torchtune_grpo.training.policy import build_policy

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
SIZES = [[5, 3, 0, 4], [2, 6, 1, 1]]  # a response without inputs, and a shorter packed row
WIDTH = 12


SEGMENTS = Segments.of(SIZES, width=WIDTH, device=torch.device("cpu"))


def qkv(dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, WIDTH, 8) for heads in (4, 2, 2)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def for_each_head(q, k, v):
    """As torchtune's attention copies keys and values."""
    return q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)


def attend(*inputs, mask=None, dropout=0.0):
    """As a prepared model's attention does it."""
    call = tiny_policy().layers[0].attn._attention_call
    return call(*for_each_head(*inputs), mask=mask or SEGMENTS, dropout_p=dropout, is_causal=False)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
def test_values_and_gradients_are_those_of_the_dense_mask(dtype, atol):
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


@pytest.mark.parametrize("width", [5, 12, 16])
def test_dense_masks_are_aligned(width):
    """Memory-efficient attention on CUDA refuses others."""
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
    cfg = OmegaConf.load(CONFIGS / "llama3_2_1B_full_grpo.yaml")
    model = {"_component_": "torchtune.models.gemma2._component_builders.gemma2"}
    cfg.model = model | SHAPE | {"head_dim": 16}
    with pytest.raises(ValueError, match="Gemma2Attention. Set pack_groups to false"):
        build_policy(read_config(cfg), {}, device=torch.device("cpu"))
