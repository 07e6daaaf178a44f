"""Decoding steps recorded once per shape and replayed, which saves the host their launches.

A CUDA graph repeats its kernels on the recorded step's memory, with the recorded step's numbers
from the host. So all that a step reads or writes, besides weights and caches, lies in
``Buffers``, at the same addresses in all rollouts, and its shape is its number of rows alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torchtune import utils

log = utils.get_logger("INFO")

Step = Callable[[], None]


class Buffers:
    """Named flat buffers on a device; one that is too small is replaced, and none is freed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], *, dtype: torch.dtype) -> Tensor:
        """Return the beginning of a buffer in ``shape``, with its old contents; zeros if new."""
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

    The first ``EAGER`` steps of a shape run eagerly; the next one is recorded, and replayed from
    then on. A recording is assumed to cost what it saves in ``EAGER`` steps: where weights move at
    each rollout, which drops all recordings, shorter-lived shapes are never recorded. Only the
    contents of tensors may differ between steps of one shape. If a step cannot be recorded, it and
    all later ones run eagerly.
    ``record`` runs a step's host code and returns a function that replays its kernels.
    """

    EAGER = 32  # steps

    def __init__(self, record: Callable[[Step], Step]) -> None:
        self._record = record
        self._replays: dict[Hashable, Step] = {}
        self._eager: Counter[Hashable] = Counter()  # steps of each shape that ran eagerly
        self._places: list[Any] = []
        self._fails = False

    def drop_unless_at(self, tensors: Iterable[Tensor]) -> None:
        """Drop all recordings unless these tensors are still the memory they read and write."""
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]
        if places != self._places:
            self._drop()
            self._places = places

    def _drop(self) -> None:
        self._replays.clear()
        self._eager.clear()

    def run(self, step: Step, *, shape: Hashable) -> None:
        """Run a step, or replay the recording of another step of its shape."""
        if self._eager[shape] == self.EAGER and shape not in self._replays and not self._fails:
            self._try_to_record(step, shape)
        if shape in self._replays:
            self._replays[shape]()
        else:
            self._eager[shape] += 1
            step()

    def _try_to_record(self, step: Step, shape: Hashable) -> None:
        try:
            self._replays[shape] = self._record(step)
        except RuntimeError as error:
            self._fails = True
            self._drop()
            log.warning(
                f"rollout.engine.cuda_graphs=auto: could not record a decoding step ({error}); "
                "decoding goes on without graphs, which is slower. Set it to never to avoid the "
                "attempt."
            )


class CudaRecorder:
    """Captures steps in CUDA graphs, which share a pool of memory because no two run at once."""

    def __init__(self) -> None:
        self._graphs: WeakSet[object] = WeakSet()  # the pool's users
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Step) -> Step:
        """Capture a step without running it."""
        if not self._graphs:  # torch refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        # A capture that fails neither leaves its stream nor ends the stream's use of the pool.
        with torch.cuda.stream(self._stream):
            # Calls from other threads, such as NCCL's watchdog, do not belong to the capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
        self._graphs.add(graph)
        return graph.replay
