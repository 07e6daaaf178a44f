"""How much memory a device has left."""

from __future__ import annotations

from pathlib import Path

import torch


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
