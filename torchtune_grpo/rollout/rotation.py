"""Rotary position embeddings as the rollout applies them: from one table, and in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings

from torchtune_grpo.models import HalfRotation

_PAIRS = (RotaryPositionalEmbeddings, Llama3ScaledRoPE)  # (x0, x1), (x2, x3), ... turn together
_HALVES = (Qwen2RotaryPositionalEmbeddings, HalfRotation)  # (x0, x[hd/2]), (x1, x[hd/2 + 1]), ...

Rotate = Callable[[Tensor], None]  # heads [K, H, hd], in place


class Rotation:
    """What a module of torchtune's attention makes of unit vectors: the cosines and sines.

    A module of another kind is called as it is.

    Args:
        module (nn.Module | None): None rotates nothing.
        head_dim (int): of the heads.
        dtype (torch.dtype): of the heads.
    """

    def __init__(self, module: nn.Module | None, *, head_dim: int, dtype: torch.dtype) -> None:
        self._module, self._head_dim, self._dtype = module, head_dim, dtype
        self._table: Tensor | None = None  # by position

    def tensors(self) -> list[Tensor]:
        """All that is read."""
        return [] if self._table is None else [self._table]

    def reserve(self, positions: int, *, device: torch.device) -> None:
        """Makes the table for positions 0 to ``positions - 1``, if it is not there."""
        module, head_dim = self._module, self._head_dim
        if module is None or type(module) not in _PAIRS + _HALVES:
            return
        positions = min(positions, getattr(module, "max_seq_len", positions))
        if self._table is not None and len(self._table) >= positions:
            return
        pairs = type(module) in _PAIRS  # those compute in float32, whatever the heads are
        dtype = torch.float32 if pairs else self._dtype
        unit = torch.zeros(1, positions, 1, head_dim, device=device, dtype=dtype)
        (unit[..., ::2] if pairs else unit[..., : head_dim // 2]).fill_(1)
        turned = module(unit, input_pos=torch.arange(positions, device=device)[None])[0]
        if pairs:
            self._table = torch.view_as_complex(turned.unflatten(-1, (-1, 2)))  # [T, 1, hd / 2]
        else:
            cos, sin = turned.chunk(2, dim=-1)  # [T, 1, hd / 2] each
            self._table = torch.stack(  # [T, 2, 1, hd]
                [torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1
            )

    def at(self, positions: Tensor) -> Rotate:
        """A function that rotates heads [K, H, hd] to ``positions`` [K], in place."""
        if self._module is None:
            return lambda heads: None
        if self._table is None:
            return partial(_turn_by, self._module, positions=positions)
        turn = self._table[positions]
        if turn.is_complex():
            return partial(_turn_pairs, turn=turn)
        cos, sin = turn.unbind(dim=1)
        return partial(_turn_halves, cos=cos, sin=sin)


def _turn_by(module: nn.Module, heads: Tensor, *, positions: Tensor) -> None:
    heads.copy_(module(heads[:, None], input_pos=positions[:, None])[:, 0])


def _turn_pairs(heads: Tensor, *, turn: Tensor) -> None:
    wide = heads.float()
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turn)
    if wide is not heads:
        heads.copy_(wide)


def _turn_halves(heads: Tensor, *, cos: Tensor, sin: Tensor) -> None:
    rolled = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(rolled, sin)
