"""An environment and tools in a process of their own, for ``isolation: process``."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torchtune_grpo.environments.results import call


class Hosted:
    """Calls the methods of one environment, and tools; a worker process holds it."""

    def __init__(
        self, environment: str | None, arguments: Mapping[str, Any], tools: Mapping[str, str]
    ) -> None:
        self._tools = {name: _load(path) for name, path in tools.items()}
        self._environment = None if environment is None else _load(environment)(**arguments)
        self._loop = asyncio.new_event_loop()  # one, for connections that outlive a call

    def __call__(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``value`` that a method or tool returned, or the ``error`` that it raised."""
        try:
            value = call(self._tools, self._environment, name, arguments, wait=self._wait)
            return {"value": value}
        except Exception as error:
            return {"error": str(error)}

    def _wait(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
