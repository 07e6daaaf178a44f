"""Log-probs by blocks: equal to full logits for every kind of projection, and never that large."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.modules import TiedLinear
from torchtune.modules.peft import LoRALinear

from torchtune_grpo.training import logprobs
from torchtune_grpo.training.logprobs import Entropy, output_matrix, projection_logprobs

TOKENS, DIM, VOCAB = 300, 16, 1000
CHUNK = 20_000  # logits at once, of 300,000


def lora() -> LoRALinear:
    layer = LoRALinear(DIM, VOCAB, rank=4, alpha=8)
    nn.init.normal_(layer.lora_b.weight)
    return layer


KINDS = {
    "trained": lambda: nn.Linear(DIM, VOCAB, bias=False),
    "frozen": lambda: nn.Linear(DIM, VOCAB, bias=False).requires_grad_(False),
    "tied": lambda: TiedLinear(nn.Embedding(VOCAB, DIM)),
    "bias": lambda: nn.Linear(DIM, VOCAB),
    "lora": lora,
}


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any tensor has, in the forward and the backward pass."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def step(output, *, blocked: bool, entropy: Entropy, dtype: torch.dtype):
    """Log-probs, entropy, and the gradients of h and of what is trained."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(TOKENS, DIM, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    probe = torch.randn(2, TOKENS, generator=generator)
    kw = dict(temperature=0.7, entropy=entropy)
    if blocked:
        values = projection_logprobs(output, h, targets, **kw, chunk_bytes=4 * CHUNK)
    else:
        weight = output_matrix(output)
        logits = output(h) if weight is None else h.float() @ weight.float().t()
        log_p = (logits.float() / 0.7).log_softmax(dim=-1)
        values = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)
    total = (values[0] * probe[0]).sum()
    if entropy == "gradient":
        total = total + (values[1] * probe[1]).sum()
    weight = output.tied_module if isinstance(output, TiedLinear) else output
    trained = [p for p in weight.parameters() if p.requires_grad]
    return [v.detach() for v in values], torch.autograd.grad(total, [h, *trained])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entropy", ["value", "gradient"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_equal_full_logits_and_stay_small(kind, entropy, dtype):
    torch.manual_seed(0)
    output = KINDS[kind]()
    for parameter in nn.Module.parameters(getattr(output, "tied_module", output)):
        parameter.data = (torch.randn_like(parameter) * 0.5).to(dtype)
    assert (output_matrix(output) is None) == (kind in ("bias", "lora"))
    kw = dict(entropy=entropy, dtype=dtype)
    with LargestTensor() as plain:
        expected, expected_grads = step(output, blocked=False, **kw)
    with LargestTensor() as blocked:
        values, grads = step(output, blocked=True, **kw)
    assert plain.elements == TOKENS * VOCAB  # the recorder sees them where they are
    assert blocked.elements <= CHUNK
    # bf16: logits have 16 bits, and both round their gradients' products to 8, in another order.
    atol = 2e-5 if dtype == torch.float32 else 1e-4
    torch.testing.assert_close(values, expected, atol=atol, rtol=0)
    scale = 1e-5 if dtype == torch.float32 else 2e-2
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        tolerance = scale * expected_grad.abs().max().item()
        torch.testing.assert_close(grad, expected_grad, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["trained", "frozen", "tied"])
def test_in_bf16_each_tokens_gradient_is_right_however_likely_it_is(kind):
    """At 0.999 the target's row of W and the mean of all rows nearly cancel."""
    torch.manual_seed(0)
    output = KINDS[kind]()
    weight = output_matrix(output)
    weight.data = (torch.randn_like(weight) * 0.3).bfloat16()
    targets = torch.randint(VOCAB, (TOKENS,))
    toward = weight[targets].detach().float()
    toward *= torch.linspace(6, 16, TOKENS)[:, None] / toward.square().sum(dim=1, keepdim=True)
    h = (torch.randn(TOKENS, DIM) * 0.3 + toward).bfloat16().requires_grad_()
    logprobs, _ = projection_logprobs(output, h, targets, temperature=0.8, chunk_bytes=4 * CHUNK)
    (grad,) = torch.autograd.grad(logprobs.sum(), h)
    exact_h = h.detach().double().requires_grad_()
    logits = exact_h @ weight.detach().double().t() / 0.8
    exact = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    (exact_grad,) = torch.autograd.grad(exact.sum(), exact_h)
    shares = exact.exp()
    assert shares.min() < 0.5 and 0.999 < shares.max() < 0.9999
    error = (grad - exact_grad).norm(dim=1) / exact_grad.norm(dim=1)
    assert error.max() < 0.01


@pytest.mark.parametrize("vocab", [32_000, 151_936, 128_256])
def test_blocks_begin_at_multiples_of_128_and_stay_within_the_bytes(monkeypatch, vocab):
    """For any number of tokens; CUDA's products in bf16 are slow or unaligned for other widths."""
    output = nn.Linear(1, vocab, bias=False).requires_grad_(False)
    widths: list[int] = []
    product = logprobs.float32_product
    monkeypatch.setattr(
        logprobs,
        "float32_product",
        lambda h, w, out: widths.append(len(w)) or product(h, w, out=out),
    )
    for tokens in (1, 7, 333):
        widths.clear()
        chunk = 4 * tokens * 20_001
        h, targets = torch.zeros(tokens, 1), torch.zeros(tokens, dtype=torch.long)
        projection_logprobs(output, h, targets, temperature=1.0, chunk_bytes=chunk)
        assert sum(widths) == vocab and max(widths) <= 20_001
        assert all(width % 128 == 0 for width in widths[:-1]) and min(widths) > 0.9 * max(widths)
