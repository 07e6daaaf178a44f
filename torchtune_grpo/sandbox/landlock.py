"""Landlock: a process gives up files, signals and TCP for itself and its children, unprivileged.

See landlock(7). It is the fence where namespaces are not allowed: beyond the files, a process under
Landlock cannot trace one that is not, and with ABI 6 it cannot send it signals.
"""

from __future__ import annotations

import ctypes
import os

from torchtune_grpo.sandbox import kernel as _kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # on every architecture
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE, _TRUNCATE = 1, 4, 8, 2, 1 << 14
_REMOVE_FILE, _MAKE_FILE = 1 << 5, 1 << 8
_OF_FILE = _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
_PLAIN_FILES = _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _REMOVE_FILE | _MAKE_FILE
# The rights that each version of the interface knows; ABI 1 has the first 13.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_FILE_RIGHTS = (1 << 16) - 1  # from ABI 5 on
_TCP_RIGHTS, _SCOPES = 3, 3  # from ABI 4 on, from ABI 6 on


class _Ruleset(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scoped")]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def landlock_version() -> int:
    """The kernel's version of the interface, 0 if it has none."""
    arguments = (None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    version = _kernel.libc.syscall(ctypes.c_long(_CREATE), *arguments)
    return max(int(version), 0)


def open_paths(readable: list[str]) -> list[tuple[int, int]]:
    """What every completion may use, opened once for all.

    Args:
        readable (list[str]): of :func:`_kernel.readable_paths`.

    Returns:
        Open files, each with the rights to it.
    """
    rights = {
        _kernel.LIBRARY: _READ_DIR,
        **dict.fromkeys(readable, _READ_FILE | _READ_DIR),
        **dict.fromkeys(_kernel.DEVICES, _READ_FILE | _WRITE_FILE | _TRUNCATE),
    }
    return [
        # The kernel refuses a folder's rights for a file.
        (os.open(path, os.O_PATH | os.O_CLOEXEC), right & (-1 if os.path.isdir(path) else _OF_FILE))
        for path, right in rights.items()
    ]


def restrict_files(paths: list[tuple[int, int]], *, writable: str) -> None:
    """Leaves this process some files and folders to read, and one folder to write plain files to.

    Where the kernel knows no Landlock, nothing happens.

    Args:
        paths (list[tuple[int, int]]): of :func:`open_paths`.
        writable (str): the folder.
    """
    version = landlock_version()
    if not version:
        return
    rights = _FILE_RIGHTS.get(version, _ALL_FILE_RIGHTS)
    ruleset = _Ruleset(rights, _TCP_RIGHTS * (version >= 4), _SCOPES * (version >= 6))
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    arguments = (ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    fd = _kernel.call_libc("syscall", ctypes.c_long(_CREATE), *arguments)
    for path, right in [*paths, (os.open(writable, os.O_PATH | os.O_CLOEXEC), _PLAIN_FILES)]:
        rule = _Beneath(right & rights, path)
        beneath = (fd, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
        _kernel.call_libc("syscall", ctypes.c_long(_ADD_RULE), *beneath)
    _kernel.call_libc("syscall", ctypes.c_long(_RESTRICT), fd, ctypes.c_uint32(0))
