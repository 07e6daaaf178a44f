"""Decoding steps recorded once per shape and replayed, which spares the host their launches.

A CUDA graph repeats its kernels on the memory and with the host's numbers of the recorded step.
So all that a step reads or writes lies in :class:`Buffers`, at the same addresses in all rollouts,
and sizes are rounded up to few values by :func:`coarse`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchtune import utils

log = utils.get_logger("INFO")

Step = Callable[[], None]


def coarse(count: int, *, least: int) -> int:
    """The smallest of ``least`` * (1, 2, 3, 4, 6, 8, 12, 16, 24, ...) that is no less."""
    blocks = -(-count // least)
    power = 1 << (blocks - 1).bit_length()
    return least * (power * 3 // 4 if 4 * blocks <= 3 * power > 6 else power)


class Buffers:
    """Named flat buffers on a device; one that is too small is replaced, and none is freed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """The beginning of a buffer in some shape, with whatever was left in it; zeros if new."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size or flat.dtype != dtype:
            self._flat.pop(name, None)
            flat = self._flat[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return flat[:size].view(tuple(shape))

    def put(self, name: str, value: Tensor) -> Tensor:
        return self.take(name, value.shape, dtype=value.dtype).copy_(value)

    def tensors(self) -> list[Tensor]:
        return list(self._flat.values())


class StepGraphs:
    """Runs steps of a few shapes many times over, in all rollouts of a run.

    The first step of a shape runs as it is, which lets libraries set themselves up; the second is
    recorded; all from then on are replayed. Only what lies in tensors may differ between steps of
    one shape. A step that cannot be recorded runs as it is, and so do all others from then on.
    ``record`` runs a step's host code and returns what replays its kernels.
    """

    MOST = 64  # shapes; when there are more, all are dropped

    def __init__(self, record: Callable[[Step], Step]) -> None:
        self._record = record
        self._replays: dict[Hashable, Step | None] = {}
        self._addresses: list[int] = []
        self._fails = False

    def drop_unless_at(self, tensors: Iterable[Tensor]) -> None:
        """Drop what was recorded if it would read or write elsewhere than in these tensors."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._replays.clear()
            self._addresses = addresses

    def run(self, step: Step, *, shape: Hashable) -> None:
        """Run a step, or what was recorded of another one of its shape."""
        if self._fails or shape not in self._replays:
            step()
            if len(self._replays) == self.MOST:
                self._replays.clear()
            self._replays[shape] = None
            return
        replay = self._replays[shape]
        if replay is None:
            replay = self._recorded(step)
            self._replays[shape] = replay
        replay()

    def _recorded(self, step: Step) -> Step:
        try:
            return self._record(step)
        except RuntimeError as error:
            self._fails = True
            self._replays.clear()
            log.warning(
                f"rollout.cuda_graphs=auto: could not record a decoding step ({error}); decoding "
                "goes on without graphs, which is slower. Set it to never to avoid the attempt."
            )
            return step


class CudaRecorder:
    """Captures steps in CUDA graphs that share one pool of memory, as no two run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Step) -> Step:
        """Capture a step, which does not run it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, those of NCCL's watchdog say, do not belong to the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
