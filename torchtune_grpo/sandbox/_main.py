"""What the processes of this package run: ``main(role, fd)``."""

from __future__ import annotations

import importlib
import os
import socket
from functools import partial
from typing import Any

from torchtune_grpo.sandbox import _kernel
from torchtune_grpo.sandbox._server import serve
from torchtune_grpo.sandbox._wire import send


def main(role: str, fd: int) -> None:
    """Serves one owner, which holds the other end of the socket.

    Args:
        role (str): ``candidate``, ``candidate_without_namespaces``, ``checker`` or ``reward``.
        fd (int): the socket.
    """
    control = socket.socket(fileno=fd)
    if role.startswith("candidate"):
        _serve_candidates(control, namespaces=role == "candidate")
        return
    if role == "checker":
        from torchtune_grpo.sandbox._checker import run_checker as task
    else:
        from torchtune_grpo.sandbox._rewarder import run_rewards as task
    send(control, {"ready": True})
    serve(control, task)


def _serve_candidates(control: socket.socket, *, namespaces: bool) -> None:
    from torchtune_grpo.sandbox._candidate import PRELOADED, run_candidate
    from torchtune_grpo.sandbox._landlock import landlock_version, open_paths
    from torchtune_grpo.sandbox._seccomp import can_filter

    for name in PRELOADED:
        importlib.import_module(name)
    libraries = _kernel.shared_libraries()
    facts: dict[str, Any] = {
        "landlock": landlock_version(),
        "filter": can_filter(),
        "pid": os.getpid(),
        "refusal": _kernel.enter_namespaces() if namespaces else "they are turned off",
    }
    facts["namespaces"] = not facts["refusal"]
    pid_namespace = None
    if facts["namespaces"]:
        first = os.fork()
        if first:  # the first process of the new pid namespace is the server; this one waits for it
            control.close()
            os.waitpid(first, 0)
            return
        _kernel.die_with_parent()
        facts["pid"] = int(os.readlink("/proc/self"))  # as the owner sees it
        pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        _kernel.hide_files(libraries)
    facts["users"] = _kernel.first_uid()  # where it lives now: a user namespace may know one
    if facts["users"] and pid_namespace is None:
        _kernel.open_library()
    task = partial(run_candidate, paths=open_paths(libraries))
    send(control, facts)
    serve(control, task, pid_namespace=pid_namespace)
    os._exit(0)
