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
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from torchtune_grpo.sandbox.remote import ObjectError, ObjectLost, ObjectServer, RemoteObject
from torchtune_grpo.sandbox.worker import Function

MAX_WORKERS = 256  # more processes than that are a mistake

W = TypeVar("W")
T = TypeVar("T")
R = TypeVar("R")


class ContractError(ValueError):
    """A bug in a reward: it cannot be loaded, or it returned something other than scores."""


class WorkerLost(RuntimeError):
    """A worker process ended before it answered."""


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
    make: Callable[[], object], *, timeout: float, workers: int
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
        arguments: Mapping[str, object] | None = None,
        *,
        makes: bool = False,
        timeout: float,
    ) -> None:
        self._path, self._server = path, ObjectServer()
        made_of = (path, dict(arguments or {}), makes)
        self._new = partial(RemoteObject, self._server, Function, *made_of, timeout=timeout)
        self._remote: RemoteObject | None = None

    def __call__(self, seed: int | None = None, /, **arguments: Any) -> Any:
        """Return what the function returns, as plain data; its exceptions become RuntimeErrors.

        The process's random generators are seeded first, if there is a seed. A reward may take its
        time for each of the completions that it gets.
        """
        log_extra, log_metric = arguments.pop("log_extra", None), arguments.pop("log_metric", None)
        if "trainer_state" in arguments:  # importing its class would import torch
            arguments["trainer_state"] = SimpleNamespace(**vars(arguments["trainer_state"]))
        times = max(1, len(arguments.get("completions", ())))
        try:
            answer = self._loaded().call("call", seed, arguments, times=times)
        except ObjectError as error:
            summary, _, trace = str(error).partition("\n")
            raise RuntimeError(summary) from RuntimeError(trace)
        except ObjectLost as error:
            self.close()
            raise (TimeoutError if error.is_late else WorkerLost)(str(error)) from None
        if log_extra is not None and log_metric is not None:
            for column, values in answer["extra"].items():
                log_extra(column, values)
            for name, value in answer["metrics"]:
                log_metric(name, value)
        return answer["returned"]

    def _loaded(self) -> RemoteObject:
        if self._remote is None:
            self._remote = self._new()
            try:
                self._remote.start()
            except (ObjectError, ObjectLost) as error:
                self.close()
                raise ContractError(
                    f"{self._path} cannot be loaded in a process of its own: {error}"
                ) from None
        return self._remote

    def kill(self) -> None:
        """Immediately fail a call that another thread is waiting for."""
        if (remote := self._remote) is not None:
            remote.kill()

    def close(self) -> None:
        """End the process and all that it started; the next call starts a new one."""
        self.kill()
        self._server.close()
        self._remote = None
