"""What the kernel offers to confine a process: namespaces, mounts, capabilities, limits.

Everything goes through libc, because Python has few of these calls; see the manual pages
namespaces(7), mount_setattr(2), capabilities(7) and prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import sysconfig
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 4096, 8192, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SIGKILL = 9
_SYS_MOUNT_SETATTR = 442  # on every architecture
_AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 0x8000, 1, 2

libc = ctypes.CDLL(None, use_errno=True)


def call_libc(name: str, *arguments: object) -> int:
    """Calls a function of libc; raises OSError where it reports a failure."""
    result = getattr(libc, name)(*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result)


def adopt_orphans() -> None:
    """Makes orphaned descendants this process's children, so that none gets away."""
    call_libc("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that forked it ends."""
    call_libc("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def refuse_debuggers() -> None:
    """Closes this process's memory and files to other processes of its user."""
    call_libc("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def enter_namespaces() -> str:
    """Enters new pid, network, mount, ipc and uts namespaces; the pid one is for children.

    Returns:
        An empty string, or what the kernel said if it does not allow it.
    """
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    try:
        call_libc("unshare", flags)
        return ""
    except OSError:
        pass
    try:
        call_libc("unshare", flags | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        return ""
    except OSError as error:
        return str(error)


def visible_paths() -> list[str]:
    """What a Python program needs to run: the standard library and shared libraries."""
    library = sysconfig.get_paths()["stdlib"]
    wanted = [library, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    return [path for path in wanted if os.path.exists(path)]


DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def hide_files(paths: Iterable[str]) -> None:
    """Replaces the file system by one that holds only ``paths``, read-only, and an empty /tmp.

    Call it in a mount namespace of its own.
    """
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # The new root is put together on /proc, a folder that exists and holds nothing of interest.
    root = "/proc"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in [*DEVICES, *paths]:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "x"):
                pass
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(target)
    os.mkdir(root + "/tmp")
    os.chdir(root)
    _mount(root, "/", None, _MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def mount_scratch(path: str, *, megabytes: int) -> None:
    """Mounts an empty folder in memory, in a mount namespace that ends with this process."""
    call_libc("unshare", CLONE_NEWNS | CLONE_NEWIPC)
    _mount("tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={megabytes}m,mode=777")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = (None if text is None else text.encode() for text in (source, target, kind))
    call_libc("mount", *texts, ctypes.c_ulong(flags), data.encode() if data else None)


def _make_read_only(path: str) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_ns")]

    attributes = Attributes(set=_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    arguments = (path.encode(), _AT_RECURSIVE, ctypes.byref(attributes), size)
    call_libc("syscall", ctypes.c_long(_SYS_MOUNT_SETATTR), -100, *arguments)


def refuse_privileges() -> None:
    """No program that is started from here on gets more rights than its parent has."""
    call_libc("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_privileges(uid: int | None) -> None:
    """Gives up every capability, for good, and becomes user ``uid`` if that is possible."""
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
    if uid is not None:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        except OSError:  # a container that maps no such user; the other fences stand
            pass
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call_libc("capset", header, (ctypes.c_uint32 * 6)())
    refuse_debuggers()


def set_limits(limits: dict[str, int]) -> None:
    """Sets resource limits, such as ``{"CPU": 5}``; seconds, bytes and counts."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def processes_of(root: int) -> list[int]:
    """All descendants of a process that are not zombies, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone meanwhile
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
