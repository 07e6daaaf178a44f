"""Decoding steps recorded once per shape and replayed, which spares the host their launches."""

from __future__ import annotations

from collections.abc import Callable

import torch

Step = Callable[[], None]


class StepGraphs:
    """Runs steps of a few shapes many times over.

    The first step of a shape runs as it is, which lets libraries set themselves up; the second is
    recorded; all from then on are replayed. What is replayed reads and writes the same memory, and
    takes every number of the host as it was: only what lies in tensors may differ between steps of
    one shape.

    Args:
        record (Callable[[Step], Step]): runs a step's host code and returns what replays it.
    """

    def __init__(self, record: Callable[[Step], Step]) -> None:
        self._record = record
        self._replays: dict[tuple[int, ...], Step | None] = {}

    def run(self, step: Step, *, shape: tuple[int, ...]) -> None:
        """Runs a step, or what was recorded of another one of its shape."""
        if shape not in self._replays:
            step()
            self._replays[shape] = None
            return
        replay = self._replays[shape]
        if replay is None:
            replay = self._replays[shape] = self._record(step)
        replay()

    def forget(self) -> None:
        """Drops what was recorded, because the memory that it uses is given up."""
        self._replays.clear()


def record_cuda_graph(step: Step) -> Step:
    """Captures a step in a CUDA graph; capturing does not run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
