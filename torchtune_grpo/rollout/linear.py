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

from torchtune_grpo.machine.segments import float32_product
from torchtune_grpo.models.layers import FusedLoRALinear, PeftDoRALinear

KINDS = (nn.Linear, LoRALinear, FusedLoRALinear, PeftDoRALinear, FrozenNF4Linear, TiedLinear)

# Products of this many rows, or of a multiple of eight, waste nothing in matrix libraries' kernels.
FEW_ROWS = 4
_MANY_ROWS = 256  # that a CPU multiplies as fast in either order


class RolloutLinear:
    """Linear layers with the same input, computed as one; often just one layer.

    With W their stacked weights, and A and B the LoRA adapters that are not merged,

        y = W x + B (A x)

    where [W; A] is one matrix, with zeros up to a whole block of eight rows, and B another, scaled
    and block-diagonal: two products for any number of layers. Weights that have another dtype, are
    quantized or are merged are copied; ``refresh`` updates the copies and ``release`` frees
    them. Several layers that need no copy move their weights into the common matrix, and their
    parameters become views of it. With ``move=False`` (FSDP owns a sharded model's memory) each
    layer is a product of its own.

    ``merge`` adds LoRA to the weights; DoRA, which scales them, is always merged. ``copy=False``
    computes copies anew for every product, which is slow but needs no memory.
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
        self._merge, self._dtype = merge, dtype
        self.ranks = [
            len(module.lora_a.weight) if isinstance(module, LoRALinear) and not merge else 0
            for module in modules
        ]
        self.sizes = [len(_base_weight(module)) for module in modules]
        # Rows of results keep 16-byte aligned addresses, which attention's kernels need.
        self._rank = -(-sum(self.ranks) // 8) * 8
        self._copies = copy and any(self._needs_copy(module) for module in modules)
        self._moves = move and copy and len(modules) > 1 and not self._copies
        self._weight: Tensor | None = None  # [out + rank, in], or [out, in] of a single layer
        self._a: Tensor | None = None  # [rank, in], the last rows of _weight or by itself
        self._b: Tensor | None = None  # [out, rank]
        self._bias: Tensor | None = None  # [out], then 0 for A's rows in _weight

    def _needs_copy(self, module: object) -> bool:
        weight = _base_weight(module)
        is_merged = isinstance(module, DoRALinear) or (
            self._merge and isinstance(module, LoRALinear)
        )
        return is_merged or isinstance(weight, NF4Tensor) or weight.dtype != self._dtype

    @property
    def copied_bytes(self) -> int:
        numel = sum(_base_weight(module).numel() for module in self._modules)
        return numel * self._dtype.itemsize if self._copies else 0

    def _weight_of(self, module: object) -> Tensor:
        """Return the weight [out, in] of a layer that is not in the common matrix."""
        if not self._needs_copy(module):
            return _base_weight(module)
        return whole_weight(module, merge=self._merge).to(self._dtype)

    @property
    def _single_weight(self) -> Tensor:
        (module,) = self._modules
        return self._weight_of(module) if self._weight is None else self._weight[: self.sizes[0]]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that a decoding step reads."""
        for held in (self._weight, self._a, self._b, self._bias):
            if held is not None:
                yield held
        if self._weight is None:
            for weight in map(_base_weight, self._modules):
                if isinstance(weight, NF4Tensor):  # has no memory itself, its parts have
                    parts, _ = weight.__tensor_flatten__()
                    yield from (getattr(weight, part) for part in parts)
                else:
                    yield weight

    @torch.no_grad()
    def refresh(self) -> None:
        """Update all copies from the modules' weights."""
        self._refresh_weight()
        if sum(self.ranks):
            self._refresh_adapters()
        if any(getattr(module, "bias", None) is not None for module in self._modules):
            self._refresh_bias()

    def _kept(self, old: Tensor | None, *shape: int) -> Tensor:
        """Return the old memory, whose address CUDA graphs have recorded; zeros the first time."""
        device = _base_weight(self._modules[0]).device
        return torch.zeros(shape, dtype=self._dtype, device=device) if old is None else old

    def _refresh_weight(self) -> None:
        out, rank = sum(self.sizes), self._rank
        inputs = _base_weight(self._modules[0]).shape[1]
        if self._copies or self._moves:
            self._weight = self._kept(self._weight, out + rank, inputs)
            self._a = self._weight[out:]
            rows_of = self._weight.split([*self.sizes, rank])
            for module, rows in zip(self._modules, rows_of, strict=False):
                if self._copies:
                    rows.copy_(whole_weight(module, merge=self._merge))
                elif module.weight.data_ptr() != rows.data_ptr():
                    rows.copy_(module.weight)
                    module.weight.data = rows
        elif rank:
            self._a = self._kept(self._a, rank, inputs)

    def _refresh_adapters(self) -> None:
        assert self._a is not None
        self._b = self._kept(self._b, sum(self.sizes), self._rank)
        row = column = 0
        for module, size, rank in zip(self._modules, self.sizes, self.ranks, strict=True):
            if rank:
                self._a[column : column + rank].copy_(module.lora_a.weight)
                b = module.lora_b.weight
                scaled = _scaling(module) * b.to(torch.promote_types(b.dtype, torch.float32))
                self._b[row : row + size, column : column + rank].copy_(scaled)
            row, column = row + size, column + rank

    def _refresh_bias(self) -> None:
        out = sum(self.sizes)
        self._bias = self._kept(self._bias, out if self._weight is None else len(self._weight))
        parts = self._bias[:out].split(self.sizes)
        for module, part in zip(self._modules, parts, strict=True):
            if getattr(module, "bias", None) is not None:
                part.copy_(module.bias)

    def release(self) -> None:
        """Free the copies until the next refresh."""
        if self._copies:
            self._weight = self._a = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [K, in] to [K, out] of all layers side by side, which may be a transposed view."""
        out = sum(self.sizes)
        if self._weight is not None:
            y = _product(x, self._weight, self._bias)
            y, a = y[:, :out], y[:, out:]
        else:
            y = torch.cat([_product(x, self._weight_of(m)) for m in self._modules], dim=-1)
            y = y if self._bias is None else y + self._bias
            a = x if self._a is None else _product(x, self._a)
        return y if self._b is None else _add_product(y, a, self._b)

    def add_to(self, h: Tensor, x: Tensor) -> Tensor:
        """Return h [K, out] plus the layer's output for x [K, in]; this may overwrite h."""
        if self._bias is not None:
            return h + self(x)
        h = _add_product(h, x, self._single_weight)
        if self._a is None or self._b is None:
            return h
        return _add_product(h, _product(x, self._a), self._b)

    def logits(self, x: Tensor) -> Tensor:
        """Map x [K, in] to [K, out] in float32, unrounded where the device can do that."""
        y = float32_product(x, self._single_weight)
        if self._a is not None and self._b is not None:
            y += float32_product(_product(x, self._a), self._b)
        return y if self._bias is None else y + self._bias[: self.sizes[0]]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x W^T; on a CPU as (W x^T)^T, up to twice as fast for some rows.

    The fewest rows in bf16 are faster as they are: 2.6 ms instead of 4.2 for [4, 1536] and
    [17984, 1536] on an EPYC with AVX512-BF16.
    """
    rows = len(x)
    is_fast = rows > _MANY_ROWS or (rows <= FEW_ROWS and x.dtype == torch.bfloat16)
    if x.device.type != "cpu" or is_fast:
        return F.linear(x, weight, bias)
    whole = rows == FEW_ROWS or rows % 8 == 0
    padded = x.contiguous() if whole else F.pad(x, (0, 0, 0, -rows % 8))
    out = torch.mm(weight, padded.t()).t()[:rows]
    return out if bias is None else out + bias


def _add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute y + x W^T: in y's memory, unless a CPU multiplies few rows."""
    if x.device.type != "cpu" or len(x) > _MANY_ROWS:
        return y.addmm_(x, weight.t())
    return y + _product(x, weight)  # y comes first: sums take its layout


def _base_weight(module: Any) -> Tensor:
    """Return the module's own weight [out, in], without adapters."""
    return module.tied_module.weight if isinstance(module, TiedLinear) else module.weight


def whole_weight(module: object, *, merge: bool) -> Tensor:
    """Return the weight [out, in]; a merged one is float32 at least, so that it is rounded once."""
    if isinstance(module, DoRALinear):
        adapted = _adapted_weight(module)
        return adapted * (module.magnitude / adapted.norm(dim=1))[:, None]
    return _adapted_weight(module) if merge and isinstance(module, LoRALinear) else _plain(module)


def _plain(module: object) -> Tensor:
    weight = _base_weight(module).detach()
    return weight.get_original_weight() if isinstance(weight, NF4Tensor) else weight


def _adapted_weight(module: LoRALinear | DoRALinear) -> Tensor:
    """Return weight + scaling B A, in float32 at least."""
    weight = _plain(module)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (part.weight.to(dtype) for part in (module.lora_a, module.lora_b))
    return weight.to(dtype) + _scaling(module) * (b @ a)


def _scaling(module: LoRALinear | DoRALinear) -> float:
    return module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank
