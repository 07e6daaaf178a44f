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
    """Keys and values by layer: of prompts [2, prompts, kv_heads, P, hd], of rows [2, rows, ...].

    Responses grow by blocks, one layer at a time, so that growing never holds two caches. What is
    allocated stays for the next rollout, unless that has less than half as many prompts or rows: an
    evaluation's memory is the next update's.

    Args:
        shape (CacheShape): of the model.
    """

    BLOCK = 64

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.prompts: list[Tensor] = []
        self.rows: list[Tensor] = []

    @classmethod
    def rounded(cls, width: int) -> int:
        """A width in whole blocks."""
        return -(-width // cls.BLOCK) * cls.BLOCK

    @property
    def prompt_width(self) -> int:
        """Tokens of a prompt that there is room for."""
        return self.prompts[0].shape[3]

    def reserve(self, *, prompts: int, prompt_width: int, rows: int, width: int) -> None:
        """Makes room for so many prompts and rows; what is large enough, and not twice, is kept."""
        _grow(self.prompts, prompts, prompt_width, self.shape, keep=False)
        _grow(self.rows, rows, self.rounded(width), self.shape, keep=False)

    def grow(self, width: int) -> None:
        """Makes room for ``width`` response tokens, to the next whole block."""
        if width > self.rows[0].shape[3]:
            rows = self.rows[0].shape[1]
            _grow(self.rows, rows, self.rounded(width), self.shape, keep=True)

    def tensors(self) -> list[Tensor]:
        """All of it."""
        return self.prompts + self.rows

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copies a row's first ``length`` keys and values to another row's place."""
        for cached in self.rows:
            cached[:, target, :, :length] = cached[:, source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zeroes a row: what is masked still has to be finite, since 0 * nan is nan."""
        for cached in self.rows:
            cached[:, row] = 0


def _grow(caches: list[Tensor], count: int, width: int, shape: CacheShape, *, keep: bool) -> None:
    none = torch.empty(2, 0, 0, 0, 0)
    if not caches:
        caches.extend([none] * shape.layers)
    size = (2, count, shape.kv_heads, width, shape.head_dim)
    for layer, old in enumerate(caches):
        fits = all(have >= want for have, want in zip(old.shape, size, strict=True))
        if fits and (keep or old.shape[1] <= 2 * count):
            continue
        if not keep:
            caches[layer] = old = none  # freed before the new one is made
        new = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        if keep:
            new[:, :, :, : old.shape[3]] = old
        caches[layer] = new
