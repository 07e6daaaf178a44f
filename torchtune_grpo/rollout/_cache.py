"""Keys and values during a rollout: one copy per prompt, and one short cache per live row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheShape:
    """What decides the size of the cache.

    Attributes:
        layers (int): of the model.
        kv_heads (int): of each layer.
        head_dim (int): of each head.
        dtype (torch.dtype): of keys and values.
        device (torch.device): where they are.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def bytes(self, *, prompts: int, prompt_width: int, rows: int, response_width: int) -> int:
        """2 (keys, values) * layers * kv_heads * head_dim * itemsize * cached positions."""
        positions = prompts * prompt_width + rows * response_width
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize * positions


class GroupCache:
    """Keys and values: of prompts [prompts, kv_heads, P, hd], of responses [rows, kv_heads, C, hd].

    Responses grow by blocks, one layer at a time, so that growing never holds two caches. What is
    allocated stays for the next rollout.

    Args:
        shape (CacheShape): of the model.
    """

    BLOCK = 64

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.prompt_keys: list[Tensor] = []
        self.prompt_values: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @classmethod
    def rounded(cls, width: int) -> int:
        """A response width in whole blocks."""
        return -(-width // cls.BLOCK) * cls.BLOCK

    def reserve(self, *, prompts: int, prompt_width: int, rows: int) -> None:
        """Makes room for so many prompts and rows; what is large enough already is kept."""
        _grow(self.prompt_keys, self._size(prompts, prompt_width), self.shape, keep=False)
        _grow(self.prompt_values, self._size(prompts, prompt_width), self.shape, keep=False)
        _grow(self.keys, self._size(rows, self.BLOCK), self.shape, keep=False)
        _grow(self.values, self._size(rows, self.BLOCK), self.shape, keep=False)

    def grow(self, width: int) -> bool:
        """Makes room for ``width`` response tokens, to the next whole block; True if it had to."""
        if width <= self.keys[0].shape[2]:
            return False
        size = self._size(self.keys[0].shape[0], self.rounded(width))
        _grow(self.keys, size, self.shape, keep=True)
        _grow(self.values, size, self.shape, keep=True)
        return True

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copies a row's first ``length`` keys and values to another row's place."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zeroes a row: what is masked still has to be finite, since 0 * nan is nan."""
        for cache in (*self.keys, *self.values):
            cache[row] = 0

    def _size(self, count: int, width: int) -> tuple[int, int, int, int]:
        return (count, self.shape.kv_heads, width, self.shape.head_dim)


def _grow(
    caches: list[Tensor], size: tuple[int, int, int, int], shape: CacheShape, *, keep: bool
) -> None:
    if not caches:
        caches.extend([torch.empty(0, 0, 0, 0)] * shape.layers)
    for layer, old in enumerate(caches):
        if all(have >= want for have, want in zip(old.shape, size, strict=True)):
            continue
        if not keep:
            caches[layer] = old = torch.empty(0, 0, 0, 0)  # freed before the new one is made
        new = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        if keep:
            new[:, :, : old.shape[2]] = old
        caches[layer] = new
