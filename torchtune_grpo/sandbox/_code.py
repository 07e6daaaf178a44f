"""One sandbox: a completion in one process, its test in another, and a verdict that is proven."""

from __future__ import annotations

import hmac
import math
import os
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtune_grpo.sandbox._process import ServerLost, ServerProcess
from torchtune_grpo.sandbox._wire import PeerGone, receive

_MEGABYTE = 2**20
_MAX_VERDICT = 2**16  # bytes


class SandboxError(RuntimeError):
    """The sandbox failed, not the completion."""


@dataclass(frozen=True)
class Limits:
    """What a completion may use.

    Args:
        seconds (float): from its start to the end of its test; then all its processes are killed.
        megabytes (int): of memory in each process, and of files in all.
        processes (int): at once, threads included.
    """

    seconds: float = 5.0
    megabytes: int = 512
    processes: int = 16

    def for_completion(self) -> dict[str, int]:
        """Resource limits of the completion's processes."""
        return {
            "CPU": math.ceil(self.seconds) + 1,
            "AS": self.megabytes * _MEGABYTE,
            "NPROC": self.processes,
            "FSIZE": 16 * _MEGABYTE,
            "NOFILE": 64,
            "CORE": 0,
        }

    def for_test(self) -> dict[str, int]:
        """Resource limits of the test's process."""
        return {
            "CPU": math.ceil(self.seconds) + 1,
            "AS": 2 * self.megabytes * _MEGABYTE,
            "FSIZE": 0,
            "CORE": 0,
        }


@dataclass(frozen=True)
class Verdict:
    """Whether a completion passed its test, and why not."""

    passed: bool
    why: str = ""


@dataclass
class CodeSandbox:
    """Judges one completion at a time. Starts its two processes when it first needs them.

    Args:
        limits (Limits): what a completion may use.
        namespaces (bool): False does without them, as where the kernel refuses them.
        unfenced (bool): whether to go on where the kernel can neither hide this machine's files and
            processes from a completion nor keep it from sending them signals.
    """

    limits: Limits = field(default_factory=Limits)
    namespaces: bool = True
    unfenced: bool = False
    _servers: dict[str, ServerProcess] = field(default_factory=dict)  # candidate and checker
    # A user of its own, so that the limit on processes counts this sandbox's alone.
    _uid: int | None = field(
        default_factory=lambda: (
            random.SystemRandom().randrange(20_000, 60_000) if os.geteuid() == 0 else None
        )
    )

    def judge(self, *, code: str, setup: str, test: str, entry_point: str) -> Verdict:
        """Runs a test on a completion's function.

        Args:
            code (str): the completion's program.
            setup (str): what the test may use besides: the prompt's imports and helpers.
            test (str): defines ``check(candidate)``, or calls the function by its name.
            entry_point (str): the function's name.

        Returns:
            The verdict. When it is there, no process and no file of the completion is left.

        Raises:
            SandboxError: if no verdict can be had for reasons that lie not in the completion.
        """
        self._start()
        return self._judge(code, setup, test, entry_point)

    def _judge(self, code: str, setup: str, test: str, entry_point: str) -> Verdict:
        if self._servers["candidate"].facts["namespaces"]:
            return self._run(code, setup, test, entry_point, "/tmp")
        folder = tempfile.mkdtemp(prefix="torchtune_grpo_code_")
        try:
            if self._uid is not None:
                os.chown(folder, self._uid, self._uid)
            return self._run(code, setup, test, entry_point, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def confinement(self) -> str:
        """What fences a completion in, and what does not, in words."""
        self._start()
        facts = self._servers["candidate"].facts
        if facts["namespaces"]:
            return (
                "completions run in namespaces of their own: no network, no process and no file of "
                "this machine but Python's library."
            )
        files = " and has no Landlock. Completions can READ THIS MACHINE'S FILES"
        if facts["landlock"]:
            files = ". Completions see only Python's library and a folder of their own (Landlock)"
        network = (
            " and can USE THE NETWORK. Run in a container without network and without the tests' "
            "files, or allow user namespaces."
        )
        if facts["landlock"] >= 4:
            network = (
                ", cannot open TCP connections, but CAN SEND UDP PACKETS. Run in a container "
                "without network, or allow user namespaces."
            )
        return f"the kernel refuses namespaces here ({facts['refusal']}){files}{network}"

    def close(self) -> None:
        """Ends both processes and whatever runs there."""
        while self._servers:
            self._servers.popitem()[1].close()

    def _start(self) -> None:
        candidate = "candidate" if self.namespaces else "candidate_without_namespaces"
        roles = {"candidate": candidate, "checker": "checker"}
        if self._servers.keys() == roles.keys():
            return
        try:
            for name, role in roles.items():
                if name not in self._servers:
                    self._servers[name] = ServerProcess(role)
        except (ServerLost, OSError) as error:
            self.close()
            raise SandboxError(f"the sandbox did not start: {error}") from error
        self._check_fences(self._servers["candidate"].facts)
        # Or else a sandbox that does not work here would look like a model that cannot code.
        verdict = self._judge("def f(x): return x", "", "assert f([1]) == [1]", "f")
        if not verdict.passed:
            self.close()
            raise SandboxError(f"the sandbox does not work here: {verdict.why}")

    def _check_fences(self, facts: dict[str, Any]) -> None:
        # Without namespaces, Landlock hides files; it stops signals to processes of the same user
        # from version 6 on.
        fenced = facts["namespaces"] or facts["landlock"] >= (1 if self._uid is not None else 6)
        if not (fenced or self.unfenced):
            self.close()
            raise SandboxError(
                f"the kernel refuses namespaces here ({facts['refusal']}) and has Landlock version "
                f"{facts['landlock']}, which is not enough. Code that a model wrote could read and "
                "kill what belongs to you. Allow user namespaces, or run everything in a container "
                "that may come to harm and set unfenced: true."
            )

    def _run(self, code: str, setup: str, test: str, entry_point: str, folder: str) -> Verdict:
        deadline = time.monotonic() + self.limits.seconds
        secret = secrets.token_hex(16)
        ours, theirs = socket.socketpair()
        calls = socket.socketpair()
        program = {
            "code": code,
            "entry_point": entry_point,
            "folder": folder,
            "limits": self.limits.for_completion(),
            "megabytes": self.limits.megabytes,
            "uid": self._uid,
            "namespaces": self._servers["candidate"].facts["namespaces"],
        }
        exam = {
            "setup": setup,
            "test": test,
            "entry_point": entry_point,
            "limits": self.limits.for_test(),
            "secret": secret,
        }
        with ours, theirs, calls[0], calls[1]:
            program_fds, exam_fds = [calls[0].fileno()], [calls[1].fileno(), theirs.fileno()]
            lost = self._tell("candidate", lambda server: server.start(program, fds=program_fds))
            lost += self._tell("checker", lambda server: server.start(exam, fds=exam_fds))
            # With these ends closed, the death of one side is seen by the other.
            for end in (theirs, *calls):
                end.close()
            report = None if lost else _read_verdict(ours, deadline, secret)
        for stop in (ServerProcess.request_stop, ServerProcess.await_stop):
            lost += self._tell("candidate", stop) + self._tell("checker", stop)
        if "checker" in lost:
            raise SandboxError("the process that runs the test was lost")
        if lost:
            return Verdict(False, "the completion brought its sandbox down")
        if report is None:
            return Verdict(False, f"no verdict within {self.limits.seconds} s")
        if report["unsendable"]:
            raise SandboxError(f"the test passes what cannot be sent: {report['unsendable']}")
        return Verdict(report["passed"], report["why"])

    def _tell(self, name: str, action: Callable[[ServerProcess], None]) -> list[str]:
        """Calls a server; one that is lost is dropped, and named in the list returned."""
        try:
            if name in self._servers:
                action(self._servers[name])
        except ServerLost:
            del self._servers[name]
            return [name]
        return []


def _read_verdict(sock: socket.socket, deadline: float, secret: str) -> dict[str, Any] | None:
    """The checker's report, or None if it never came."""
    try:
        report = receive(sock, limit=_MAX_VERDICT, deadline=deadline)
    except (TimeoutError, PeerGone):
        return None
    return report if hmac.compare_digest(report["secret"], secret) else None
