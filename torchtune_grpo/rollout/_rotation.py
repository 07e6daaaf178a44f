"""Rotary position embeddings as the rollout applies them: one look-up a step, not one a layer."""

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


def rotation(
    module: nn.Module | None, positions: Tensor, *, head_dim: int, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """A function heads [K, H, hd] -> [K, H, hd] that rotates them to ``positions`` [K].

    What the module, of torchtune's attention, makes of unit vectors are the cosines and sines; a
    module of another kind is called as it is. ``dtype`` is that of the heads.
    """
    if module is None:
        return lambda heads: heads

    def as_it_is(heads: Tensor) -> Tensor:
        return module(heads[:, None], input_pos=positions[:, None])[:, 0]

    if type(module) in _PAIRS:  # computes in float32, whatever the heads are
        unit = torch.zeros(len(positions), 1, head_dim, device=positions.device)
        unit[..., ::2].fill_(1)
        turn = torch.view_as_complex(as_it_is(unit).unflatten(-1, (-1, 2)))  # [K, 1, hd / 2]
        return partial(_turn_pairs, turn=turn)
    if type(module) in _HALVES:  # computes in the heads' dtype
        unit = torch.zeros(len(positions), 1, head_dim, device=positions.device, dtype=dtype)
        unit[..., : head_dim // 2].fill_(1)
        cos, sin = as_it_is(unit).chunk(2, dim=-1)  # [K, 1, hd / 2] each
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        return partial(_turn_halves, cos=cos, sin=sin)
    return as_it_is


def _turn_pairs(heads: Tensor, *, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))  # [K, H, hd / 2]
    return torch.view_as_real(pairs * turn).flatten(-2).to(heads.dtype)


def _turn_halves(heads: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin
