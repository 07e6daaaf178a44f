"""What a worker process runs: it loads a function and calls it once for each request."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import logging
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from numbers import Real
from typing import Any

from torchtune_grpo.sandbox.kernel import set_limits
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
        module, _, name = request["path"].rpartition(".")
        function = partial(getattr(importlib.import_module(module), name), **request["arguments"])
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


def expression_comparer() -> Callable[[str, str], bool | None]:
    """Make a function by which math-verify says whether two bare LaTeX expressions are equal. It
    returns None if the second one, the gold, cannot be read.

    For a tower of powers, sympy takes unlimited time and memory; the caller limits the time.
    """
    from math_verify import parse, verify

    set_limits({"AS": 4 * 2**30})
    # Each time, it warns that its own timeout is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def equal(given: str, gold: str) -> bool | None:
        expected = parse(f"${gold}$", parsing_timeout=None)
        if not expected:
            return None
        found = parse(f"${given}$", parsing_timeout=None)
        return bool(found and verify(expected, found, timeout_seconds=None))

    return equal


def task_scorer() -> Callable[[str, dict[str, Any]], float]:
    """Make a function that scores an answer to an entry of ``reasoning_gym_dataset``."""
    from reasoning_gym import create_dataset

    made = cache(lambda task, settings: create_dataset(task, **json.loads(settings)))
    return lambda answer, entry: made(entry["task"], entry["settings"]).score_answer(answer, entry)
