"""The rollout's view of a linear layer: plain, LoRA, DoRA or quantized, merged or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import DoRALinear, LoRALinear

from torchtune_grpo.models import PlainBiasDoRALinear

KINDS = (nn.Linear, LoRALinear, DoRALinear, PlainBiasDoRALinear, FrozenNF4Linear, TiedLinear)

# Products of so many rows, or of multiples of eight, waste nothing in a matrix library's kernels.
FEW_ROWS = 4


class RolloutLinear:
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
    def bias(self) -> Tensor | None:
        """[out], in the dtype of the computation."""
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
    def is_plain_copy(self) -> bool:
        """Whether a copy of the weight (and a bias) is all that there is to compute with."""
        return self.owns_copy and (self._merged or not self._adapted)

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self._live_weight.shape[0]

    def empty_weight(self, outputs: int) -> Tensor:
        """[outputs, in], for a copy of this weight or of several."""
        live = self._live_weight
        return torch.empty(outputs, live.shape[1], dtype=self._dtype, device=live.device)

    @property
    def copied_bytes(self) -> int:
        """Size of the copy."""
        return self._live_weight.numel() * self._dtype.itemsize if self.owns_copy else 0

    @torch.no_grad()
    def refresh(self, *, into: Tensor | None = None) -> None:
        """Makes the copy anew from the current weights, in memory of its own or the given one."""
        if not self._copy:
            return
        module, weight = self._module, self._live_weight.detach()
        if isinstance(weight, NF4Tensor):
            weight = weight.get_original_weight()
        is_dora = isinstance(module, DoRALinear)
        if self._merged or is_dora:
            # In float32 or better, so that the sum is rounded once.
            whole = weight.to(torch.promote_types(weight.dtype, torch.float32)) + _delta(module)
            scale = module.magnitude / whole.norm(dim=1) if is_dora else None  # [out]
            if self._merged:
                weight = whole if scale is None else whole.mul_(scale[:, None])
            elif scale is not None:
                self._scale = scale.to(self._dtype)
        if not self.owns_copy:
            return
        if into is not None:
            self._weight = into
        elif self._weight is None:
            self._weight = self.empty_weight(len(weight))
        self._weight.copy_(weight)

    def release(self) -> None:
        """Frees the copy, which the next refresh makes again."""
        self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [K, in] -> [K, out]; the result may be a transposed view."""
        if not self._copy:
            return self._module(x)
        weight = self._live_weight if self._weight is None else self._weight
        out = _linear(x, weight, None if self._scale is not None else self.bias)
        if not self._adapted or self._merged:
            return out
        module = self._module
        branch = _linear(_linear(x, module.lora_a.weight), module.lora_b.weight)
        if self._scale is None:
            return out + (module.alpha / module.rank) * branch
        out = (out + module.scaling * branch) * self._scale
        if self.bias is None:
            return out
        # torchtune scales the bias as well: its base_out, bias included, is multiplied.
        scales_bias = type(module) is DoRALinear
        return out + (self._scale * self.bias if scales_bias else self.bias)


class JointLinear:
    """Linear layers of the same input, as one product where they own their weights.

    Args:
        parts (Sequence[RolloutLinear]): the layers.
    """

    def __init__(self, parts: Sequence[RolloutLinear]) -> None:
        self._parts = list(parts)
        alike = len({part.bias is None for part in parts}) == 1
        self._joined = alike and all(part.is_plain_copy for part in parts)
        self._sizes = [part.out_features for part in parts]
        self._weight: Tensor | None = None  # [sum of outputs, in]
        self._bias: Tensor | None = None

    @property
    def copied_bytes(self) -> int:
        """Size of the copies."""
        return sum(part.copied_bytes for part in self._parts)

    def refresh(self) -> None:
        """Makes the copies anew from the current weights."""
        if not self._joined:
            for part in self._parts:
                part.refresh()
            return
        if self._weight is None:
            self._weight = self._parts[0].empty_weight(sum(self._sizes))
        for part, rows in zip(self._parts, self._weight.split(self._sizes), strict=True):
            part.refresh(into=rows)
        biases = [part.bias for part in self._parts]
        self._bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]

    def release(self) -> None:
        """Frees the copies, which the next refresh makes again."""
        self._weight = None
        for part in self._parts:
            part.release()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [K, in] -> [K, out] of each layer; they may be views of one another's memory."""
        if self._weight is None:
            return [part(x) for part in self._parts]
        return _linear(x, self._weight, self._bias).split(self._sizes, dim=-1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T on a CPU as (W x^T)^T, which MKL computes up to twice as fast for few rows."""
    weight = weight.to(x.dtype)
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = len(x)
    whole = rows == FEW_ROWS or rows % 8 == 0
    padded = x.contiguous() if whole else F.pad(x, (0, 0, 0, -rows % 8))
    out = torch.mm(weight, padded.t()).t()[:rows]
    return out if bias is None else out + bias


def _delta(module: LoRALinear | DoRALinear) -> Tensor:
    scale = module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank
    a, b = module.lora_a.weight, module.lora_b.weight
    dtype = torch.promote_types(a.dtype, torch.float32)
    return scale * (b.to(dtype) @ a.to(dtype))
