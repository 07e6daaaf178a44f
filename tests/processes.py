"""Running processes, for tests that count what is left over, and two ranks in forked ones."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# What tests of this process may have started, and keep running.
_KEPT = ("multiprocessing.resource_tracker", "fork_server.py")


def children(*, of: int | None = None) -> dict[int, psutil.Process]:
    """Return a process's children, or this one's, by their ids; zombies too."""
    found = psutil.Process(of).children()
    return {child.pid: child for child in found if of or not _is_kept(child)}


def _is_kept(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # a zombie has no command line
        return any(kept in " ".join(process.cmdline()) for kept in _KEPT)
    return False


def is_alive(process: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    """Wait until ``condition()`` is true; return whether it was in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def least_seconds(action: Callable[[], object], *, enough: float, tries: int = 3) -> float:
    """Return the fewest CPU seconds of this process that ``action`` took.

    Try again where it took more than ``enough``: a busy machine may take twice as long.
    """
    least = float("inf")
    for _ in range(tries):
        start = time.process_time()
        action()
        least = min(least, time.process_time() - start)
        if least < enough:
            break
    return least


def on_two_ranks(function: Callable[[int], Any], *, folder: Path) -> list[Any]:
    """Return what ``function(rank)`` returns on each of two ranks, which meet in ``folder``."""
    import torch.distributed as dist  # which others here do without

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
