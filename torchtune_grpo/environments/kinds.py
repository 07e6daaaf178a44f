"""What the config's ``environment`` and ``tools`` name: the kinds of environments of a run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import dill  # type: ignore[import-untyped]
from omegaconf import DictConfig
from transformers.utils.chat_template_utils import get_json_schema

from torchtune_grpo.config.check import arguments_of, check_component, load_component
from torchtune_grpo.config.command_line import extend_import_path
from torchtune_grpo.config.keys import EnvironmentConfig
from torchtune_grpo.config.text import ConfigError, describe, shortened, suggest
from torchtune_grpo.environments.adapters import (
    Adapter,
    InlineAdapter,
    Recipe,
    StepAdapter,
    ToolAdapter,
)
from torchtune_grpo.environments.sessions import Kind
from torchtune_grpo.machine import loop

_NOT_TOOLS = ("reset", "get_reward", "close")


def kind_fault(kinds: Mapping[str | None, Kind], columns: Mapping[str, Any]) -> str | None:
    """Return why a row of the data names no kind of environment, if it does not."""
    name = columns.get("environment")
    if None in kinds or (isinstance(name, str) and name in kinds):
        return None
    names = ", ".join(map(str, kinds))
    return f"column 'environment' is {shortened(repr(name))}, and has to name one of {names}"


def make_kinds(
    settings: EnvironmentConfig,
    tools: Sequence[str],
    objects: Mapping[str, Any] | None = None,
) -> dict[str | None, Kind]:
    """Make the kinds of environments that a config names; without any, the tools' alone, if any.

    ``objects`` are classes and functions that no config can name, by their key. Raises a
    ConfigError if one lacks what an environment or a tool needs, or cannot be pickled.
    """
    objects = objects or {}
    extend_import_path()
    functions: dict[str, str | bytes] = {}
    schemas = []
    for number, path in enumerate(tools):
        key, given = f"tools[{number}]", objects.get(f"tools.{number}")
        function = given or load_component(key, path)
        schemas.append(_schema(key, function))
        if (name := function.__name__) in functions:
            raise ConfigError(f"{key}={path}: another tool is called {name}, too; rename one.")
        functions[name] = path if given is None else _pickled(key, given)
    kinds: dict[str | None, Kind] = {}
    for name, node in settings.components.items():
        key = "environment" if name is None else f"environment.{name}"
        kinds[name] = _kind(key, node, objects.get(key), functions, schemas, settings)
    if not kinds and functions:
        recipe = Recipe(ToolAdapter, None, {}, functions)
        kinds[None] = Kind("tools", recipe, schemas, settings.timeout)
    return kinds


def _pickled(key: str, given: object) -> bytes:
    """Pickle a class or function of a script or a notebook, with what it uses from there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", dill.PicklingWarning)
            return dill.dumps(given, recurse=True)
    except Exception as error:
        raise ConfigError(
            f"{key}: what it uses cannot be handed to another process ({describe(error)}); write "
            "it to a file, and import it from there."
        ) from error


def _kind(
    key: str,
    node: Any,
    given: Any,
    functions: Mapping[str, str | bytes],
    schemas: Sequence[Mapping[str, Any]],
    settings: EnvironmentConfig,
) -> Kind:
    """Look at one environment's class, or at an object if a function makes it."""
    if not isinstance(node, Mapping) or not isinstance(node.get("_component_"), str):
        meant = suggest(key, (f"environment.{own}" for own in EnvironmentConfig.model_fields))
        raise ConfigError(
            f"{key}={shortened(repr(node))}: unknown key of environment.{meant} An environment is "
            "a mapping with _component_, the dotpath of a class or function."
        )
    path, of, arguments = node["_component_"], given, arguments_of(node)
    if given is None:
        beside = EnvironmentConfig.model_fields if key == "environment" else ()
        check_component(key, DictConfig(dict(node)), beside=beside)
        of = load_component(key, path)
    component = path if given is None else _pickled(key, given)
    if not inspect.isclass(of):
        of = _class_made(key, path, Recipe(Adapter, component, arguments, {}))
    if not callable(getattr(of, "reset", None)):
        raise ConfigError(f"{key}._component_={path}: has no method reset(**row); add one.")
    methods = _tool_methods(of)
    takes_text = callable(getattr(of, "step", None)) and "step" not in methods
    if takes_text and functions:
        raise ConfigError(f"tools: {path} has step(text), which gets turns as text; remove one.")
    if not (takes_text or methods or functions):
        raise ConfigError(f"{key}._component_={path}: has neither step(text) nor a public method.")
    if twice := [name for name in methods if name in functions]:
        raise ConfigError(
            f"tools: a function and a method of {path} are both called {twice[0]}; rename one."
        )
    adapter: type[Adapter] = ToolAdapter
    if takes_text:
        adapter = InlineAdapter if settings.form == "inline" else StepAdapter
    bound = {name: inspect.getattr_static(of, name).__get__(object()) for name in methods}
    own = [_schema(f"{key}._component_={path}.{name}", each) for name, each in bound.items()]
    return Kind(
        of.__name__,
        Recipe(adapter, component, arguments, functions, methods),
        [*schemas, *own],
        settings.timeout,
        has_reward=callable(getattr(of, "get_reward", None)),
    )


def _class_made(key: str, path: str, recipe: Recipe) -> Any:
    """Return the class of what a function makes."""
    try:
        adapter = recipe.make(0, lambda made: loop.run(made) if inspect.isawaitable(made) else made)
    except Exception as error:
        raise ConfigError(f"{key}: could not construct {path}: {error}") from error
    with suppress(Exception):  # some cannot be closed before a reset
        adapter.close()
    return type(adapter.environment)


def _tool_methods(of: type) -> list[str]:
    """Return the methods that are tools; none if ``step`` takes the policy's text.

    TRL's environments may have a tool of that name, which returns text.
    """
    found = inspect.getmembers(of, inspect.isfunction)
    methods = [name for name, _ in found if not name.startswith("_") and name not in _NOT_TOOLS]
    step = getattr(of, "step", None)
    if callable(step) and inspect.signature(step).return_annotation not in (str, "str"):
        return []
    return methods


def _schema(key: str, function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the JSON schema of a tool, from its type hints and its Google docstring."""
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{key}: a tool needs type hints, and a docstring that describes it and each argument "
            f"(Args:): {describe(error)}"
        ) from error
