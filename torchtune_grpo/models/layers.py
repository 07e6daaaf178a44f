"""Uniform layers for models of any builder, and the order of rows that goes with them.

Queries and keys have their rows in Hugging Face's order: the pairs that are rotated together are
(x[0], x[hd/2]), (x[1], x[hd/2 + 1]), ... of each head. torchtune's Llama has them side by side,
(x[0], x[1]), (x[2], x[3]), ..., and so do the weights that its checkpointers and recipes read and
write; they are reordered on the way in and out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchao.dtypes.nf4tensor import linear_nf4
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TransformerDecoder,
)
from torchtune.modules.common_utils import reparametrize_as_dtype_state_dict_post_hook
from torchtune.modules.peft import DoRALinear, LoRALinear

from torchtune_grpo.machine.segments import (
    Segments,
    float32_product,
    has_varlen_kernel,
    varlen_attention,
)

_ROTATIONS = (RotaryPositionalEmbeddings, Llama3ScaledRoPE, Qwen2RotaryPositionalEmbeddings)


def standardize(model: nn.Module) -> None:
    """Give a model of any builder this module's layers and float32 adapters, in place.

    In bf16 a weight of 0.02 takes no step below 6e-5, and most of a run's steps are smaller; so
    adapters are kept in float32, and computed in bf16 as before.
    """
    rotations: dict[nn.Module, HalfRotation] = {}  # layers share one
    for module in list(model.modules()):
        rope = getattr(module, "pos_embeddings", None)
        if isinstance(rope, _ROTATIONS):
            # Llama 3's rotation has no frequencies on meta.
            theta = getattr(rope, "theta", torch.empty(rope.dim // 2, device="meta").float())
            rotations.setdefault(rope, HalfRotation(theta))
            module.pos_embeddings = rotations[rope]
        if type(module) is MultiHeadAttention and module.q_norm is None:
            _become(module, UniformAttention)
        if type(module) is RMSNorm:
            _become(module, FusedNorm)
        if type(module) is LoRALinear:
            _become(module, FusedLoRALinear)
        if isinstance(module, (LoRALinear, DoRALinear)):
            _become(module.lora_a.float(), AdapterLinear)
            _become(module.lora_b.float(), AdapterLinear)
        if isinstance(module, DoRALinear):
            module.magnitude.data = module.magnitude.float()
            _become(module, PeftDoRALinear)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Give a module a subclass's ``forward``; it stays the same object, with all that it holds.

    The subclass has no attributes of its own, so nothing is left to initialize.
    """
    assert issubclass(kind, type(module))
    module.__class__ = kind


class FusedNorm(RMSNorm):
    """torchtune's norm with torch's kernel, which widens bf16 inside, not in a separate step."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., D] in float32, whatever its dtype."""
        return F.rms_norm(x, self.normalized_shape, self.scale.to(x.dtype), self.eps)


class Scale(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def lora_linear(
    rank: int, alpha: float, use_dora: bool, *, dropout: float
) -> Callable[..., nn.Module]:
    """Return what makes linear layers with LoRA or DoRA."""
    kind = PeftDoRALinear if use_dora else LoRALinear
    return partial(kind, rank=rank, alpha=alpha, dropout=dropout)


def save_without_nf4(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's state dict have a dtype in place of NF4, as torchtune's builders do."""
    model._register_state_dict_hook(
        partial(reparametrize_as_dtype_state_dict_post_hook, dtype=dtype, offload_to_cpu=True)
    )


def scale_output(module: nn.Module, factor: float) -> None:
    """Multiply all that a module returns, even when it has become another kind."""
    if factor != 1.0:
        module.register_forward_hook(lambda module, args, output: output * factor)


class HalfRotation(nn.Module):
    """Rotates the first half of each head against the second, as Hugging Face's models do.

    With fewer frequencies than half a head has numbers, the last part of a head stays as it is.

    Angles are float32; cosines and sines take the heads' dtype. They are not tabulated, since a
    table for 131,072 tokens would take 128 MiB, but kept for the latest positions, since layers
    share a rotation.
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.frequencies: Tensor  # [rotated numbers / 2] radians per position
        frequencies = frequencies.to(torch.get_default_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scale = scale  # of cosines and sines
        self._last: tuple[Tensor, Tensor, Tensor] | None = None  # positions, cosines, sines

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cos and sin [b, s, 1, hd] for positions [b, s], the first half's sin negated."""
        angles = positions[..., None, None].float() * self.frequencies  # [b, s, 1, hd / 2]
        cos, sin = ((f(angles) * self.scale).to(dtype) for f in (torch.cos, torch.sin))
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate x [b, s, heads, hd] at positions [b, s], or 0 to s - 1."""
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)[None]
        if not (self._last and self._last[0] is input_pos and self._last[1].dtype == x.dtype):
            self._last = (input_pos, *self.turns(input_pos, x.dtype))
        _, cos, sin = self._last
        if (rotated := cos.shape[-1]) < x.shape[-1]:
            return torch.cat([self(x[..., :rotated], input_pos=input_pos), x[..., rotated:]], -1)
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class PairRotation(HalfRotation):
    """Rotates x[0] against x[1], x[2] against x[3] and so on of each head, as GLM does."""

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate x [b, s, heads, hd] at positions [b, s], or 0 to s - 1."""
        x, rest = x.tensor_split((2 * len(self.frequencies),), dim=-1)
        halves = x.unflatten(-1, (-1, 2)).mT.flatten(-2)
        turned = super().forward(halves, input_pos=input_pos).unflatten(-1, (2, -1))
        return torch.cat([turned.mT.flatten(-2), rest], dim=-1)


class UniformAttention(MultiHeadAttention):
    """torchtune's attention, with any norms before the rotation, and for ``Segments``.

    torchtune 0.6.1 rotates queries and keys before it normalizes them, which is another function:
    the norms' weights differ within the pairs that are rotated. (Yang et al. 2025, Qwen3,
    arXiv:2505.09388.) With segments, keys and values are not repeated for each head. There is no
    cache: the rollout has its own.
    """

    window: int | None = None  # how many tokens one attends to, itself included; None: all

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend from x to itself (y is x), [b, s, D] -> [b, s, D]."""
        assert y is not None, "self-attention only"

        def heads(projected: Tensor, norm: nn.Module | None) -> Tensor:
            h = projected.unflatten(-1, (-1, self.head_dim))  # [b, s, heads, hd]
            return h if norm is None else norm(h)

        q, k = heads(self.q_proj(x), self.q_norm), heads(self.k_proj(y), self.k_norm)
        if self.pos_embeddings is not None:
            q, k = (self.pos_embeddings(h, input_pos=input_pos) for h in (q, k))
        v = heads(self.v_proj(y), None)
        dropout = self.attn_dropout if self.training else 0.0
        if isinstance(mask, Segments):
            q, k, v = (h.squeeze(0) for h in (q, k, v))
            h = segment_attention(q, k, v, mask, window=self.window, dropout=dropout)
            return self.output_proj(h.flatten(1)[None])
        assert mask is None, "rows are causal, or packed as segments"
        q, k, v = (h.transpose(1, 2) for h in (q, k, v))
        if self.window is not None and k.shape[2] > self.window:
            token = torch.arange(k.shape[2], device=k.device)
            behind = (token[:, None] - token)[None]  # [1, s, s]
            mask = (behind >= 0) & (behind < self.window)
        if (group := self.num_heads // self.num_kv_heads) > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        is_causal = mask is None and self.is_causal
        out = self._attention_call(q, k, v, mask=mask, dropout_p=dropout, is_causal=is_causal)
        return self.output_proj(out.transpose(1, 2).flatten(2))


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    window: int | None = None,
    dropout: float,
) -> Tensor:
    """Attend with q [S, heads, hd], k and v [S, kv_heads, hd] as ``varlen_attention`` does.

    Without the kernel, each response needs a copy of the prompt's keys and values; the backward
    pass makes these copies again.
    """
    attend = partial(varlen_attention, segments=segments, window=window, dropout=dropout)
    if not torch.is_grad_enabled() or (dropout == 0 and has_varlen_kernel(q)):
        return attend(q, k, v)
    return checkpoint(attend, q, k, v, use_reentrant=False, preserve_rng_state=dropout > 0)


def attend_in_segments(model: TransformerDecoder) -> None:
    """Let the model's attention take ``Segments`` as a mask.

    Other classes are refused: torchtune's for Gemma 2, say, counts packed positions in its window.
    """
    for layer in model.layers:
        if type(layer.attn) is MultiHeadAttention and layer.attn.q_norm is None:
            _become(layer.attn, UniformAttention)
        if type(layer.attn) is not UniformAttention:
            raise ValueError(
                "pack_groups=True: works with torchtune's MultiHeadAttention, but the model has "
                f"{type(layer.attn).__name__}. Set pack_groups to false."
            )


class FusedLoRALinear(LoRALinear):
    """torchtune's LoRA in fewer steps, if only the adapter is trained and there is no dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        if self.weight.requires_grad or not isinstance(self.dropout, nn.Identity):
            return super().forward(x)
        rows = x.flatten(0, -2)
        if self.disabled:
            y = F.linear(rows, self.weight.to(x.dtype), self.bias)
        else:
            a, b, scale = self.lora_a.weight, self.lora_b.weight, self.alpha / self.rank
            y = _AdaptedProduct.apply(rows, self.weight, a, b, self.bias, scale)
        return y.unflatten(0, x.shape[:-1])


class _AdaptedProduct(torch.autograd.Function):
    """x W^T + bias + scale (x A^T) B^T for x [K, in], with gradients for x, A and B.

    Autograd would scale and add tensors of the result's size and of x's size in separate steps;
    here the products do that.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        a, b = a.to(x.dtype), b.to(x.dtype)
        h = x.mm(a.t())  # [K, rank]
        ctx.save_for_backward(x, weight, a, b, h)
        ctx.scale = scale
        return F.linear(x, weight.to(x.dtype), bias).addmm_(h, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, h = ctx.saved_tensors
        grad_h = grad.mm(b)  # without the scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.mm(weight.to(grad.dtype)).addmm_(grad_h, a, alpha=ctx.scale)
        # In float32, as the adapters are.
        parts = [float32_product(grad_h.t(), x.t()), float32_product(grad.t(), h.t())]
        torch._foreach_mul_(parts, ctx.scale)
        return grad_x, None, *parts, None, None


class PeftDoRALinear(DoRALinear):
    """DoRA as PEFT computes it: the magnitude scales the weight, and the bias is added afterwards.

    torchtune's DoRA scales the bias, too. Without a bias the two are the same function.
    (Liu et al. 2024, arXiv:2402.09353.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out] in x's dtype; the scale has the adapter's dtype."""
        weight = self.weight
        out = linear_nf4(input=x, weight=weight) if self._quantize_base else F.linear(x, weight)
        if not self.disabled:
            with torch.no_grad():  # as the paper does, which saves memory
                a, b = self.lora_a.weight, self.lora_b.weight
                delta = F.linear(a.t().contiguous(), b).t()  # [out, in]
                norm = self._get_weight_norm(weight.to(b.dtype), delta)  # [out]
            branch = self.lora_b(self.lora_a(self.dropout(x)))
            out = ((self.magnitude / norm) * (out + self.scaling * branch)).to(x.dtype)
        return out if self.bias is None else out + self.bias


class AdapterLinear(nn.Linear):
    """A part of an adapter in float32 that computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


def reorder(
    state: Mapping[str, Tensor], hf_config: Mapping[str, object], *, to: Literal["halves", "pairs"]
) -> dict[str, Tensor]:
    """Reorder the rows of weights to Hugging Face's halves, or torchtune's pairs."""
    split = (-1, 2) if to == "halves" else (2, -1)
    heads = {"q_proj": hf_config["num_attention_heads"]}
    heads["k_proj"] = hf_config.get("num_key_value_heads") or heads["q_proj"]
    result = dict(state)
    for name, value in state.items():
        match = re.search(r"\.(q_proj|k_proj)\.(weight|bias)$", name)
        if match is not None:
            rows = value.unflatten(0, (heads[match[1]], -1)).unflatten(1, split)
            result[name] = rows.transpose(1, 2).reshape(value.shape)
    return result


@contextmanager
def unembed_with(
    model: TransformerDecoder, function: Callable[[Tensor], Tensor], *, width: int = 0
) -> Iterator[None]:
    """Let ``model(...)`` return ``function(h)`` of the last layer's output h [b, s, D].

    torchtune's forward ends in ``self.unembed(h)``, which is shadowed here, so that hooks on the
    model (FSDP's, say) still run around it. Rows of ``width`` tokens are accepted: packed responses
    may together be longer than the model's context.
    """
    context = model.max_seq_len
    model.unembed = function
    model.max_seq_len = max(context, width)
    try:
        yield
    finally:
        del model.unembed
        model.max_seq_len = context
