"""What a CUDA kernel computes beside its twin in float32 on a CPU."""

import pytest
import torch

from torchtune_grpo.machine.attention import (
    Spans,
    float32_product,
    has_varlen_kernel,
    varlen_attention,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# A prompt, and responses to it: of one token, of none, and of lengths that no kernel's tile has.
QUERIES, KEYS = [37, 5, 1, 0, 130, 64], [37, 42, 38, 37, 167, 101]


def heads(count: int, *, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, count, 64, generator=generator).bfloat16()


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_varlen_attention_is_its_twin_forward_and_backward(kv_heads):
    inputs = [
        heads(8, tokens=sum(QUERIES), seed=0),
        heads(kv_heads, tokens=sum(KEYS), seed=1),
        heads(kv_heads, tokens=sum(KEYS), seed=2),
    ]
    probe = heads(8, tokens=sum(QUERIES), seed=3)
    results = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        assert has_varlen_kernel(given[0]) == (device == "cuda")
        out = varlen_attention(*given, Spans.of(QUERIES, KEYS, device=torch.device(device)))
        gradients = torch.autograd.grad(out, given, probe.to(device, dtype))
        results[device] = [x.float().cpu() for x in (out, *gradients)]
    # bf16 has 8 bits: a relative error of 0.4% in each factor of sums of about unit variance.
    torch.testing.assert_close(results["cuda"], results["cpu"], atol=0.04, rtol=0.04)


@pytest.mark.parametrize("into", [False, True])
def test_float32_product_is_not_rounded_to_bf16(into):
    x, weight = (torch.randn(n, 256).bfloat16() for n in (24, 1000))
    exact = x.double() @ weight.double().t()
    out = torch.empty(24, 1000, device="cuda") if into else None
    got = float32_product(x.cuda(), weight.cuda(), out=out)
    assert got.dtype == torch.float32
    assert out is None or got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(got.cpu().double(), exact, atol=1e-3, rtol=1e-5)
