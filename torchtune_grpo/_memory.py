"""How much memory a device has left, and what fits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor

from torchtune_grpo.parallel import ranks_per_node, sum_over_ranks

_NF4_BITS = 4.5  # with the scales of its blocks


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or what the system can still give on a CPU.

    Where the system does not say, a large number: a choice that depends on it is then made as if
    memory were plenty.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 60


def weight_bytes(model: nn.Module) -> int:
    """Size of a model's whole parameters, wherever they are: sharded, or on the meta device."""
    bits = 0.0
    for parameter in model.parameters():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        is_nf4 = isinstance(held, NF4Tensor)
        bits += parameter.numel() * (_NF4_BITS if is_nf4 else 8 * parameter.itemsize)
    return round(bits / 8)


def fits_every_rank(model: nn.Module, *, device: torch.device) -> bool:
    """Whether a model's whole weights take at most half of every rank's free memory.

    Every rank has to call it; all get the same answer.

    Args:
        model (nn.Module): on any device, sharded or not.
        device (torch.device): of this rank.
    """
    sharers = ranks_per_node() if device.type == "cpu" else 1
    fits = weight_bytes(model) <= free_bytes(device) / sharers / 2
    return sum_over_ranks(int(not fits)) == 0
