"""The sampler's uniform numbers: a pure function of (seed, step, prompt, sample, position).

A counter-based generator has no state to save and none that depends on which rows run together, so
samples do not change with the batch, with the number of live rows or ranks, or after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)  # >> of int64 copies the sign bit


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer (Steele et al. 2014, "Fast splittable pseudorandom generators")."""
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def row_keys(
    *,
    seed: int,
    step: int,
    prompt_indices: Sequence[int],
    group_size: int,
    uses: Sequence[int] | None = None,
) -> Tensor:
    """The keys [B*G] int64 of the rows' noise, prompt-major.

    ``prompt_indices`` are the B prompts' positions in the data set. Steps count from 0; evaluation
    uses -1. A prompt that has come in the step before, ``uses`` times, goes on counting samples.
    """
    key = torch.zeros((), dtype=torch.int64)
    prompts = torch.tensor(prompt_indices)[:, None]
    samples = torch.arange(group_size)
    if uses is not None:
        samples = samples + torch.tensor(uses)[:, None] * group_size
    for part in (seed, step, prompts, samples):
        key = _mix((key + _GOLDEN) ^ _mix(torch.as_tensor(part) + _GOLDEN))
    return key.flatten()


def uniforms(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` numbers of each row: keys [N] -> [N, count] float64 in [0, 1)."""
    counter = torch.arange(1, count + 1, device=keys.device)
    bits = _mix(keys[:, None] + counter * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53
