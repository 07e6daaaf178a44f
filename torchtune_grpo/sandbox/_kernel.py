"""What the kernel offers to confine a process: namespaces, mounts, capabilities, limits.

Everything goes through libc, because Python has few of these calls; see the manual pages
namespaces(7), mount_setattr(2), capabilities(7) and prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
import sysconfig
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

LIBRARY = sysconfig.get_paths()["stdlib"]
LIBRARY_FD = 1002  # of open_library; no program's own descriptor
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_LINKS = ("/lib", "/lib64", "/usr/lib64")
_WHEN_THREADS_END = "libgcc_s.so.1"  # libc loads it then
# Users that completions run as and nobody else: the first of them (a container may not know large
# numbers), and how many they are.
_FIRST_UIDS, UIDS = (10**9, 20_000), 40_000
_MAX_FILES = 4096  # of one completion, in memory

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
    child = os.fork()  # tries it first: who has entered cannot leave
    if not child:
        try:
            _enter_namespaces()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        return os.strerror(code)
    _enter_namespaces()
    return ""


def _enter_namespaces() -> None:
    flags = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(flags):
        call_libc("unshare", flags | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)  # some allow the namespaces and no mount there


def renew_pid_namespace(own: int) -> None:
    """Has the next child of this process be the first in a new pid namespace.

    Args:
        own (int): the open file of this process's own, below which the new one is.
    """
    call_libc("setns", own, CLONE_NEWPID)
    call_libc("unshare", CLONE_NEWPID)


def open_library() -> None:
    """Has Python import its library through an open folder, if its path is the owner's alone.

    Another user may not walk through ``/root``, say, but may begin below it.
    """
    if all(folder.stat().st_mode & 1 for folder in Path(LIBRARY).parents):
        return
    os.dup2(os.open(LIBRARY, os.O_PATH), LIBRARY_FD)
    packages = [module for module in sys.modules.values() if hasattr(module, "__path__")]
    for paths in (sys.path, *(package.__path__ for package in packages)):
        paths[:] = [path.replace(LIBRARY, f"/proc/self/fd/{LIBRARY_FD}") for path in paths]


def shared_libraries() -> list[str]:
    """The files that Python and its extension modules map into memory."""
    reader, writer = os.pipe()
    if not os.fork():
        for library in [*Path(LIBRARY, "lib-dynload").glob("*.so"), _WHEN_THREADS_END]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))
        os.write(writer, Path("/proc/self/maps").read_bytes())
        os._exit(0)
    os.close(writer)
    with open(reader) as maps:
        found = {line.split(maxsplit=5)[-1].strip() for line in maps}
    os.wait()
    return sorted(path for path in found if path.startswith("/") and ".so" in path)


def hide_files(libraries: list[str]) -> None:
    """Replaces the file system by what Python needs to run, read-only, and an empty /tmp.

    Call it in a mount namespace of its own.

    Args:
        libraries (list[str]): of :func:`shared_libraries`.
    """
    folders = {os.path.dirname(path) for path in libraries if not path.startswith(LIBRARY)}
    # In order, so that none is hidden by a folder that it lies in.
    paths = [*DEVICES, *sorted({LIBRARY, *folders})]
    paths += filter(os.path.exists, ["/etc/ld.so.cache"])
    # The new root is put together on /proc, a folder that exists and holds nothing of interest.
    root = "/proc"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path in paths:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "x"):
                pass
        _mount(path, target, None, _MS_BIND | _MS_REC)
        _make_read_only(target)
    packages = root + LIBRARY + "/site-packages"
    if os.path.isdir(packages):
        _mount("tmpfs", packages, "tmpfs", _MS_RDONLY, "size=4k")
    for link in filter(os.path.islink, _LINKS):
        os.symlink(os.readlink(link), root + link)
    os.mkdir(root + "/tmp")
    os.chdir(root)
    _mount(root, "/", None, _MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def isolate(scratch: str, *, megabytes: int) -> None:
    """Enters namespaces that end with this process, with an empty folder in memory."""
    call_libc("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS)
    options = f"size={megabytes}m,nr_inodes={_MAX_FILES},mode=777"
    _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


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


def drop_privileges(uid: int | None, *, new_user_namespace: bool) -> None:
    """Gives up every capability, for good.

    Args:
        uid (int | None): the user to become. None = stays who it is.
        new_user_namespace (bool): whether to leave the owner's, where the kernel allows it.
    """
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
    if uid is not None:
        become(uid)
    if new_user_namespace:
        libc.unshare(CLONE_NEWUSER)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call_libc("capset", header, (ctypes.c_uint32 * 6)())
    refuse_debuggers()


def become(uid: int) -> None:
    """Changes user and group, and leaves all other groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def first_uid() -> int | None:
    """Where ``UIDS`` users begin that this process can become; None if it may not."""
    for uid in _FIRST_UIDS if os.geteuid() == 0 else ():
        child = os.fork()
        if not child:
            with contextlib.suppress(OSError):
                become(uid)
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1] == 0:
            return uid
    return None


def set_limits(limits: dict[str, int]) -> None:
    """Sets resource limits, such as ``{"CPU": 5}``; seconds, bytes and counts."""
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def time_used(roots: list[int]) -> tuple[float, float]:
    """Seconds that all descendants of some processes have run, and have waited for a CPU."""
    ran = waited = 0.0
    for process in [child for root in roots for child in processes_of(root)]:
        with contextlib.suppress(OSError):  # it is gone, or the kernel keeps no such account
            fields = Path(f"/proc/{process}/stat").read_text("latin-1").rpartition(")")[2].split()
            ran += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with reaped children
            waited += int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    return ran, waited


def processes_of(root: int) -> list[int]:
    """All descendants of a process, from /proc; zombies too, whose other threads may live."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text("latin-1")  # its name may be no text
            except OSError:
                continue  # gone meanwhile
            fields = stat.rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
