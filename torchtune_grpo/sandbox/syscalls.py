"""System calls that Python lacks, and what /proc says about processes.

See the manual pages prctl(2), landlock(7) and proc(5). Everything goes through libc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Container
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

# Landlock: system call numbers (the same on all architectures), flags, and rights to files.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE_FILE, _MAKE_FILE = 1 << 5, 1 << 8
READ = _READ_FILE | _READ_DIR
LIST = _READ_DIR
USE_FILE = _READ_FILE | _WRITE_FILE | _TRUNCATE
_PLAIN_FILES = READ | _WRITE_FILE | _TRUNCATE | _REMOVE_FILE | _MAKE_FILE
_COUNT_OF_RIGHTS = (0, 13, 14, 15, 15, 16)  # by version; 16 from version 5 on
_TCP_RIGHTS, _SCOPES = 3, 3  # from version 4 on, from version 6 on

libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: object) -> int:
    """Call a function of libc; raises OSError where it reports a failure."""
    result = getattr(libc, name)(*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result)


def prctl(option: int, value: int) -> None:
    """Set one of this process's attributes."""
    call_libc("prctl", option, value, 0, 0, 0)


def set_limits(limits: dict[str, int]) -> None:
    """Set resource limits, such as ``{"CPU": 5}``; seconds, bytes and counts."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def used_by(root: int) -> tuple[float, float, int]:
    """Return what all descendants of a process use: seconds run, seconds spent waiting for a CPU,
    and bytes of memory beyond what each inherited from that process.

    Only the two longest waits count: a test and its completion take turns, so theirs add up, but
    waits of more processes at once would count the same time several times.
    """
    ran, waits, pages = 0.0, [0.0], 0
    inherited = int(_stat(root)[21])
    for process in processes_of(root):
        with contextlib.suppress(OSError):  # process gone, or the kernel keeps no such account
            fields = _stat(process)
            ran += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with reaped children
            pages += max(int(fields[21]) - inherited, 0)
            waits.append(seconds_waited(process))
    return ran, sum(sorted(waits)[-2:]), pages * resource.getpagesize()


def seconds_waited(process: int) -> float:
    """Return how long a process has waited for a CPU; 0 if the kernel keeps no such account."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def processes_of(root: int, without: Container[int] = ()) -> list[int]:
    """List all descendants of a process, including zombies, whose other threads may live.

    Those in ``without`` are left out with all of theirs.
    """
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            children.setdefault(int(_stat(entry)[1]), []).append(int(entry))
    found = [root]
    for process in found:
        found += [child for child in children.get(process, []) if child not in without]
    return found[1:]


def memory_of(process: int) -> int:
    """Return the bytes of memory that a process has, with its share of what others have, too."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return 0


def _stat(process: int | str) -> list[str]:
    """Return the fields of a process's stat file after its name, which may be any bytes."""
    return Path(f"/proc/{process}/stat").read_text("latin-1").rpartition(")")[2].split()


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface, 0 if it has none."""
    return max(int(libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)), 0)


def open_for_landlock(path: str, rights: int) -> tuple[int, int]:
    """Return the opened path and its rights; the kernel refuses a folder's rights for a file."""
    rights &= -1 if os.path.isdir(path) else USE_FILE
    return os.open(path, os.O_PATH | os.O_CLOEXEC), rights


def restrict_with_landlock(
    paths: list[tuple[int, int]], *, writable: str, signals: bool = False
) -> None:
    """Give up, for children too, all files but the opened ``paths`` and those in ``writable``.

    It also gives up TCP (version 4) and, without ``signals``, signals to processes outside
    (version 6). Without Landlock it does nothing.
    """
    version = landlock_version()
    if not version:
        return
    rights = (1 << _COUNT_OF_RIGHTS[min(version, 5)]) - 1
    # Fields of landlock_ruleset_attr; older versions know fewer, and the others have to be zero.
    fields = (rights, _TCP_RIGHTS * (version >= 4), _SCOPES * (version >= 6 and not signals))
    ruleset = struct.pack("QQQ", *fields)
    fd = call_libc("syscall", _CREATE_RULESET, ruleset, len(ruleset), 0)
    for path, allowed in [*paths, open_for_landlock(writable, _PLAIN_FILES)]:
        beneath = struct.pack("=Qi", allowed & rights, path)
        call_libc("syscall", _ADD_RULE, fd, _PATH_BENEATH, beneath, 0)
    call_libc("syscall", _RESTRICT_SELF, fd, 0)
