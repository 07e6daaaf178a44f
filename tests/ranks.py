"""Two ranks of a process group, in forked processes."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def on_two_ranks(function: Callable[[int], Any], *, folder: Path) -> list[Any]:
    """Return what ``function(rank)`` returns on each of two ranks, which meet in ``folder``."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def call(rank: int) -> None:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        answers.put((rank, function(rank)))
        dist.destroy_process_group()

    processes = [context.Process(target=call, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    answered = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [answered[rank] for rank in range(2)]
