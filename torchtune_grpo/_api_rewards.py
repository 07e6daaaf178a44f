"""Python objects as names in a config, and what `tune run` needs of those that it cannot import.

What another process can import is named as it is. Of a reward from a notebook or from the script
itself, this process finds the object, and `tune run` a copy of its source, under the same name.
"""

from __future__ import annotations
import __future__

import builtins
import dis
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torchtune_grpo.errors import Problems
from torchtune_grpo.plain import describe, shortened

_MODULE = "grpo_reward_"  # and the reward's number
_EXAMPLE = "give a list of functions, (function, weight) pairs, dotpaths or nodes of a config"


def dotpath(thing: Any) -> str | None:
    """The shortest name under which any process can import a class or function, if there is one."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if module in (None, "__main__") or name is None or "<" in name:
        return None
    parts = str(module).split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        found: Any = sys.modules.get(package)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is thing:
            return f"{package}.{name}"
    return None


@dataclass(frozen=True)
class GivenReward:
    """A reward that only this process knows, the ``number``-th of its run."""

    number: int
    thing: Any

    @property
    def module(self) -> str:
        """The name of its module, here and in the run's folder."""
        return f"{_MODULE}{self.number}"

    @property
    def name(self) -> str:
        """In that module and in metrics."""
        name = getattr(self.thing, "__name__", type(self.thing).__name__)
        return name if name.isidentifier() else "reward"

    def register(self) -> None:
        """Lets this process find the object by its dotpath."""
        module = ModuleType(self.module)
        setattr(module, self.name, self.thing)
        sys.modules[self.module] = module

    def write(self, folder: Path) -> str | None:
        """Writes its source as a module of the folder; returns why not, if it cannot be."""
        try:
            text = _module_text(self.thing)
        except ValueError as error:
            return f"rewards[{self.number}] ({self.name}) {error}"
        (folder / f"{self.module}.py").write_text(text, encoding="utf-8")
        return None


def delete_written(folder: Path) -> None:
    """Deletes what :meth:`GivenReward.write` has written for an earlier run."""
    for path in folder.glob(f"{_MODULE}*.py"):
        path.unlink()


def reward_nodes(
    rewards: Any, problems: Problems
) -> tuple[list[dict[str, Any]], list[GivenReward]]:
    """What a user gives as ``rewards`` -> nodes of a config, and those that only we can import."""
    nodes, given = [], []
    if not isinstance(rewards, (list, tuple)) or not rewards:
        problems.append(f"rewards={shortened(repr(rewards))}: is no such list; {_EXAMPLE}.")
        return [], []
    for number, item in enumerate(rewards):
        with problems.noted():
            node = _node(item, f"rewards[{number}]")
            thing = node["_component_"]
            if not isinstance(thing, str):
                path = dotpath(thing)
                if path is None:
                    own = GivenReward(number, thing)
                    given.append(own)
                    path = f"{own.module}.{own.name}"
                    if node.get("isolation") == "process":
                        raise ValueError(
                            f"rewards[{number}].isolation=process: the processes cannot import "
                            f"{own.name}; move it into a module, and import it from there."
                        )
                node["_component_"] = path
            nodes.append(node)
    return nodes, given


def _node(item: Any, key: str) -> dict[str, Any]:
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return _node(item[0], key) | {"weight": item[1]}
    if isinstance(item, Mapping) and (
        isinstance(item.get("_component_"), str) or callable(item.get("_component_"))
    ):
        return dict(item)
    if isinstance(item, partial) and not item.args:
        return _node(item.func, key) | item.keywords
    if not (isinstance(item, str) or callable(item)):
        raise ValueError(f"{key}={shortened(repr(item))}: is no reward; {_EXAMPLE}.")
    return {"_component_": item}


def _module_text(thing: Any) -> str:
    """The source of a function, below the imports that it needs.

    Raises:
        ValueError: what it needs besides.
    """
    if not inspect.isfunction(thing):
        raise ValueError("is no function")
    if thing.__closure__ or vars(thing):
        raise ValueError("has variables around it, or attributes")
    future = __future__.annotations.compiler_flag & thing.__code__.co_flags
    try:
        source = textwrap.dedent(inspect.getsource(thing))
        code = compile(source, "<reward>", "exec", flags=future, dont_inherit=True)
    except (OSError, SyntaxError) as error:
        raise ValueError(f"has no source that can be read ({describe(error)})") from error
    if thing.__name__ not in code.co_names:  # a lambda
        raise ValueError("has no name")
    imports = ["from __future__ import annotations"] if future else []
    for name in sorted({*_names_read(code)} - {thing.__name__}):
        if name in thing.__globals__:
            imports.append(_import_of(name, thing.__globals__[name]))
        elif not hasattr(builtins, name):
            raise ValueError(f"uses {name}, which is not defined")
    about = '"""Written by torchtune_grpo.GRPO, for `tune run`; a copy of a reward."""'
    return "\n".join([about, "", *imports, "", "", source])


def _import_of(name: str, value: Any) -> str:
    if isinstance(value, ModuleType) and value.__name__ != "__main__":
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    path = dotpath(value)
    if path is None or value.__qualname__ != value.__name__:
        raise ValueError(f"uses {name}")
    package, _, own = path.rpartition(".")
    return f"from {package} import {own}" + (f" as {name}" if name != own else "")


def _names_read(code: CodeType) -> Iterator[str]:
    """Names that a piece of code, and what is defined in it, looks up outside of itself."""
    done = list(dis.get_instructions(code))
    stored = {step.argval for step in done if step.opname == "STORE_NAME"}
    for step in done:
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in stored:
            if step.argval not in ("__name__", "__module__", "__qualname__"):
                yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_read(inner)
