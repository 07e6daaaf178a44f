"""A sharded model (FSDP2) made whole for a rollout, at once or layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtune.modules import TransformerDecoder


@contextmanager
def gathered(model: nn.Module, *, layers: bool = True) -> Iterator[None]:
    """Within it, every rank holds the whole model; one that is not sharded always does.

    ``layers=False`` gathers embedding, norm and output projection only.
    """
    candidates = model.modules() if layers else [model]
    modules = [module for module in candidates if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.reshard()


class LayerGather:
    """Gathers a sharded model layer by layer, for ranks that run different numbers of passes.

    Every pass over the layers begins with one small reduction; a rank without work takes part in
    the others' passes by gathering and giving back, until no rank has work.

    Args:
        model (TransformerDecoder): sharded by :func:`shard`.
        device (torch.device): of the computation, which need not be that of the shards.
    """

    def __init__(self, model: TransformerDecoder, *, device: torch.device) -> None:
        self._layers: list[Any] = list(model.layers)
        self._device = device

    def begin_pass(self) -> None:
        """Tells the other ranks that this one is about to run all layers."""
        self._someone_works(True)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Within it, this rank holds one whole layer."""
        self._layers[index].unshard()
        try:
            yield
        finally:
            self._layers[index].reshard()

    def finish(self) -> None:
        """Takes part in the other ranks' passes until they have finished as well."""
        while self._someone_works(False):
            for index in range(len(self._layers)):
                with self.layer(index):
                    pass

    def _someone_works(self, here: bool) -> bool:
        flag = torch.tensor(int(here), device=self._device)
        dist.all_reduce(flag)
        return bool(flag.item())
