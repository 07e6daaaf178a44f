"""What keeps a completion to itself: put up in its server once, and around each completion."""

from __future__ import annotations

import importlib
import os
import secrets
import site
from pathlib import Path

from torchtune_grpo.sandbox import kernel as _kernel
from torchtune_grpo.sandbox.landlock import landlock_version, open_paths, restrict_files
from torchtune_grpo.sandbox.seccomp import can_filter, leave_keyring, restrict_calls

# Imported before the first fork, so that no completion has to wait for them.
_PRELOADED = (
    "bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib "
    "heapq itertools json math numbers operator random re statistics string typing"
).split()


class Fences:
    """Those of one server.

    Args:
        namespaces (bool): False does without them: Landlock hides files then.

    Raises:
        OSError: if the kernel refuses them.
    """

    def __init__(self, *, namespaces: bool) -> None:
        for name in _PRELOADED:
            importlib.import_module(name)
        site.setquit()  # exit(), which Python has unless it is told to start without
        os.umask(0o022)
        # Where memory runs out, the kernel ends these processes first.
        Path("/proc/self/oom_score_adj").write_text("1000")
        leave_keyring()
        readable = _kernel.readable_paths()
        self._namespaces = namespaces
        if namespaces:
            _kernel.enter_namespaces()
            _kernel.hide_files(readable)
        self._users = _kernel.first_uid()  # where it lives now: a user namespace may know one
        self._paths = []
        if not namespaces:
            for _ in _kernel.read_once(readable):
                pass
            self._paths = open_paths(readable)
            if self._users:
                _kernel.open_library()
        self._filter = can_filter()
        self.facts = {
            "landlock": landlock_version(),
            "filter": self._filter,
            "users": self._users is not None,
        }

    def fork(self) -> int:
        """As ``os.fork``; the child is the first process of a pid namespace."""
        if self._namespaces:
            _kernel.call_libc("unshare", _kernel.CLONE_NEWPID)
        return os.fork()

    def leave_machine(self, folder: str, *, megabytes: int) -> int | None:
        """Takes all files from this process but those that a completion may have.

        Args:
            folder (str): where it may write.
            megabytes (int): that it may write, where they are in memory.

        Returns:
            The user to become, none other's, so that the limit on processes counts this
            completion's alone. None = the same.
        """
        uid = self._users and self._users + secrets.randbelow(_kernel.UIDS)
        _kernel.refuse_privileges()
        if self._namespaces:
            _kernel.isolate(folder, megabytes=megabytes)
        else:
            if uid is not None:
                os.chown(folder, uid, uid)
            restrict_files(self._paths, writable=folder)
        os.chdir(folder)
        return uid

    def give_up_rights(self, uid: int | None, limits: dict[str, int]) -> None:
        """Takes the rest; limits are of :func:`_kernel.set_limits`."""
        os.umask(0o077)
        _kernel.set_limits(limits)
        _kernel.drop_privileges(uid, new_user_namespace=self._namespaces)
        _kernel.die_with_parent()  # once more: a change of the user undoes it
        if self._filter:
            restrict_calls()
