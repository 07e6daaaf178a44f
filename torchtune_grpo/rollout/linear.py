"""The rollout's linear layers: plain, LoRA, DoRA or quantized, merged or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear
from torchtune.modules.low_precision import FrozenNF4Linear
from torchtune.modules.peft import DoRALinear, LoRALinear

from torchtune_grpo.machine.attention import float32_product
from torchtune_grpo.models import PlainBiasDoRALinear, ScaledBiasDoRALinear

DORA = (DoRALinear, PlainBiasDoRALinear, ScaledBiasDoRALinear)
KINDS = (nn.Linear, LoRALinear, *DORA, FrozenNF4Linear, TiedLinear)

# Products of so many rows, or of multiples of eight, waste nothing in a matrix library's kernels.
FEW_ROWS = 4


class RolloutLinear:
    """Linear layers of the same input, computed as one; often just one layer.

    With W their weights above each other, and A and B those of adapters that are not merged,

        y = W x + B (A x)

    where [W; A] is one matrix and B another, scaled and with blocks on its diagonal: two products,
    however many layers. A weight of another dtype, a quantized or a merged one is a copy, which
    :meth:`refresh` brings up to date and :meth:`release` frees. Of several layers that need none,
    the weights move into the common matrix, and the modules' parameters become views of it: no
    memory is taken twice. Where that cannot be (FSDP owns a sharded model's memory), each layer is
    a product of its own.

    Args:
        modules (Sequence[Any]): of the types in ``KINDS``.
        merge (bool): add the adapters to a copy, instead of computing them beside the weights.
        dtype (torch.dtype): what to compute in.
        copy (bool): False calls the modules as they are, which needs no memory of its own.
        move (bool): whether parameters may become views of the common matrix.
    """

    def __init__(
        self,
        modules: Sequence[Any],
        *,
        merge: bool,
        dtype: torch.dtype,
        copy: bool = True,
        move: bool = True,
    ) -> None:
        self._modules = list(modules)
        self._dtype = dtype
        self._calls_modules = not copy
        adapted = [isinstance(module, (LoRALinear, DoRALinear)) for module in modules]
        self._merges = merge
        self._ranks = [
            len(m.lora_a.weight) if a and not merge else 0
            for m, a in zip(modules, adapted, strict=True)
        ]
        self.sizes = [len(_live(module)) for module in modules]
        self._copies = copy and any(
            (merge and a) or isinstance(_live(m), NF4Tensor) or _live(m).dtype != dtype
            for m, a in zip(modules, adapted, strict=True)
        )
        self._moves = move and copy and len(modules) > 1 and not self._copies
        self._weight: Tensor | None = None  # [out + ranks, in], or [out, in] of a single layer
        self._a: Tensor | None = None  # [ranks, in], the end of the weight or by itself
        self._b: Tensor | None = None  # [out, ranks]
        self._bias: Tensor | None = None  # [out], for the end of the weight 0
        self._scale: Tensor | None = None  # [out] of DoRA layers that are not merged
        self._late_bias: Tensor | None = None  # [out], behind the scale

    @property
    def copied_bytes(self) -> int:
        """Size of the copies of weights."""
        return self._numel * self._dtype.itemsize if self._copies else 0

    @property
    def _numel(self) -> int:
        return sum(_live(module).numel() for module in self._modules)

    @property
    def _single_weight(self) -> Tensor:
        """[out, in] of a single layer."""
        assert len(self._modules) == 1
        return _live(self._modules[0]) if self._weight is None else self._weight[: self.sizes[0]]

    def tensors(self) -> Iterator[Tensor]:
        """All that is read, which a recorded step has the addresses of."""
        for held in (self._weight, self._a, self._b, self._bias, self._scale, self._late_bias):
            if held is not None:
                yield held
        if self._weight is None:
            yield from (_live(module) for module in self._modules)

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes what is copied anew from the current weights."""
        if self._calls_modules:
            return
        out, rank = sum(self.sizes), sum(self._ranks)
        like = _live(self._modules[0])
        inputs, device = like.shape[1], like.device

        def held(old: Tensor | None, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=device) if old is None else old

        if self._copies or self._moves:
            self._weight = weight = held(self._weight, out + rank, inputs)
            self._a = weight[out:]
            for module, rows in zip(self._modules, weight.split([*self.sizes, rank]), strict=False):
                if self._copies:
                    rows.copy_(_whole(module, merge=self._merges))
                elif module.weight.data_ptr() != rows.data_ptr():
                    rows.copy_(module.weight)
                    module.weight.data = rows
        elif rank:
            self._a = held(self._a, rank, inputs)
        self._refresh_adapters(held)
        self._refresh_biases(held)

    def _refresh_adapters(self, held: Any) -> None:
        out, rank = sum(self.sizes), sum(self._ranks)
        if not rank:
            return
        assert self._a is not None
        self._b = held(self._b, out, rank)
        row = column = 0
        for module, size, r in zip(self._modules, self.sizes, self._ranks, strict=True):
            if r:
                self._a[column : column + r].copy_(module.lora_a.weight)
                b = module.lora_b.weight
                scaled = _scaling(module) * b.to(torch.promote_types(b.dtype, torch.float32))
                self._b[row : row + size, column : column + r].copy_(scaled)
            row, column = row + size, column + r
        if any(r and isinstance(m, DoRALinear) for m, r in zip(self._modules, self._ranks)):
            if self._scale is None:
                self._scale = torch.zeros(out, device=self._a.device)
            for module, part in zip(self._modules, self._scale.split(self.sizes), strict=True):
                part.copy_(_dora_scale(module))

    def _refresh_biases(self, held: Any) -> None:
        biases = [getattr(module, "bias", None) for module in self._modules]
        if all(bias is None for bias in biases):
            return
        out = sum(self.sizes)
        if self._scale is None:
            rows = out if self._weight is None else len(self._weight)
            bias = self._bias = held(self._bias, rows)
        else:
            bias = self._late_bias = held(self._late_bias, out)
        parts = bias[:out].split(self.sizes)
        for module, value, part in zip(self._modules, biases, parts, strict=True):
            if value is None:
                continue
            # torchtune scales the bias as well: its base_out, bias included, is multiplied.
            scales_bias = self._scale is not None and type(module) is not PlainBiasDoRALinear
            part.copy_(_dora_scale(module) * value if scales_bias else value)

    def release(self) -> None:
        """Frees copies of weights, which the next refresh makes again."""
        if self._copies:
            self._weight = self._a = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [K, in] -> [K, out] of all layers beside each other; it may be a transposed view."""
        if self._calls_modules:
            return torch.cat([module(x) for module in self._modules], dim=-1)
        out = sum(self.sizes)
        if self._weight is not None:
            y = _product(x, self._weight, self._bias)
            y, a = y[:, :out], y[:, out:]
        else:
            y = torch.cat([_product(x, _live(m)) for m in self._modules], dim=-1)
            y = y if self._bias is None else y + self._bias
            a = x if self._a is None else _product(x, self._a)
        if self._b is not None:
            y = _add_product(y, a, self._b)
        if self._scale is not None:
            y = (y * self._scale).to(x.dtype)
        return y if self._late_bias is None else y + self._late_bias

    def add_to(self, h: Tensor, x: Tensor) -> Tensor:
        """h [K, out] + the layer of x [K, in]; on CUDA in h's memory."""
        if self._calls_modules or self._scale is not None or self._bias is not None:
            return h + self(x)
        h = _add_product(h, x, self._single_weight)
        if self._a is None or self._b is None:
            return h
        return _add_product(h, _product(x, self._a), self._b)

    def logits(self, x: Tensor) -> Tensor:
        """x [K, in] -> [K, out] in float32, not rounded on the way where that can be."""
        if self._calls_modules or self._scale is not None:
            return self(x).float()
        y = float32_product(x, self._single_weight)
        if self._a is not None and self._b is not None:
            y += float32_product(_product(x, self._a), self._b)
        return y if self._bias is None else y + self._bias[: self.sizes[0]]


def _live(module: Any) -> Tensor:
    return module.tied_module.weight if isinstance(module, TiedLinear) else module.weight


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T; on a CPU as (W x^T)^T, which MKL computes up to twice as fast for few rows."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = len(x)
    whole = rows == FEW_ROWS or rows % 8 == 0
    padded = x.contiguous() if whole else F.pad(x, (0, 0, 0, -rows % 8))
    out = torch.mm(weight, padded.t()).t()[:rows]
    return out if bias is None else out + bias


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y + x W^T; on CUDA into y's memory."""
    if x.device.type != "cpu":
        return y.addmm_(x, weight.t())
    return y + _product(x, weight)  # y comes first: sums take its layout


def _whole(module: Any, *, merge: bool) -> Tensor:
    """A weight [out, in] with what is merged, in float32 at least: a sum is rounded once."""
    weight = _live(module).detach()
    if isinstance(weight, NF4Tensor):
        weight = weight.get_original_weight()
    if not merge or not isinstance(module, (LoRALinear, DoRALinear)):
        return weight
    whole = _adapted(module, weight)
    return whole * _magnitude_over(module, whole) if isinstance(module, DoRALinear) else whole


def _dora_scale(module: Any) -> Tensor:
    """[out] magnitude / norm of an unmerged DoRA layer; 1 of any other one."""
    weight = _live(module)
    if not isinstance(module, DoRALinear):
        return weight.new_ones(len(weight))
    return _magnitude_over(module, _adapted(module, _whole(module, merge=False)))[:, 0]


def _magnitude_over(module: DoRALinear, whole: Tensor) -> Tensor:
    return (module.magnitude / whole.norm(dim=1))[:, None]


def _adapted(module: LoRALinear | DoRALinear, weight: Tensor) -> Tensor:
    """weight + scaling B A, in float32 at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (part.weight.to(dtype) for part in (module.lora_a, module.lora_b))
    return weight.to(dtype) + _scaling(module) * (b @ a)


def _scaling(module: LoRALinear | DoRALinear) -> float:
    return module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank
