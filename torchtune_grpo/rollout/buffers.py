"""Memory of a rollout at addresses that stay the same from one rollout to the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


class Buffers:
    """Named flat buffers; one that is too small is replaced, and nothing is ever given back.

    Args:
        device (torch.device): where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[str, Tensor] = {}
        self._kept: dict[Hashable, Any] = {}

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """The beginning of a buffer in some shape, with whatever was left in it; zeros if new."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            self._flat.pop(name, None)
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return flat[:size].view(tuple(shape))

    def keep(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What was made for this key; an object with constants of its own on the device, say."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return list(self._flat.values())
