"""The fences around a completion: built in its server once, closed around each completion.

    What it could reach     In namespaces                        Where the kernel refuses them
    ----------------------  -----------------------------------  ----------------------------------
    this machine's files    a mount namespace with copies of     Landlock: Python's library alone
                            Python's library
    a folder to write to    /tmp in memory, of limited size      a folder that its owner deletes,
                                                                 plain files alone (Landlock)
    other processes         a pid namespace                      a user of its own (as root) or
                                                                 Landlock 6; the filter
    the network             a network namespace; the filter      the filter; Landlock 4 (TCP)
    IPC, keyrings           an ipc namespace; the filter         the filter
    root's rights           in both: no capabilities, no_new_privs, a user of its own
    other system calls      in both: the filter (seccomp.py)
    memory, processes, ...  in both: resource limits (syscalls.set_limits); code.py watches the time

A test is behind the same fences, but runs as the server's user. Landlock is called in syscalls.py.
The test and other completions are not in a completion's memory, because it is forked before its
server and its checker receive them.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import os
import re
import secrets
import signal
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torchtune_grpo.sandbox import syscalls
from torchtune_grpo.sandbox.seccomp import can_filter, restrict_calls

# Imported before the first fork, so that no completion has to wait for them.
_PRELOADED = (
    "bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib "
    "heapq itertools json math numbers operator random re statistics string typing"
).split()

_LIBRARY = sysconfig.get_paths()["stdlib"]
LIBRARY_FD = 1002  # descriptor for _open_library, above those that programs use
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Files that no completion needs or that describe this machine, and duplicates of time zones.
_LEFT_OUT = re.compile(
    "test|idlelib|lib2to3|turtledemo|tkinter|ensurepip|distutils|config-.*|.*-packages|posix|right"
)
_FOR_ENDING_THREADS = "libgcc_s.so.1"  # libc loads it when the first thread ends

# User ids for completions only: the first (a container may not know large ones), and how many.
_FIRST_UIDS, _UIDS = (10**9, 20_000), 40_000
_MAX_FILES = 4096  # files of one completion, in memory

_NAMESPACES = (
    syscalls.CLONE_NEWNET | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT = 1, 2, 4, 32
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 4096, 8192, 16384, 1 << 18
_READ_ONLY = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV
_PR_CAPBSET_DROP = 24


class Fences:
    """The fences of one server; raises OSError if the kernel refuses the namespaces."""

    def __init__(self, *, namespaces: bool, packages: Sequence[str]) -> None:
        os.umask(0o022)
        syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)  # holds for all that is forked from here on
        # If memory runs out, the kernel ends these processes first.
        Path("/proc/self/oom_score_adj").write_text("1000")
        self._namespaces = namespaces
        self._landlock: list[tuple[int, int]] = []
        uids = _FIRST_UIDS if os.geteuid() == 0 else ()
        # The first one that this process can become, or None.
        self._first_uid = next((uid for uid in uids if _can(partial(_become, uid))), None)
        if namespaces:  # before a package starts a thread, with which the kernel would refuse it
            _enter_namespaces(self._first_uid)
        library, imported = _readable_paths(), _import(packages)
        readable = [*library, *imported]
        # A folder in memory is mounted there, which would hide what lies below.
        self._folder = "/var/tmp" if any(path.startswith("/tmp/") for path in readable) else "/tmp"
        if namespaces:
            _hide_files(library, imported, self._folder)
        else:
            rights = {
                _LIBRARY: syscalls.LIST,
                **dict.fromkeys(readable, syscalls.READ),
                **dict.fromkeys(_DEVICES, syscalls.USE_FILE),
            }
            self._landlock = [syscalls.open_for_landlock(*path) for path in rights.items()]
            if self._first_uid:
                _open_library()
        self._filter = can_filter()
        self.facts = {
            "landlock": syscalls.landlock_version(),
            "filter": self._filter,
            "users": self._first_uid is not None,
            "counted": not _can(self._exceed_limit),
        }

    def _exceed_limit(self) -> None:
        """Fork beyond the process limit, which does not bind a process that is root outside too."""
        self.give_up_rights(self._first_uid, {"NPROC": 1})
        os.fork()

    def fork(self) -> int:
        """Fork as ``os.fork`` does; the child is the first process of a pid namespace."""
        if self._namespaces:
            syscalls.call_libc("unshare", syscalls.CLONE_NEWPID)
        return os.fork()

    def confine_test(self, candidate: int) -> None:
        """Cut this process, which runs a test, off from files and calls as a completion is.

        It remains the owner's user, and can send signals to the candidate alone.
        """
        if not self._namespaces:
            syscalls.restrict_with_landlock(self._landlock, writable="/dev/null", signals=True)
        if self._filter:
            restrict_calls(signals_to=candidate)

    def leave_machine(self, folder: str, *, megabytes: int) -> int | None:
        """Cut this process off from all files but the library and a folder, of limited size; in
        namespaces it is in memory, else it is ``folder``.

        Returns the user id to take (None: the same as now). No other completion runs as this user,
        so that the limit on processes counts only this one's.
        """
        uid = self._first_uid and self._first_uid + secrets.randbelow(_UIDS)
        if self._namespaces:
            folder = self._folder
            _isolate(folder, megabytes=megabytes)
        else:
            if uid is not None:
                os.chown(folder, uid, uid)
            syscalls.restrict_with_landlock(self._landlock, writable=folder)
        os.chdir(folder)
        return uid

    def give_up_rights(self, uid: int | None, limits: dict[str, int]) -> None:
        """Set the resource limits, become the user, and give up everything else, for good."""
        os.umask(0o077)
        syscalls.set_limits(limits)
        for capability in range(64):
            syscalls.libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
        if uid is not None:
            _become(uid)
        if self._namespaces:
            syscalls.libc.unshare(syscalls.CLONE_NEWUSER)  # where the kernel allows it
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
        syscalls.call_libc("capset", header, (ctypes.c_uint32 * 6)())
        # Set both again, because a change of the user may undo them.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if self._filter:
            restrict_calls()


def _readable_paths() -> list[str]:
    """List the files, and the folders with all their contents, that a completion may read."""
    patterns = (f"{glob.escape(_LIBRARY)}/*", "/usr/share/zoneinfo/*", "/usr/lib/locale/C.utf8")
    paths = [path for pattern in patterns for path in glob.glob(pattern)]
    return [path for path in paths if not _LEFT_OUT.fullmatch(os.path.basename(path))]


def _import(packages: Sequence[str]) -> list[str]:
    """Import what completions may use; return where the packages are, with all they import."""
    import_path, present = [*sys.path], {*sys.modules}
    sys.path += map(os.path.dirname, packages)
    for name in [*_PRELOADED, *map(os.path.basename, packages)]:
        importlib.import_module(name)
    sys.path[:] = import_path  # so that completions find no other package
    site.setquit()  # defines exit(), as this Python started without site
    _load_shared_libraries()
    found: set[str] = set()
    for name in {name.partition(".")[0] for name in sys.modules.keys() - present}:
        module = sys.modules[name]
        for path in getattr(module, "__path__", None) or [getattr(module, "__file__", None)]:
            if path and (not path.startswith(f"{_LIBRARY}/") or "-packages/" in path):
                # Wheels keep the shared libraries that they bring in a folder beside the package.
                found.update(filter(os.path.exists, [path, f"{path}.libs"]))
    return [path for path in found if found.isdisjoint(map(str, Path(path).parents))]


def _load_shared_libraries() -> None:
    """Load what the C modules of Python's library link to, as those files are not there later."""
    for path in [*Path(_LIBRARY, "lib-dynload").glob("*.so"), Path(_FOR_ENDING_THREADS)]:
        if "tkinter" not in path.name:
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))


def _files_at(paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Read all files at and below some paths."""
    for path in map(Path, paths):
        for file in [path, *path.rglob("*")]:
            with contextlib.suppress(OSError):  # a folder, or a link to nowhere
                yield str(file), file.read_bytes()


def _enter_namespaces(first_uid: int | None) -> None:
    """Enter new network, mount, ipc and uts namespaces, in a user namespace if need be."""
    if syscalls.libc.unshare(_NAMESPACES):
        server, (reader, writer) = os.getpid(), os.pipe()
        if not (mapper := os.fork()):  # outside, where root may map completions' users as well
            os.close(writer)
            os.read(reader, 1)
            os._exit(not _can(partial(_map_users, f"/proc/{server}", first_uid)))
        syscalls.call_libc("unshare", _NAMESPACES | syscalls.CLONE_NEWUSER)
        os.close(reader)
        os.close(writer)
        if os.waitpid(mapper, 0)[1]:
            raise PermissionError("the kernel does not let a user namespace know its users")
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)


def _map_users(process: str, first_uid: int | None) -> None:
    """Let a process's user namespace know the present user and, if any, those of completions."""
    others = "" if first_uid is None else f"\n{first_uid} {first_uid} {_UIDS}"
    if not others:
        Path(process, "setgroups").write_text("deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        Path(process, name).write_text(f"{own} {own} 1{others}")


def _hide_files(library: list[str], imported: list[str], folder: str) -> None:
    """Replace this mount namespace's files with in-memory copies of the library, the imported
    packages, three devices and an empty folder, all read-only."""
    root = "/proc"  # the new root is built there: a folder that exists and that nothing else needs
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    for path, content in _files_at(library):
        copy = Path(root + path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        os.utime(copy, (0, os.stat(path).st_mtime))  # or else Python would compile it again
    for path in (*_DEVICES, *imported):
        target = Path(root + path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if os.path.isdir(path) else target.touch()
        _mount(path, str(target), "", _MS_BIND)
        if path in imported:
            _mount("", str(target), "", _READ_ONLY)
    os.makedirs(root + folder, exist_ok=True)
    os.chdir(root)
    _mount(root, "/", "", _MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    _mount("", "/", "", _READ_ONLY)


def _isolate(scratch: str, *, megabytes: int) -> None:
    """Enter namespaces that end with this process, with an empty folder in memory."""
    syscalls.call_libc("unshare", _NAMESPACES)
    options = f"size={megabytes}m,nr_inodes={_MAX_FILES},mode=777"
    _mount("tmpfs", scratch, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = (text.encode() for text in (source, target, kind))
    syscalls.call_libc("mount", *texts, flags, data.encode())


def _open_library() -> None:
    """Have Python import its library through an open folder, if only the owner can walk its path.

    Another user may not pass through ``/root``, say, but may start below it.
    """
    if all(folder.stat().st_mode & 1 for folder in Path(_LIBRARY).parents):
        return
    os.dup2(os.open(_LIBRARY, os.O_PATH), LIBRARY_FD)
    packages = [module for module in sys.modules.values() if hasattr(module, "__path__")]
    for paths in (sys.path, *(package.__path__ for package in packages)):
        paths[:] = [path.replace(_LIBRARY, f"/proc/self/fd/{LIBRARY_FD}") for path in paths]


def _become(uid: int) -> None:
    """Change user and group, and leave all other groups."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _can(action: Callable[[], None]) -> bool:
    """Whether a child process can do something."""
    if not (child := os.fork()):
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
