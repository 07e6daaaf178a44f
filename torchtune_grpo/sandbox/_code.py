"""One sandbox: a completion in one process, its test in another, and a verdict that is proven."""

from __future__ import annotations

import hmac
import math
import os
import secrets
import select
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtune_grpo.sandbox._kernel import UIDS, time_used
from torchtune_grpo.sandbox._process import ServerLost, ServerProcess
from torchtune_grpo.sandbox._wire import PeerGone, receive

_MEGABYTE = 2**20
_MAX_VERDICT = 2**16  # bytes
_PATIENCE = 5  # times the limit may pass before one that others keep from running is given up


class SandboxError(RuntimeError):
    """The sandbox or the test failed, not the completion."""


@dataclass(frozen=True)
class Limits:
    """What a completion may use.

    Args:
        seconds (float): of its processes and its test, running or asleep; waiting for a CPU that
            others keep busy does not count. Then all its processes are killed.
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
            "SIGPENDING": 64,
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
    """What a test says of a completion.

    Args:
        passed (bool): whether the completion passed it.
        why (str): why not.
        calls (int): of the function, that the completion answered.
        test_failed (bool): whether the test failed by itself, so that it says nothing.
    """

    passed: bool
    why: str = ""
    calls: int = 0
    test_failed: bool = False


@dataclass
class CodeSandbox:
    """Judges one completion at a time. Starts its two processes when it first needs them.

    Args:
        limits (Limits): what a completion may use.
        namespaces (bool): False does without them, as where the kernel refuses them.
        unfenced (bool): whether to go on where the kernel cannot filter system calls, or can
            neither hide this machine's files and processes from a completion nor keep its
            signals from them.
    """

    limits: Limits = field(default_factory=Limits)
    namespaces: bool = True
    unfenced: bool = False
    _servers: dict[str, ServerProcess] = field(default_factory=dict)  # candidate and checker

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
        facts = self._servers["candidate"].facts
        # A user of its own, so that the limit on processes counts this completion's alone.
        uid = facts["users"] and facts["users"] + secrets.randbelow(UIDS)
        program = {
            "code": code,
            "entry_point": entry_point,
            "folder": "/tmp",
            "limits": self.limits.for_completion(),
            "megabytes": self.limits.megabytes,
            "uid": uid,
            "namespaces": facts["namespaces"],
            "filter": facts["filter"],
        }
        exam = {
            "setup": setup,
            "test": test,
            "entry_point": entry_point,
            "limits": self.limits.for_test(),
            "secret": secrets.token_hex(16),
        }
        if facts["namespaces"]:
            return self._run(program, exam)
        # It can only hold plain files, so that it is quick to delete.
        with tempfile.TemporaryDirectory(
            prefix="torchtune_grpo_code_", ignore_cleanup_errors=True
        ) as folder:
            if uid is not None:
                os.chown(folder, uid, uid)
            return self._run({**program, "folder": folder}, exam)

    def confinement(self) -> str:
        """What fences a completion in, and what does not, in words."""
        self._start()
        facts = self._servers["candidate"].facts
        loose = "" if facts["filter"] else " SYSTEM CALLS ARE NOT FILTERED."
        if os.geteuid() == 0 and not facts["users"]:
            loose += " They run as root without rights, whose NUMBER OF PROCESSES HAS NO LIMIT."
        if facts["namespaces"]:
            return (
                "completions run in namespaces of their own: no network, no process and no file of "
                f"this machine but Python's library.{loose}"
            )
        gaps = {
            "READ THIS MACHINE'S FILES": not facts["landlock"],
            "USE THE NETWORK": not facts["filter"],
            "FILL THE DISK until their time is up": True,
            "LEARN FROM THEIR PROCESS ID how many were started before": True,
        }
        return (
            f"the kernel refuses namespaces here ({facts['refusal']}). Completions cannot make "
            f"folders, and can {', '.join(gap for gap, open in gaps.items() if open)}.{loose} "
            "Allow user namespaces, or run in a container without network and the tests' files."
        )

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
        landlock = 1 if facts["users"] else 6
        missing = []
        if not facts["filter"]:
            missing.append("no filter of system calls (seccomp)")
        if not facts["namespaces"] and facts["landlock"] < landlock:
            missing.append(
                f"no namespaces ({facts['refusal']}) and version {facts['landlock']} of Landlock, "
                f"where {landlock} is needed"
            )
        if missing and not self.unfenced:
            self.close()
            raise SandboxError(
                f"the kernel offers {' and '.join(missing)}. Code that a model wrote could read "
                "and kill what belongs to you. Allow user namespaces, or run everything in a "
                "container that may come to harm and set unfenced: true."
            )

    def _run(self, program: dict[str, Any], exam: dict[str, Any]) -> Verdict:
        ours, theirs = socket.socketpair()
        calls = socket.socketpair()
        with ours, theirs, calls[0], calls[1]:
            program_fds, exam_fds = [calls[0].fileno()], [calls[1].fileno(), theirs.fileno()]
            lost = self._tell("candidate", lambda server: server.start(program, fds=program_fds))
            lost += self._tell("checker", lambda server: server.start(exam, fds=exam_fds))
            # With these ends closed, the death of one side is seen by the other.
            for end in (theirs, *calls):
                end.close()
            report = None if lost else self._await_verdict(ours, exam["secret"])
        for stop in (ServerProcess.request_stop, ServerProcess.await_stop):
            lost += self._tell("candidate", stop) + self._tell("checker", stop)
        if "checker" in lost:
            raise SandboxError("the process that runs the test was lost")
        if lost:
            return Verdict(False, "the completion brought its sandbox down")
        if report is None:
            return Verdict(False, f"no verdict within {self.limits.seconds} s")
        return Verdict(**report)

    def _await_verdict(self, sock: socket.socket, secret: str) -> dict[str, Any] | None:
        """The checker's report, or None if it never came."""
        servers = [self._servers["candidate"].facts["pid"], self._servers["checker"].pid]
        start, left = time.monotonic(), self.limits.seconds
        waiter = select.poll()
        waiter.register(sock, select.POLLIN)
        while not waiter.poll(left * 1000):
            passed = time.monotonic() - start
            ran, waited = time_used(servers)
            left = self.limits.seconds - max(ran, passed - waited)
            if left <= 0 or passed > _PATIENCE * self.limits.seconds:
                return None
        try:
            report = receive(sock, limit=_MAX_VERDICT)
        except PeerGone:
            return None
        return report if hmac.compare_digest(report.pop("secret"), secret) else None

    def _tell(self, name: str, action: Callable[[ServerProcess], None]) -> list[str]:
        """Calls a server; one that is lost is dropped, and named in the list returned."""
        try:
            if name in self._servers:
                action(self._servers[name])
        except ServerLost:
            del self._servers[name]
            return [name]
        return []
