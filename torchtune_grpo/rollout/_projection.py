"""The rollout's view of a linear layer: plain, LoRA, DoRA or quantized, merged or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import DoRALinear, LoRALinear

KINDS = (nn.Linear, LoRALinear, DoRALinear, FrozenNF4Linear, TiedLinear)

# In MKL, W @ x^T with its rows padded to a multiple of 8 is faster than x @ W^T from here on (two
# Zen cores, 512 by 1,536: 348 against 515 us for 31 rows; 512 by 32,768: 11.6 against 19.8 ms).
_MANY_ROWS, _MANY_OUTPUTS = 9, 8192


class Projection:
    """One linear layer of the policy, as the rollout computes it.

    It refers to the live weight where it can. It owns a copy where the weight has to be merged,
    dequantized or converted; ``refresh`` brings that copy up to date. An adapter that is not merged
    is read live.

    Args:
        module (Any): a module of one of the types in ``KINDS``.
        merge (bool): add the adapter to the copy, instead of computing it beside the weight.
        dtype (torch.dtype): what to compute in.
        copy (bool): False calls the module as it is, which needs no memory of its own.
    """

    def __init__(self, module: Any, *, merge: bool, dtype: torch.dtype, copy: bool = True) -> None:
        self._module = module
        self._dtype = dtype
        self._copy = copy
        self._adapted = isinstance(module, (LoRALinear, DoRALinear))
        self._merged = self._adapted and merge
        self._weight: Tensor | None = None
        self._scale: Tensor | None = None  # [out] of an unmerged DoRA layer

    @property
    def _live_weight(self) -> Tensor:
        if isinstance(self._module, TiedLinear):
            return self._module.tied_module.weight
        return self._module.weight

    @property
    def _bias(self) -> Tensor | None:
        bias = getattr(self._module, "bias", None)
        return None if bias is None else bias.to(self._dtype)

    @property
    def owns_copy(self) -> bool:
        """Whether the weight is copied, by :meth:`refresh`."""
        live = self._live_weight
        return self._copy and (
            self._merged or isinstance(live, NF4Tensor) or live.dtype != self._dtype
        )

    @property
    def copied_bytes(self) -> int:
        """Size of the copy."""
        return self._live_weight.numel() * self._dtype.itemsize if self.owns_copy else 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the copy anew from the current weights."""
        module = self._module
        if isinstance(module, DoRALinear) and self._copy and not self._merged:
            weight = self._dense() + _delta(module)
            self._scale = (module.magnitude / weight.norm(dim=1)).to(self._dtype)
        if not self.owns_copy:
            return
        weight = self._dense()
        if self._merged:
            weight = weight + _delta(module)
            if isinstance(module, DoRALinear):
                weight *= (module.magnitude / weight.norm(dim=1))[:, None]
        if self._weight is None:
            self._weight = torch.empty_like(weight, dtype=self._dtype)
        self._weight.copy_(weight)

    def release(self) -> None:
        """Frees the copy, which the next refresh makes again."""
        self._weight = None

    def _dense(self) -> Tensor:
        """The base weight in float32 or better: the sum with an adapter is rounded once."""
        live = self._live_weight.detach()
        dense = live.get_original_weight() if isinstance(live, NF4Tensor) else live
        return dense.to(torch.promote_types(dense.dtype, torch.float32))

    def __call__(self, x: Tensor) -> Tensor:
        """x [K, in] -> [K, out]; the result may be a transposed view."""
        if not self._copy:
            return self._module(x)
        weight = self._live_weight if self._weight is None else self._weight
        out = _linear(x, weight, None if self._scale is not None else self._bias)
        if not self._adapted or self._merged:
            return out
        module = self._module
        branch = _linear(_linear(x, module.lora_a.weight), module.lora_b.weight)
        if self._scale is None:
            return out + (module.alpha / module.rank) * branch
        out = (out + module.scaling * branch) * self._scale
        # torchtune scales the bias as well: its base_out, bias included, is multiplied.
        return out if self._bias is None else out + self._scale * self._bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    weight = weight.to(x.dtype)
    rows = len(x)
    if x.device.type != "cpu" or (rows < _MANY_ROWS and len(weight) < _MANY_OUTPUTS):
        return F.linear(x, weight, bias)
    padded = F.pad(x, (0, 0, 0, -rows % (4 if rows <= 8 else 8)))
    out = torch.mm(weight, padded.t()).t()[:rows]
    return out if bias is None else out + bias


def _delta(module: LoRALinear | DoRALinear) -> Tensor:
    scale = module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank
    a, b = module.lora_a.weight, module.lora_b.weight
    dtype = torch.promote_types(a.dtype, torch.float32)
    return scale * (b.to(dtype) @ a.to(dtype))
