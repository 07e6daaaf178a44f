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
from hashlib import sha256
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torchtune_grpo.config.errors import Problems
from torchtune_grpo.config.text import describe, shortened

_MODULE = "grpo_reward_"
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
    """A reward that no other process can import."""

    key: str  # where it stands in the config
    thing: Any  # what is called
    text: str | None  # a module that has it, too, if one can be written
    why: str = ""  # none can

    @classmethod
    def of(cls, key: str, thing: Any) -> GivenReward:
        """With the text, or why there is none."""
        try:
            return cls(key, thing, _module_text(thing))
        except ValueError as error:
            return cls(key, thing, None, str(error))

    @property
    def module(self) -> str:
        """Its module's name; another text or object has another, whichever run it is of."""
        return _MODULE + sha256((self.text or str(id(self.thing))).encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """In that module and in metrics."""
        name = getattr(self.thing, "__name__", type(self.thing).__name__)
        return str(name) if name.isidentifier() else "reward"

    def register(self) -> None:
        """Lets this process find the object itself by its dotpath."""
        module = ModuleType(self.module)
        setattr(module, self.name, self.thing)
        sys.modules[self.module] = module

    def write(self, folder: Path) -> str | None:
        """Writes its module into the folder; returns what the user has to do if there is none."""
        if self.text is None:
            return (
                f"{self.key} ({self.name}) {self.why}; for `tune run`, move it into a module with "
                "all that it needs"
            )
        (folder / f"{self.module}.py").write_text(self.text, encoding="utf-8")
        return None


def own_folder(path: str, *beside: Path) -> Path | None:
    """The folder of the running script, or of a file, where a dotpath is, but not for `tune`."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    for file in (*([Path(script)] if script else []), *beside):
        folder = file.resolve().parent
        top = folder / path.partition(".")[0]
        is_there = top.with_suffix(".py").is_file() or (top / "__init__.py").is_file()
        if is_there and folder != Path.cwd():
            return folder
    return None


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
            node = _node(item, key := f"rewards[{number}]")
            if not isinstance(node["_component_"], str):
                thing = node["_component_"]
                node["_component_"] = dotpath(thing)
                if node["_component_"] is None:
                    own = GivenReward.of(key, thing)
                    given.append(own)
                    node["_component_"] = f"{own.module}.{own.name}"
                    if own.text is None and node.get("isolation") == "process":
                        raise ValueError(
                            f"{key}.isolation=process: other processes cannot import {own.name}, "
                            f"which {own.why}; move it into a module, and import it from there."
                        )
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
