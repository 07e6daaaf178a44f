"""What /proc says about processes, for tests that count who is left over."""

import os
import time
from pathlib import Path

# What tests of this process may have started, and keep running.
_KEPT = ("multiprocessing.resource_tracker", "fork_server.py")


def children(*, of: int | None = None) -> dict[int, str]:
    """A process's children, or this one's, zombies too: id -> state and command line."""
    parent = os.getpid() if of is None else of
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text("latin-1").rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if int(fields[1]) == parent and (of or not any(kept in command for kept in _KEPT)):
                    found[int(entry.name)] = f"{fields[0]} {command}"
            except OSError:
                continue
    return found


def processes_with(text: str) -> list[int]:
    """Ids of all processes of the machine, but this one, whose command line holds ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if text.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def is_alive(process: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 10.0) -> bool:
    """Whether ``condition()`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
