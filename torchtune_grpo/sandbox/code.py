"""The owner's side of one sandbox, which runs a completion and its test in two processes."""

from __future__ import annotations

import math
import os
import select
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtune_grpo.sandbox.exam import Exam, Kind, Verdict
from torchtune_grpo.sandbox.server import ServerLost, ServerProcess
from torchtune_grpo.sandbox.syscalls import used_by
from torchtune_grpo.sandbox.wire import PeerGone, receive, send

_MEGABYTE = 2**20
_MAX_VERDICT = 2**16  # bytes
_LARGEST_FILE, _OPEN_FILES = 16 * _MEGABYTE, 64  # limits of a completion
# Seconds between two looks at the time and memory used; a look takes a millisecond or more.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
_PATIENCE = 5  # multiple of the time limit that may pass while others keep the CPUs busy


class SandboxError(RuntimeError):
    """The sandbox or the test failed, not the completion."""

    says_all = True  # no traceback is shown


@dataclass(frozen=True)
class Limits:
    """A completion's limits. Time in which others keep the CPUs busy does not count."""

    seconds: float = 5.0  # for its processes and its test, running or asleep
    megabytes: int = 512  # for memory, and for files; also each process's address space
    processes: int = 16  # at once, threads included

    def for_completion(self) -> dict[str, int]:
        return {
            "CPU": math.ceil(self.seconds) + 1,
            "AS": self.megabytes * _MEGABYTE,
            "NPROC": self.processes,
            "FSIZE": _LARGEST_FILE,
            "NOFILE": _OPEN_FILES,
            "SIGPENDING": 64,
            "CORE": 0,
        }

    def for_test(self) -> dict[str, int]:
        return {
            "CPU": math.ceil(self.seconds) + 1,
            "AS": 2 * self.megabytes * _MEGABYTE,
            "FSIZE": 0,
            "CORE": 0,
        }


@dataclass
class CodeSandbox:
    """Sandbox that judges one completion at a time, and starts its process when first needed."""

    limits: Limits = field(default_factory=Limits)
    packages: Sequence[str] = ()  # folders of packages that completions can import
    namespaces: bool = True  # False: do without them, as where the kernel refuses them
    # Go on where the kernel cannot filter system calls, or offers neither namespaces nor Landlock.
    unfenced: bool = False
    _server: ServerProcess | None = None
    _refusal: str = "they are turned off"  # why there are no namespaces
    _worked: bool = False  # has worked once: a later failure is no reason to go without namespaces

    def judge(self, code: str, exam: Exam) -> Verdict:
        """Run a test on a completion.

        Afterwards no process and no file of the completion is left. A SandboxError means that the
        completion is not to blame.
        """
        server = self._start()
        program = {
            "code": code,
            "entry_point": exam.entry_point,
            "takes_input": bool(exam.cases),
            "limits": self.limits.for_completion(),
            "megabytes": self.limits.megabytes,
            "folder": "",
        }
        task = {"program": program, "exam": exam._asdict(), "limits": self.limits.for_test()}
        try:
            if self.namespaces:
                return self._run(server, task)
            # It can only hold plain files, so that it is quick to delete.
            with tempfile.TemporaryDirectory(
                prefix="torchtune_grpo_code_", ignore_cleanup_errors=True
            ) as folder:
                program["folder"] = folder
                verdict = self._run(server, task, folder)
                if not verdict.passed and os.path.isdir(folder):  # or a lost server has removed it
                    _check_disk(folder)
                return verdict
        except OSError as error:  # a full disk, say
            raise SandboxError(f"this machine refuses what a sandbox needs: {error}") from error

    def confinement(self) -> str:
        """Describe what a completion can and cannot reach."""
        facts = self._start().facts
        loose = "" if facts["filter"] else " SYSTEM CALLS ARE NOT FILTERED."
        loose += "" if facts["counted"] else " Their NUMBER OF PROCESSES HAS NO LIMIT."
        if self.namespaces:
            return (
                "completions run in namespaces of their own: no network, no process and no file of "
                f"this machine but Python's library, read-only.{loose}"
            )
        files = "" if facts["landlock"] else "READ THIS MACHINE'S FILES, "
        network = "" if facts["filter"] else "USE THE NETWORK, "
        return (
            f"the kernel refuses namespaces here ({self._refusal}). Completions cannot make "
            f"folders, and can {files}{network}FILL THE DISK until their time is up, SEE WHICH "
            "PROCESSES THERE ARE and, by process ids, how many were started, SEE SIZES AND TIMES "
            f"OF FILES that they cannot open.{loose} Allow user namespaces, or run in a container "
            "without network and the tests' files."
        )

    def kill(self) -> None:
        """Immediately end a ``judge`` that another thread is waiting for."""
        if self._server is not None:
            self._server.kill()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _start(self) -> ServerProcess:
        """Start and test the server if there is none, with namespaces if possible."""
        if self._server is not None:
            return self._server
        try:
            role = "code" if self.namespaces else "code_without_namespaces"
            server = self._server = ServerProcess(role, self.packages)
            self._check_fences(server.facts)
            # Otherwise a sandbox that does not work here would look like a model that cannot code.
            verdict = self.judge("def f(x): return x", Exam("f", test="assert f([1]) == [1]"))
            if not verdict.passed:
                raise SandboxError(f"it does not work here: {verdict.why}")
        except (ServerLost, OSError, SandboxError) as error:
            self.close()
            if self._worked or not self.namespaces:
                raise SandboxError(f"the sandbox did not start: {error}") from error
            self.namespaces, self._refusal = False, str(error)
            return self._start()
        self._worked = True
        return server

    def _check_fences(self, facts: dict[str, Any]) -> None:
        """Refuse to start without a filter, or with neither namespaces nor a recent Landlock."""
        if "refusal" in facts:
            raise SandboxError(facts["refusal"])
        # From version 6 on Landlock stops signals to processes of the same user.
        landlock = 1 if facts["users"] else 6
        missing = []
        if not facts["filter"]:
            missing.append("no filter of system calls (seccomp)")
        if not self.namespaces and facts["landlock"] < landlock:
            missing.append(f"no namespaces ({self._refusal}) and no Landlock of version {landlock}")
        if not facts["counted"]:
            missing.append("no limit on processes of root (be another user, or have CAP_SETUID)")
        if missing and not self.unfenced:
            raise SandboxError(
                f"the kernel offers {' and '.join(missing)}. Code that a model wrote could read or "
                "kill what belongs to you, or use up this machine. Allow user namespaces, or run "
                "everything in a container that may come to harm and set unfenced: true."
            )

    def _run(self, server: ServerProcess, task: dict[str, Any], folder: str = "") -> Verdict:
        try:
            with server.start(folder) as sock:
                try:
                    report = self._await_verdict(sock, server.pid, task)
                finally:
                    server.stop()
        except ServerLost:
            self._server = None
            return Verdict(Kind.CRASH, "the completion brought its sandbox down")
        if "fault" in report:
            raise SandboxError(f"the completion was not even begun: {report['fault']}")
        return Verdict(Kind(report.pop("kind")), **report)

    def _await_verdict(self, sock: socket.socket, server: int, task: dict[str, Any]) -> Any:
        """Return the checker's report, or a failure in its place."""
        limit, start, answered = self.limits.seconds, time.monotonic(), False
        left, at_once = limit, min(os.cpu_count() or 1, self.limits.processes + 1)
        waiter = select.poll()
        waiter.register(sock, select.POLLIN)
        try:
            sock.settimeout(_PATIENCE * limit)
            send(sock, task)
            while not answered:
                answered = bool(waiter.poll(max(min(left, _LONGEST_PAUSE), _PAUSE) * 1000))
                passed = time.monotonic() - start
                if answered and passed * at_once < limit:  # more cannot have been used
                    break
                ran, waited, memory = used_by(server)
                left = limit - max(ran, passed - waited)
                if memory > self.limits.megabytes * _MEGABYTE:
                    why = f"more than {self.limits.megabytes} MB of memory"
                    return {"kind": Kind.CRASH, "why": why}
                if left <= 0 or passed > _PATIENCE * limit:
                    return {"kind": Kind.TIMEOUT, "why": f"no verdict within {limit} s"}
            return receive(sock, limit=_MAX_VERDICT)
        except (PeerGone, TimeoutError):
            why = "the test's process ended without a verdict"
            return {"kind": Kind.CRASH, "why": why}


def _check_disk(folder: str) -> None:
    """Raise SandboxError if the disk would be full even without the folder's files."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _LARGEST_FILE or disk.f_favail < _OPEN_FILES:
        with os.scandir(folder) as files:
            sizes = [file.stat(follow_symlinks=False).st_blocks * 512 for file in files]
        room = disk.f_bavail * disk.f_frsize + sum(sizes)
        if room < _LARGEST_FILE or disk.f_favail + len(sizes) < _OPEN_FILES:
            raise SandboxError(f"the disk is full, of which {folder} is a part")
