"""Decoding steps recorded once per shape and replayed, which spares the host their launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchtune import utils

log = utils.get_logger("INFO")

Step = Callable[[], None]


class StepGraphs:
    """Runs steps of a few shapes many times over, in all rollouts of a run.

    The first step of a shape runs as it is, which lets libraries set themselves up; the second is
    recorded; all from then on are replayed. What is replayed reads and writes the same memory, and
    takes every number of the host as it was: only what lies in tensors may differ between steps of
    one shape. A step that cannot be recorded runs as it is, and so do all others from then on.

    Args:
        record (Callable[[Step], Step]): runs a step's host code and returns what replays it.
    """

    MOST = 64  # shapes; when there are more, all are dropped

    def __init__(self, record: Callable[[Step], Step]) -> None:
        self._record = record
        self._replays: dict[Hashable, Step | None] = {}
        self._addresses: list[int] = []
        self._fails = False

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Drops what was recorded if it would read or write elsewhere than in these tensors."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._replays.clear()
            self._addresses = addresses

    def run(self, step: Step, *, shape: Hashable) -> None:
        """Runs a step, or what was recorded of another one of its shape."""
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
                f"rollout.cuda_graphs=auto: a decoding step could not be recorded ({error}); "
                "decoding goes on without graphs, which is slower. Set it to never to say so."
            )
            return step


class CudaRecorder:
    """Captures steps in CUDA graphs that share one pool of memory, as no two run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, step: Step) -> Step:
        """Captures a step, which does not run it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Calls of other threads, those of NCCL's watchdog say, are none of the capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        return graph.replay
