"""What torchtune lacks: rotation by halves, norms before it, PEFT's DoRA, adapters in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import linear_nf4
from torchtune.modules import MultiHeadAttention
from torchtune.modules.peft import DoRALinear, LoRALinear

from torchtune_grpo.models.architecture import Rotation


class HalfRotation(nn.Module):
    """Rotates the pairs (x[0], x[hd/2]), (x[1], x[hd/2 + 1]), ..., as Hugging Face's models do.

    Angles are float32; cosines and sines take the heads' dtype. There is no table of them, which
    for a context of 131,072 tokens would take 128 MiB.

    Args:
        rotation (Rotation): frequencies and scale.
    """

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.frequencies: Tensor  # [hd / 2]
        frequencies = rotation.frequencies.to(torch.get_default_device())
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scale = rotation.scale

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """x [b, s, heads, hd] at positions [b, s], or 0 to s - 1, to the same shape."""
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)[None]
        angles = input_pos[..., None, None].float() * self.frequencies  # [b, s, 1, hd / 2]
        cos, sin = ((f(angles) * self.scale).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class NormFirstAttention(MultiHeadAttention):
    """torchtune's attention, but queries and keys are normalized before they are rotated.

    torchtune 0.6.1 does it the other way round, which is another function: the norms' weights
    differ within the pairs that are rotated. (Yang et al. 2025, Qwen3, arXiv:2505.09388.)
    """

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """As torchtune's, for self-attention: x = y [b, s, D] -> [b, s, D]."""
        assert y is not None, "self-attention only"

        def heads(projected: Tensor, norm: nn.Module | None) -> Tensor:
            h = projected.unflatten(-1, (-1, self.head_dim))  # [b, s, heads, hd]
            if norm is not None:
                h = self.pos_embeddings(norm(h), input_pos=input_pos)
            return h.transpose(1, 2)

        q = heads(self.q_proj(x), self.q_norm)
        k, v = heads(self.k_proj(y), self.k_norm), heads(self.v_proj(y), None)
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        group = self.num_heads // self.num_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None and self.is_causal,
        )  # [b, heads, s, hd]
        return self.output_proj(out.transpose(1, 2).flatten(2))


class PlainBiasDoRALinear(DoRALinear):
    """DoRA as PEFT computes it: the magnitude scales the weight, and the bias is added behind.

    torchtune's multiplies the bias by it, too. Without a bias both are the same function.
    (Liu et al. 2024, arXiv:2402.09353.)
    """

    scales_bias = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], in x's dtype; the scale has the adapter's."""
        weight, bias = self.weight, self.bias
        out = linear_nf4(input=x, weight=weight) if self._quantize_base else F.linear(x, weight)
        if self.scales_bias and bias is not None:
            out, bias = out + bias, None
        if not self.disabled:
            with torch.no_grad():  # as the paper does, which saves memory
                a, b = self.lora_a.weight, self.lora_b.weight
                delta = F.linear(a.t().contiguous(), b).t()  # [out, in]
                norm = self._get_weight_norm(weight.to(b.dtype), delta)  # [out]
            branch = self.lora_b(self.lora_a(self.dropout(x)))
            out = ((self.magnitude / norm) * (out + self.scaling * branch)).to(x.dtype)
        return out if bias is None else out + bias


class ScaledBiasDoRALinear(PlainBiasDoRALinear):
    """torchtune's DoRA, for an adapter in another dtype than the base's."""

    scales_bias = True


class AdapterLinear(nn.Linear):
    """A part of an adapter in float32: it computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


def widen_adapters(model: nn.Module) -> None:
    """Makes the adapters of a model in bf16 float32, in place; it computes in bf16 as before.

    In bf16 a weight of 0.02 takes no step below 6e-5, which is more than most of a run's are.
    """
    for module in model.modules():
        if isinstance(module, (LoRALinear, DoRALinear)):
            for part in (module.lora_a, module.lora_b):
                part.float().__class__ = AdapterLinear
        if isinstance(module, DoRALinear):
            module.magnitude.data = module.magnitude.float()
            if type(module) is DoRALinear:
                module.__class__ = ScaledBiasDoRALinear
