"""A reward in worker processes, where an endless loop or a crash costs one completion."""

from __future__ import annotations

import inspect
import os
import pickle
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torchtune_grpo.reward_contract import ContractError, Score
from torchtune_grpo.sandbox._process import ServerLost, ServerProcess
from torchtune_grpo.sandbox._wire import PeerGone, receive, send_bytes

# Importing torch on a busy machine can take long; it is not the reward's time.
_LOAD_SECONDS = 120.0


class IsolatedReward:
    """Calls a reward in ``workers`` processes, one completion at a time.

    After ``timeout`` seconds the worker is killed with all processes that it started, and replaced;
    the completion has failed. This needs no signals, so it works in any thread. Workers see neither
    GPUs nor the rank of this process.

    Args:
        path (str): the component's dotpath; workers import it themselves.
        component (Callable[..., Any]): what it stands for here, for its signature.
        arguments (Mapping[str, Any]): keyword arguments of a function, or of a class's constructor.
        name (str): for errors.
        timeout (float): seconds for one completion.
        workers (int): processes.
    """

    def __init__(
        self,
        path: str,
        *,
        component: Callable[..., Any],
        arguments: Mapping[str, Any],
        name: str,
        timeout: float,
        workers: int,
    ) -> None:
        call = component.__call__ if inspect.isclass(component) else component
        parameters = list(inspect.signature(call).parameters.values())
        if inspect.isclass(component):
            parameters = parameters[1:]  # self
            bound: frozenset[str] = frozenset()
        else:
            bound = frozenset(arguments)
        # So that columns are checked against the component's own parameters.
        self.__signature__ = inspect.Signature([p for p in parameters if p.name not in bound])
        self.bound = bound
        for attribute in ("decides", "reward_range", "reward_gap"):
            if hasattr(component, attribute):
                setattr(self, attribute, getattr(component, attribute))
        self._request = {
            "path": path,
            "arguments": dict(arguments),
            "name": name,
            "import_path": list(sys.path),
            "folder": os.getcwd(),
        }
        self._timeout = timeout
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(self._request) for _ in range(workers)]
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
        log_extra = columns.pop("log_extra", None)
        log_metric = columns.pop("log_metric", None)
        state = {name: columns.pop(name) for name in ("trainer_state",) if name in columns}
        columns |= {"prompts": prompts, "completions": completions}
        requests = [
            {name: [values[row]] for name, values in columns.items()}
            | state
            | {"notes": log_extra is not None}
            for row in range(len(completions))
        ]
        with ThreadPoolExecutor(len(self._workers), self._thread_names) as threads:
            answers = list(threads.map(self._ask, requests))
        if log_extra is not None and log_metric is not None:
            noted = {name for answer in answers for name in answer.get("extra", ())}
            for name in sorted(noted):
                log_extra(name, [answer.get("extra", {}).get(name) for answer in answers])
            for answer in answers:
                for name, value in answer.get("metrics", ()):
                    log_metric(name, value)
        return [self._score(answer) for answer in answers]

    def close(self) -> None:
        """Ends all workers; the next call starts new ones."""
        for worker in self._workers:
            worker.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(request, self._timeout)
        finally:
            self._idle.put(worker)

    def _score(self, answer: dict[str, Any]) -> Score:
        if "contract" in answer:
            raise ContractError(answer["contract"])
        if "error" in answer:
            return RuntimeError(answer["error"])
        return answer["value"]


class _Worker:
    """One process that serves a reward; it is started when it is first needed."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._server: ServerProcess | None = None
        self._socket: socket.socket | None = None

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Returns the worker's answer, or what became of it."""
        try:
            sock = self._socket or self._load()
            send_bytes(sock, pickle.dumps(request))
            return dict(receive(sock, deadline=time.monotonic() + timeout))
        except TimeoutError:
            self._kill()
            return {"error": f"no answer within {timeout} s; its processes were killed"}
        except PeerGone as error:
            self._kill()
            return {"error": f"its process ended ({error})"}
        except ServerLost as error:
            self.close()
            return {"error": str(error)}

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
            self._server.start(self._request, fds=[theirs.fileno()])
        try:
            answer = receive(ours, deadline=time.monotonic() + _LOAD_SECONDS)
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
            self._server.request_stop()
            self._server.await_stop()
        except ServerLost:  # it was closed; the next completion gets a new one
            self._server = None
