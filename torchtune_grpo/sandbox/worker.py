"""Main program of a worker process: load a function, and call it once for each request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
import random
import runpy
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any

from torchtune_grpo.sandbox.wire import PeerGone, receive, receive_bytes, send, send_bytes


def run_worker(requests: socket.socket) -> None:
    """Load the function that the first message names; call it per request until the socket closes.

    Requests are pickles of a seed and keyword arguments, as the owner is trusted; answers are JSON.
    All calls of an async function share an event loop, for connections that outlive a call.
    """
    # A child of the function that outlives it must not hold the socket open.
    requests.set_inheritable(False)
    request = receive(requests)
    os.chdir(request["folder"])
    sys.path[:] = request["import_path"]
    try:
        function = partial(_named(request["path"]), **request["arguments"])
        if request["makes"]:
            function = function()
    except BaseException:
        send(requests, {"error": traceback.format_exc(limit=-3)})
        return
    send(requests, {"ready": True})
    loop = asyncio.new_event_loop()
    with contextlib.suppress(PeerGone):
        while True:
            seed, arguments = pickle.loads(receive_bytes(requests))
            if seed is not None:
                _seed_generators(seed)
            send_bytes(requests, _answer(function, arguments, loop).encode())


def _seed_generators(seed: int) -> None:
    """Seed Python's generator, and those of numpy and torch if the function has imported them."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def _named(path: str) -> Callable[..., Any]:
    """Load ``module.name``, or ``file.py:name`` without the package that the file is in."""
    file, _, name = path.rpartition(":")
    if file:
        return runpy.run_path(file)[name]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _answer(function: Any, arguments: dict[str, Any], loop: asyncio.AbstractEventLoop) -> str:
    extra: dict[str, Any] = {}
    metrics: list[Any] = []
    if "trainer_state" in arguments:  # a run's rewards may report more than they return
        arguments["log_extra"] = lambda column, values: extra.update({str(column): list(values)})
        arguments["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
    try:
        returned = function(**arguments)
        if inspect.iscoroutine(returned):
            returned = _awaited(returned, loop)
        for value in returned if isinstance(returned, (list, tuple)) else ():
            if isinstance(value, BaseException):
                raise value
        answer = {"returned": returned, "extra": extra, "metrics": metrics}
        return json.dumps(answer, default=_plain)
    except BaseException:
        return json.dumps({"error": traceback.format_exc(limit=-3)})


def _awaited(awaitable: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Wait for what an awaitable returns; a task of it that raises SystemExit ends only itself."""

    async def outcome() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:
            return None, error

    task = loop.create_task(outcome())
    while not task.done():
        with contextlib.suppress(BaseException):
            loop.run_until_complete(task)
    value, error = task.result()
    if error is not None:
        raise error
    return value


def _plain(value: Any) -> Any:
    """Convert what JSON cannot hold, if need be to text."""
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return list(value)
    return float(value) if isinstance(value, Real) else str(value)
