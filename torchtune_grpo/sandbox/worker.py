"""Calls a function in a process of its own, once for each request: what a worker process runs."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import Any

from torchtune_grpo.sandbox.wire import PeerGone, receive, receive_bytes, send

# The descriptor of the owner's requests; those below are the usual three.
_REQUESTS = 3
_MAX_DEPTH = 50


def run_worker(requests: socket.socket) -> None:
    """Loads a function and calls it for each request, until the socket closes.

    The first message says which: ``path`` is its dotpath, ``arguments`` are bound to it, or, if it
    ``makes`` the function as a class does, given to it; ``import_path`` and ``folder`` are the
    owner's. Then come pickles of keyword arguments, because they may hold anything and their sender
    is this process's owner. Answers are plain data.
    """
    os.dup2(requests.detach(), _REQUESTS)
    os.closerange(_REQUESTS + 1, 65536)
    requests = socket.socket(fileno=_REQUESTS)
    # Not for the function's children: one that outlives it must not hold the socket open.
    os.set_inheritable(_REQUESTS, False)
    request = receive(requests)
    os.chdir(request["folder"])
    sys.path[:] = request["import_path"]
    try:
        module, _, name = request["path"].rpartition(".")
        function = partial(getattr(importlib.import_module(module), name), **request["arguments"])
        if request["makes"]:
            function = function()
    except BaseException:
        send(requests, {"error": traceback.format_exc(limit=-3)})
        return
    send(requests, {"ready": True})
    while True:
        try:
            data = receive_bytes(requests)
        except PeerGone:
            return
        send(requests, _answer(function, **pickle.loads(data)))


def _answer(function: Any, *, notes: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    metrics: list[Any] = []
    if notes:  # the function may report more than it returns, as TRL's rewards do
        arguments["log_extra"] = lambda column, values: extra.update({str(column): list(values)})
        arguments["log_metric"] = lambda name, value: metrics.append((str(name), float(value)))
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait(returned))
        for value in returned if isinstance(returned, (list, tuple)) else ():
            if isinstance(value, BaseException):
                raise value
        return {"returned": _plain(returned), "extra": _plain(extra), "metrics": metrics}
    except BaseException:
        return {"error": traceback.format_exc(limit=-3)}


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def _plain(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Any value -> what JSON can hold; what it cannot becomes its text."""
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Real):
        return float(value)
    if depth and isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth - 1) for item in value]
    return str(value)
