"""Main program of a worker process: load a function, and call it once for each request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
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

    Requests are pickles of keyword arguments, as the owner is trusted; answers are JSON.
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
    with contextlib.suppress(PeerGone):
        while True:
            arguments = pickle.loads(receive_bytes(requests))
            send_bytes(requests, _answer(function, arguments).encode())


def _named(path: str) -> Callable[..., Any]:
    """Load ``module.name``, or ``file.py:name`` without the package that the file is in."""
    file, _, name = path.rpartition(":")
    if file:
        return runpy.run_path(file)[name]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _answer(function: Any, arguments: dict[str, Any]) -> str:
    extra: dict[str, Any] = {}
    metrics: list[Any] = []
    if "trainer_state" in arguments:  # a run's rewards may report more than they return
        arguments["log_extra"] = lambda column, values: extra.update({str(column): list(values)})
        arguments["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
    try:
        returned = function(**arguments)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        for value in returned if isinstance(returned, (list, tuple)) else ():
            if isinstance(value, BaseException):
                raise value
        answer = {"returned": returned, "extra": extra, "metrics": metrics}
        return json.dumps(answer, default=_plain)
    except BaseException:
        return json.dumps({"error": traceback.format_exc(limit=-3)})


def _plain(value: Any) -> Any:
    """Convert what JSON cannot hold, if need be to text."""
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return list(value)
    return float(value) if isinstance(value, Real) else str(value)
