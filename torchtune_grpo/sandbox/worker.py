"""A user's function in a process of its own, which ``torchtune_grpo.rewards.workers`` calls."""

from __future__ import annotations

import importlib
import os
import random
import runpy
import site
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

_LIBRARIES = (os.path.dirname(os.__file__), *site.getsitepackages())
_NOT_USERS = (os.path.dirname(os.path.dirname(__file__)), *_LIBRARIES, "<")
Wait = Callable[[Any], Any]  # returns what an awaitable gives, and any other value as it is


class Function:
    """A function, and what its calls report beside their result.

    If ``path`` ``makes`` the function, as a class does, ``arguments`` are for making it, else for
    each call.
    """

    def __init__(self, path: str, arguments: Mapping[str, object], makes: bool, wait: Wait) -> None:
        with _telling():
            function: Any = partial(_named(path), **arguments)
            self._function, self._wait = function() if makes else function, wait

    def call(self, seed: int | None, arguments: dict[str, object]) -> object:
        """Return what it has ``returned``, and what it has logged, as plain data."""
        if seed is not None:
            seed_generators(seed)
        extra: dict[str, list[object]] = {}
        metrics: list[tuple[str, float]] = []
        if "trainer_state" in arguments:  # a run's rewards may report more than they return
            arguments["log_extra"] = lambda column, values: extra.update({column: [*values]})
            arguments["log_metric"] = lambda name, value: metrics.append((name, float(value)))
        with _telling():
            returned = self._wait(self._function(**arguments))
            for value in returned if isinstance(returned, (list, tuple)) else ():
                if isinstance(value, BaseException):
                    raise value
        return _plain({"returned": returned, "extra": extra, "metrics": metrics})


@contextmanager
def _telling() -> Iterator[None]:
    """Raise what the user's code raises as text: a line with its place, then its traceback."""
    try:
        yield
    except BaseException as error:
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        frames = traceback.extract_tb(error.__traceback__)
        users = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)] or frames
        place = f"{os.path.basename(users[-1].filename)}:{users[-1].lineno}"
        raise RuntimeError(f"{what} ({place})\n{traceback.format_exc(limit=-3)}") from None


def _named(path: str) -> Callable[..., Any]:
    """Load ``module.name``, or ``file.py:name`` without the package that the file is in."""
    file, _, name = path.rpartition(":")
    if file:
        return runpy.run_path(file)[name]
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, as far as they are imported."""
    random.seed(seed)
    if hasattr(sys.modules.get("numpy"), "random"):
        sys.modules["numpy"].random.seed(seed % 2**32)
    if hasattr(sys.modules.get("torch"), "default_generator"):
        sys.modules["torch"].default_generator.manual_seed(seed)  # that of the CPU alone


def _plain(value: object) -> object:
    """Convert a value to what crosses between processes, if need be to text."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*map(_plain, value)]
    if hasattr(value, "tolist"):  # tensors, arrays and their numbers
        return value.tolist()
    return float(value) if isinstance(value, (Real, Decimal)) else str(value)
