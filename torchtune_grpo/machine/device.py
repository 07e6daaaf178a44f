"""The device of this process."""

from __future__ import annotations

import os

import torch
from torchtune import utils


def find_device(name: str) -> torch.device:
    """torchtune's ``get_device``, which however takes the CPU where there is no GPU.

    Under torchrun, ``cuda`` is the GPU of this rank's number on its machine. For CUDA it also turns
    cuDNN's attention off in this process: cuDNN makes a plan for each new shape, which takes 0.05
    to 1 s, and the lengths of each step are new ones.

    Raises:
        ValueError: if it is not there; it says what is.
    """
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if count == 0:
            built = torch.version.cuda or torch.version.hip
            why = "see whether nvidia-smi lists one" if built else "it is a build for CPUs only"
            raise ValueError(
                f"device={name}: torch {torch.__version__} finds no GPU here ({why}). Set "
                "device=cpu for a small model, or install a torch for your GPU (pytorch.org)."
            )
        if (device.index or local_rank) >= count:
            raise ValueError(
                f"device={name}: torch finds {count} GPU(s) here, numbered from 0, and local rank "
                f"{local_rank} wants number {device.index or local_rank}; give another number, or "
                "lower --nproc_per_node."
            )
        if "LOCAL_RANK" in os.environ and device.index not in (None, local_rank):
            raise ValueError(
                f"device={name}: under torchrun each rank has a GPU of its own; set device=cuda."
            )
        torch.backends.cuda.enable_cudnn_sdp(False)
    return utils.get_device(device=name)
