"""A pool of worker processes, for rewards that may hang or crash or that run foreign code.

    pool = WorkerPool([FunctionWorker("my_module.function", timeout=5.0) for _ in range(2)])
    results = pool.map(lambda worker, task: worker(**task), tasks)

A worker starts its process when it is first needed, keeps its own time limit and replaces a lost
process. Its ``close()`` ends the process; its ``kill()`` immediately fails a task that another
thread is waiting for.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from torchtune_grpo.sandbox.server import ServerLost, ServerProcess
from torchtune_grpo.sandbox.syscalls import used_by
from torchtune_grpo.sandbox.wire import PeerGone, receive, send, send_bytes

# Importing torch on a busy machine can take long, and does not count as the function's time.
_LOAD_SECONDS = 120.0
_PATIENCE = 30  # time limits that a call may last on a busy machine
MAX_WORKERS = 256  # more processes than that are a mistake

W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")


class ContractError(ValueError):
    """A bug in a reward: it cannot be loaded, or it returned something other than scores."""


class WorkerLost(RuntimeError):
    """A worker process ended before it answered."""


class WorkerStarved(WorkerLost):
    """A worker process hardly got to run."""


class WorkerPool(Generic[W]):
    """Workers that take tasks from one queue, each in a thread."""

    def __init__(self, workers: Sequence[W]) -> None:
        self._workers: Sequence[Any] = workers

    def map(self, ask: Callable[[W, T], R], tasks: Sequence[T]) -> list[R]:
        """Return ``ask(worker, task)`` for each task, in order.

        The first exception is raised and drops the tasks still waiting. Ctrl-C ends all workers.
        """
        waiting, errors = deque(enumerate(tasks)), deque[BaseException]()
        results: list[Any] = [None] * len(tasks)

        def work(worker: W) -> None:
            with contextlib.suppress(IndexError):  # no task is left
                while True:
                    index, task = waiting.popleft()
                    try:
                        results[index] = ask(worker, task)
                    except BaseException as error:
                        waiting.clear()
                        errors.append(error)

        busy = self._workers[: len(tasks)]
        threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in busy]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            waiting.clear()
            for worker, thread in zip(busy, threads, strict=True):
                while thread.is_alive():  # it may just be starting its process
                    worker.kill()
                    thread.join(0.1)
            self.close()
            raise
        for error in errors:
            raise error
        return results

    def close(self) -> None:
        """End all workers; the next task starts new ones."""
        for worker in self._workers:
            worker.close()


def function_pool(
    make: Callable[[], Any], *, timeout: float, workers: int
) -> WorkerPool[FunctionWorker]:
    """Make a pool for the function that ``make`` returns; a worker loads only the file it is in."""
    if timeout <= 0 or not 1 <= workers <= MAX_WORKERS:
        raise ValueError(
            f"timeout is {timeout} and workers {workers}; give a timeout above 0 and "
            f"1 to {MAX_WORKERS} workers"
        )
    path = f"{inspect.getfile(make)}:{make.__name__}"
    return WorkerPool([FunctionWorker(path, makes=True, timeout=timeout) for _ in range(workers)])


class FunctionWorker:
    """Worker that calls a function in a process of its own, with a time limit per call.

    After ``timeout`` seconds, apart from waits for a CPU, the process is killed with all that it
    started. It sees neither GPUs nor this process's rank, and loads ``path``: ``module.name`` or
    ``file.py:name``. If ``path`` ``makes`` the function, as a class does, ``arguments`` are for
    making it, else for each call.
    """

    def __init__(
        self,
        path: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        makes: bool = False,
        timeout: float,
    ) -> None:
        self._function = {"path": path, "arguments": dict(arguments or {}), "makes": makes}
        self._timeout = timeout
        self._server: ServerProcess | None = None
        self._socket: socket.socket | None = None

    def __call__(self, seed: int | None = None, /, **arguments: Any) -> Any:
        """Return what the function returns, as plain data; its exceptions become RuntimeErrors.

        The process's random generators are seeded first, if there is a seed.
        """
        log_extra, log_metric = arguments.pop("log_extra", None), arguments.pop("log_metric", None)
        if "trainer_state" in arguments:  # importing its class would import torch
            arguments["trainer_state"] = SimpleNamespace(**vars(arguments["trainer_state"]))
        request = pickle.dumps((seed, arguments))
        try:
            sock = self._socket or self._load()
            sock.settimeout(self._timeout)
            send_bytes(sock, request)
            self._wait_for_answer(sock)
            answer = receive(sock)
        except TimeoutError:
            self.close()
            text = f"no answer within {self._timeout} s; its processes were killed"
            raise TimeoutError(text) from None
        except (PeerGone, ServerLost) as error:
            self.close()
            raise WorkerLost(f"its process ended ({error})") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        if log_extra is not None and log_metric is not None:
            for column, values in answer["extra"].items():
                log_extra(column, values)
            for name, value in answer["metrics"]:
                log_metric(name, value)
        return answer["returned"]

    def _wait_for_answer(self, sock: socket.socket) -> None:
        """Wait until an answer begins to arrive, or raise TimeoutError or WorkerStarved."""
        assert self._server is not None
        start, before, left = time.monotonic(), used_by(self._server.pid), self._timeout
        while left > 0:
            sock.settimeout(left)
            with contextlib.suppress(TimeoutError):
                sock.recv(1, socket.MSG_PEEK)
                return
            passed, now = time.monotonic() - start, used_by(self._server.pid)
            if passed > _PATIENCE * self._timeout:
                self.close()
                raise WorkerStarved(f"no answer in {passed:.0f} s: the machine is too busy")
            ran, waited = now[0] - before[0], now[1] - before[1]
            left = self._timeout - max(ran, passed - waited)
        raise TimeoutError

    def kill(self) -> None:
        """Immediately fail a call that another thread is waiting for."""
        if (server := self._server) is not None:
            server.kill()

    def close(self) -> None:
        """End the process and all that it started; the next call starts a new one."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.close()
        self._server = self._socket = None

    def _load(self) -> socket.socket:
        self._server = ServerProcess("function")
        self._socket = self._server.start()
        try:
            self._socket.settimeout(_LOAD_SECONDS)
            folders = {"import_path": sys.path, "folder": os.getcwd()}
            send(self._socket, {**self._function, **folders})
            answer = receive(self._socket)
        except (TimeoutError, PeerGone) as error:
            answer = {"error": f"its process ended while loading ({error!r})"}
        if "error" in answer:
            self.close()
            raise ContractError(
                f"{self._function['path']} cannot be loaded in a process of its own: "
                f"{answer['error']}"
            )
        return self._socket
