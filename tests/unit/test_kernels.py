"""Attention of spans and the float32 product: one meaning on every device; on CUDA, one kernel."""

import pytest
import torch
from fake_cuda import CUDA, fake_cuda
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchtune_grpo.machine.attention import (
    Spans,
    float32_product,
    has_varlen_kernel,
    varlen_attention,
)

CPU = torch.device("cpu")
QUERIES, KEYS = [5, 3, 0, 1, 1, 4, 1], [5, 8, 0, 6, 1, 9, 3]
HEADS, KV_HEADS, SIZE = 4, 2, 16


def heads(count: int, *, tokens: int, seed: int, size: int = SIZE, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, count, size, generator=generator, dtype=dtype)


def dense(q, k, v):
    """All parts at once, with a mask over everything; the last query sees all keys of its part."""
    part_of_query = torch.arange(len(QUERIES)).repeat_interleave(torch.tensor(QUERIES))
    part_of_key = torch.arange(len(KEYS)).repeat_interleave(torch.tensor(KEYS))
    query = torch.cat([torch.arange(m - n, m) for n, m in zip(QUERIES, KEYS, strict=True)])
    key = torch.cat([torch.arange(m) for m in KEYS])
    seen = (part_of_query[:, None] == part_of_key) & (key <= query[:, None])
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS, 1])
def test_a_parts_last_query_sees_all_of_its_keys(kv_heads):
    inputs = [
        heads(HEADS, tokens=sum(QUERIES), seed=0).requires_grad_(),
        heads(kv_heads, tokens=sum(KEYS), seed=1).requires_grad_(),
        heads(kv_heads, tokens=sum(KEYS), seed=2).requires_grad_(),
    ]
    probe = heads(HEADS, tokens=sum(QUERIES), seed=3)
    results = []
    for out in (varlen_attention(*inputs, Spans.of(QUERIES, KEYS, device=CPU)), dense(*inputs)):
        results.append([out, *torch.autograd.grad(out, inputs, probe)])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


class Masks(TorchFunctionMode):
    """Remembers the masks of all attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            assert not torch.backends.cuda.cudnn_sdp_enabled(), "it makes a plan for each shape"
            self.seen += [kwargs["attn_mask"]] if kwargs["attn_mask"] is not None else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, dropout", [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_on_cuda_masks_are_aligned_where_the_kernel_does_not_run(dtype, dropout):
    counts = [(sum(QUERIES), HEADS), (sum(KEYS), KV_HEADS), (sum(KEYS), KV_HEADS)]
    with fake_cuda(), Masks() as masks:
        inputs = [torch.empty(*count, SIZE, dtype=dtype, device=CUDA) for count in counts]
        varlen_attention(*inputs, Spans.of(QUERIES, KEYS, device=CUDA), dropout=dropout)
    assert [tuple(mask.shape) for mask in masks.seen] == [(3, 8), (4, 9)]
    for mask in masks.seen:
        assert mask.storage_offset() == 0
        assert mask.stride(-1) == 1 and mask.stride(0) % 8 == 0


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(
    "device, atol, rtol", [("cpu", 1e-4, 0), pytest.param("cuda", 1e-3, 1e-5, marks=GPU)]
)
@pytest.mark.parametrize("into", [False, True])
def test_float32_product_is_not_rounded_to_bf16(device, atol, rtol, into):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=generator).bfloat16() for n in (24, 1000))
    out = torch.empty(24, 1000, device=device) if into else None
    product = float32_product(x.to(device), weight.to(device), out=out)
    assert product.dtype == torch.float32
    assert out is None or product.data_ptr() == out.data_ptr()
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(product.cpu().double(), exact, atol=atol, rtol=rtol)


@pytest.mark.parametrize("kv_heads", [pytest.param(n, marks=GPU) for n in (8, 2, 1)])
def test_varlen_attention_is_its_twin_forward_and_backward(kv_heads):
    """A prompt, and responses to it: of one token, of none, and of lengths that no tile has."""
    queries, keys = [37, 5, 1, 0, 130, 64], [37, 42, 38, 37, 167, 101]
    sizes = [(8, queries), (kv_heads, keys), (kv_heads, keys), (8, queries)]
    *inputs, probe = [
        heads(count, tokens=sum(lengths), seed=seed, size=64, dtype=torch.float32).bfloat16()
        for seed, (count, lengths) in enumerate(sizes)
    ]
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        assert has_varlen_kernel(given[0]) == (device == "cuda")
        out = varlen_attention(*given, Spans.of(queries, keys, device=torch.device(device)))
        gradients = torch.autograd.grad(out, given, probe.to(device, dtype))
        results[device] = [x.float().cpu() for x in (out, *gradients)]
    # bf16 has 8 bits: a relative error of 0.4% in each factor of sums of about unit variance.
    torch.testing.assert_close(results["cuda"], results["cpu"], atol=0.04, rtol=0.04)
