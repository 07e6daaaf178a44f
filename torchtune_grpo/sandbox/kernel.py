"""What the kernel offers to confine a process: namespaces, mounts, capabilities, limits.

Everything goes through libc, because Python has few of these calls; see the manual pages
namespaces(7), mount(2), capabilities(7) and prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
import sysconfig
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 4096, 8192, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SIGKILL = 9

LIBRARY = sysconfig.get_paths()["stdlib"]
LIBRARY_FD = 1002  # of open_library; no program's own descriptor
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_ZONES, _OTHERS = "/usr/share/zoneinfo", ("/etc/ld.so.cache", "/usr/lib/locale/C.utf8")
# What no completion needs, and what tells of this machine; of zones, what is there twice.
_LEFT_OUT = re.compile(
    "test|idlelib|lib2to3|turtledemo|tkinter|ensurepip|distutils|config-.*|.*-packages|posix|right"
)
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


def enter_namespaces() -> None:
    """Enters new network, mount, ipc and uts namespaces, in a user's own if need be."""
    flags = CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(flags):
        call_libc("unshare", flags | CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


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


def readable_paths() -> list[str]:
    """What a completion may read: Python's library, the shared libraries that its modules load and
    this process has not, time zones; files, and folders with all that is in them."""
    (reader, writer), before = os.pipe(), _mapped()
    if not os.fork():
        for library in [*Path(LIBRARY, "lib-dynload").glob("*.so"), _WHEN_THREADS_END]:
            with contextlib.suppress(OSError):
                "tkinter" in str(library) or ctypes.CDLL(str(library))
        os.write(writer, "\n".join(_mapped() - before).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as text:
        libraries = [path for path in text.read().splitlines() if not path.startswith(LIBRARY)]
    os.wait()
    folders = [Path(folder) for folder in (LIBRARY, _ZONES) if os.path.isdir(folder)]
    entries = [entry for folder in folders for entry in folder.iterdir()]
    paths = [str(entry) for entry in entries if not _LEFT_OUT.fullmatch(entry.name)]
    return [path for path in [*paths, *libraries, *_OTHERS] if os.path.exists(path)]


def _mapped() -> set[str]:
    """The shared libraries in this process's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line[line.index("/") :] for line in lines if ".so" in line}


def read_once(paths: list[str]) -> Iterator[tuple[str, bytes]]:
    """Path and content of all files at and below some paths.

    From then on all are in memory, so that it tells nothing which ones a completion has read.
    """
    for path in paths:
        below = os.walk(path) if os.path.isdir(path) else [(os.path.dirname(path), [], [path])]
        for folder, _, names in below:
            for file in (os.path.join(folder, name) for name in names):
                with contextlib.suppress(OSError):  # a link to nowhere
                    yield file, Path(file).read_bytes()


def hide_files(paths: list[str]) -> None:
    """Replaces the file system by copies in memory of some files, read-only, and an empty /tmp.

    Call it in a mount namespace of its own.

    Args:
        paths (list[str]): of :func:`readable_paths`.
    """
    # The new root is put together on /proc, a folder that exists and holds nothing of interest.
    root, libraries = "/proc", [path for path in paths if ".so" in path]
    links = [*_LINKS]
    for folder in set(map(os.path.dirname, libraries)):
        links += [e.path for e in os.scandir(folder) if os.path.realpath(e.path) in libraries]
    texts = {link: os.readlink(link) for link in links if os.path.islink(link)}
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    for path, content in chain(read_once(paths), ((device, b"") for device in DEVICES)):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        Path(root + path).write_bytes(content)
        os.utime(root + path, (0, os.stat(path).st_mtime))  # or else Python would compile it again
    for device in DEVICES:
        _mount(device, root + device, None, _MS_BIND)
    for link, text in texts.items():
        os.symlink(text, root + link)
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


def time_used(root: int) -> tuple[float, float]:
    """Seconds that all descendants of a process have run, and have waited for a CPU."""
    ran = waited = 0.0
    for process in processes_of(root):
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
