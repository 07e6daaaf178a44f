"""Who is there, for tests that count who is left over."""

import contextlib
import time

import psutil

# What tests of this process may have started, and keep running.
_KEPT = ("multiprocessing.resource_tracker", "fork_server.py")


def children(*, of: int | None = None) -> dict[int, psutil.Process]:
    """A process's children, or this one's, zombies too, by their ids."""
    found = psutil.Process(of).children()
    return {child.pid: child for child in found if of or not _is_kept(child)}


def _is_kept(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # a zombie has no command line
        return any(kept in " ".join(process.cmdline()) for kept in _KEPT)
    return False


def processes_with(text: str) -> list[psutil.Process]:
    """All processes of the machine whose command line holds ``text``."""
    everyone = psutil.process_iter(["cmdline"])
    return [process for process in everyone if text in " ".join(process.info["cmdline"] or ())]


def is_alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    """Whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
