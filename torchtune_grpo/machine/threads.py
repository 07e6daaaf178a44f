"""How many threads of a CPU one model is worth."""

from __future__ import annotations

import os

import torch
from torch import nn

_USERS_CHOICE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Below this many parameters a second thread gains next to nothing, and waits: beside another busy
# process a step takes many times as long, because each operation ends when its last thread does.
MANY_PARAMETERS = 1_000_000


def limit_threads(model: nn.Module) -> None:
    """Lets torch use one thread for a model that is too small for more, in the whole process.

    Whoever sets ``OMP_NUM_THREADS`` (torchrun does where there are several ranks) or
    ``MKL_NUM_THREADS`` has chosen, and nothing changes.

    Args:
        model (nn.Module): to be computed on a CPU; may be on the meta device.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return
    if sum(parameter.numel() for parameter in model.parameters()) < MANY_PARAMETERS:
        torch.set_num_threads(1)
