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
    the others' passes by gathering and giving back, until no rank has work or waits for some.

    Args:
        model (TransformerDecoder): sharded by :func:`shard`.
        device (torch.device): of the computation, which need not be that of the shards.
    """

    def __init__(self, model: TransformerDecoder, *, device: torch.device) -> None:
        self._layers: list[Any] = list(model.layers)
        self._device = device

    def begin_pass(self) -> None:
        """Tells the other ranks that this one is about to run all layers."""
        self._count(works=1, waits=0)

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
        while any(self._take_part(waits=0)):
            pass

    def wait(self) -> bool:
        """Takes part in the others' pass while this rank waits for work; False = there is none."""
        working, _ = self._take_part(waits=1)
        return working > 0

    def _take_part(self, *, waits: int) -> tuple[int, int]:
        working, waiting = self._count(works=0, waits=waits)
        for index in range(len(self._layers) if working else 0):
            with self.layer(index):
                pass
        return working, waiting

    def _count(self, *, works: int, waits: int) -> tuple[int, int]:
        """The ranks that work, and those that wait for some."""
        counts = torch.tensor([works, waits], device=self._device)
        dist.all_reduce(counts)
        working, waiting = counts.tolist()
        return working, waiting
