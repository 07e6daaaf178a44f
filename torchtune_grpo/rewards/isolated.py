"""A reward in worker processes, where an endless loop or a crash costs one completion."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torchtune_grpo.sandbox import PeerGone, ServerLost, ServerProcess, receive, send, send_bytes
from torchtune_grpo.sandbox.contract import ContractError, Score

# Importing torch on a busy machine can take long; it is not the reward's time.
_LOAD_SECONDS = 120.0
_NOT_PER_COMPLETION = ("trainer_state", "log_extra", "log_metric")


class WorkerLost(RuntimeError):
    """A worker process ended before it answered."""


class IsolatedReward:
    """Calls a reward in ``workers`` processes, one completion at a time.

    After ``timeout`` seconds the worker is killed with all processes that it started, and replaced;
    the completion has failed. This needs no signals, so it works in any thread. Workers see neither
    GPUs nor the rank of this process.

    Args:
        path (str): the component's dotpath; workers import it themselves.
        arguments (Mapping[str, Any]): keyword arguments of a function, or of a class's constructor.
        makes (bool): whether the component is called with them to get the reward, as a class is.
        name (str): for errors.
        timeout (float): seconds for one completion.
        workers (int): processes.
    """

    def __init__(
        self,
        path: str,
        *,
        arguments: Mapping[str, Any],
        makes: bool = False,
        name: str,
        timeout: float,
        workers: int,
    ) -> None:
        request = {
            "path": path,
            "arguments": dict(arguments),
            "makes": makes,
            "name": name,
            "import_path": list(sys.path),
            "folder": os.getcwd(),
        }
        self._timeout = timeout
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(request) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._thread_names = f"reward {name}"

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Score]:
        """Scores N completions; a failure is an exception in the list.

        Raises:
            ContractError: if the reward breaks the interface, or cannot be loaded in a worker.
        """
        given = {name: columns.pop(name) for name in _NOT_PER_COMPLETION if name in columns}
        log_extra, log_metric = given.pop("log_extra", None), given.pop("log_metric", None)
        given["notes"] = log_extra is not None
        columns |= {"prompts": prompts, "completions": completions}
        requests = [
            {name: [values[row]] for name, values in columns.items()} | given
            for row in range(len(completions))
        ]
        try:
            answers = self._ask_all(requests)
        except KeyboardInterrupt:  # what idle workers have was cut off, too
            self.close()
            raise
        if log_extra is not None and log_metric is not None:
            noted = {name for answer in answers for name in answer.get("extra", ())}
            for name in sorted(noted):
                log_extra(name, [answer.get("extra", {}).get(name) for answer in answers])
            for answer in answers:
                for name, value in answer.get("metrics", ()):
                    log_metric(name, value)
        return [_score(answer) for answer in answers]

    def check_rows(self, **columns: list[Any]) -> dict[int, str | None]:
        """What the reward's own ``check_rows`` says, in a worker, however long it takes."""
        answer = self._ask({"check_rows": columns}, timeout=None)
        if "value" not in answer:
            raise RuntimeError(next(iter(answer.values())))
        return dict(answer["value"])

    def close(self) -> None:
        """Ends all workers; the next call starts new ones."""
        for worker in self._workers:
            worker.close()

    def _ask_all(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(self._workers), self._thread_names) as threads:
            try:
                return list(threads.map(partial(self._ask, timeout=self._timeout), requests))
            except KeyboardInterrupt:  # the threads are waited for
                for worker in self._workers:
                    worker.give_up()
                raise

    def _ask(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(request, timeout)
        finally:
            self._idle.put(worker)


def _score(answer: dict[str, Any]) -> Score:
    if "contract" in answer:
        raise ContractError(answer["contract"])
    if "lost" in answer:
        return WorkerLost(answer["lost"])
    return RuntimeError(answer["error"]) if "error" in answer else answer["value"]


class _Worker:
    """One process that serves a reward; it is started when it is first needed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._server: ServerProcess | None = None
        self._socket: socket.socket | None = None

    def ask(self, request: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        """Returns the worker's answer, or what became of it."""
        try:
            sock = self._socket or self._load()
            sock.settimeout(timeout)
            send_bytes(sock, pickle.dumps(request))
            return dict(receive(sock))
        except TimeoutError:
            self._kill()
            return {"error": f"no answer within {timeout} s; its processes were killed"}
        except PeerGone as error:
            self._kill()
            return {"lost": f"its process ended ({error})"}
        except ServerLost as error:
            self.close()
            return {"lost": str(error)}

    def give_up(self) -> None:
        """Ends a call of :meth:`ask` in another thread, as if the process had ended."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the process and whatever it started."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.close()
        self._server = self._socket = None

    def _load(self) -> socket.socket:
        self._server = self._server or ServerProcess("reward")
        ours, theirs = socket.socketpair()
        with theirs:
            self._server.start(theirs)
        try:
            ours.settimeout(_LOAD_SECONDS)
            send(ours, self._request)
            answer = receive(ours)
        except (TimeoutError, PeerGone) as error:
            answer = {"error": f"its process ended while loading ({error!r})"}
        if "error" in answer:
            ours.close()
            self.close()
            raise ContractError(
                f"The reward {self._request['name']!r} cannot be loaded in a process of its own: "
                f"{answer['error']}"
            )
        self._socket = ours
        return ours

    def _kill(self) -> None:
        assert self._socket is not None and self._server is not None
        self._socket.close()
        self._socket = None
        try:
            self._server.stop()
        except ServerLost:  # it was closed; the next completion gets a new one
            self._server = None
