"""Runs a user's reward in a process of its own, one completion at a time."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pickle
import socket
import sys
import traceback
from functools import partial
from typing import Any

from torchtune_grpo.config.text import plain
from torchtune_grpo.sandbox.contract import ContractError, RewardNotes, check_returned
from torchtune_grpo.sandbox.wire import PeerGone, receive, receive_bytes, send

# The descriptor of the owner's requests; those below are the usual three.
_REQUESTS = 3


def run_rewards(requests: socket.socket) -> None:
    """Loads a reward and calls it for each request, until the socket closes.

    Args:
        requests (socket.socket): there comes ``path``, ``arguments``, ``makes``, ``name``,
            ``import_path`` and ``folder``; then pickles, because a data set's columns may hold
            anything and their sender is this process's owner. Answers are plain data.
    """
    os.dup2(requests.detach(), _REQUESTS)
    os.closerange(_REQUESTS + 1, 65536)
    requests = socket.socket(fileno=_REQUESTS)
    # Not for the reward's children: one that outlives it must not hold the socket open.
    os.set_inheritable(_REQUESTS, False)
    request = receive(requests)
    os.chdir(request["folder"])
    sys.path[:] = request["import_path"]
    try:
        module, _, name = request["path"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        function = partial(function, **request["arguments"])
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
        send(requests, _answer(function, pickle.loads(data), name=request["name"]))


def _answer(function: Any, arguments: dict[str, Any], *, name: str) -> dict[str, Any]:
    notes = RewardNotes(1)
    try:
        if "check_rows" in arguments:
            return {"value": [*function.check_rows(**arguments["check_rows"]).items()]}
        if arguments.pop("notes"):
            arguments |= notes.functions()
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait(returned))
        (score,) = check_returned(returned, name=name, count=1)
        if isinstance(score, BaseException):
            raise score
    except ContractError as error:
        return {"contract": str(error)}
    except BaseException:
        return {"error": traceback.format_exc(limit=-3)}
    extra = {column: plain(values[0]) for column, values in notes.extra.items()}
    return {"value": score, "extra": extra, "metrics": notes.metrics}


async def _wait(awaitable: Any) -> Any:
    return await awaitable
