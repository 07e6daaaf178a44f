"""From YAML to a checked config, and from a component's node to the component."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torchtune import config, utils
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config import aliases
from torchtune_grpo.config.command_line import extend_import_path
from torchtune_grpo.config.keys import GRPOConfig, without_effect
from torchtune_grpo.config.schema import parameters, read, sentence
from torchtune_grpo.config.text import ConfigError, Problems, map_values


def instantiate(name: str, node: DictConfig | None, *args: Any, **kwargs: Any) -> Any:
    """Construct the component of the config's key ``name``, as torchtune's ``instantiate`` does.

    Whatever it raises becomes a ValueError: the key, followed by the component's own message.
    """
    try:
        return config.instantiate(node, *args, **kwargs)
    except Exception as error:
        assert node is not None
        if isinstance(error, ValidationError):
            raise ConfigError(
                sentence(".".join([name, *map(str, each["loc"])]), each["input"], each)
                if each["loc"]
                else each["msg"].removeprefix("Value error, ")  # about several arguments
                for each in error.errors()
            ) from error
        if isinstance(error, ValueError) and node._component_.startswith("torchtune_grpo."):
            joint = "." if re.match(r"\w+[:=]", str(error)) else ": "
            raise ValueError(f"{name}{joint}{error}") from error
        given = {key: value for key, value in node.items() if key != "_component_"}
        raise ValueError(
            f"{name}: could not construct {node._component_} with {given}: {error}"
        ) from error


def check_component(name: str, node: DictConfig) -> None:
    """Raise a ConfigError if a component cannot be imported or does not take an argument.

    Values are only checked against annotated types; the rest is up to the component.
    """
    dotpath = node._component_
    try:
        component = _get_component_from_path(dotpath)
    except Exception as error:
        hint = " A model's folder is model_dir." if name == "model" else ""
        problem = f"{name}._component_={dotpath}: cannot be imported: {error}{hint}"
        raise ConfigError([problem]) from error
    if not callable(component):
        raise ConfigError([f"{name}._component_={dotpath}: not a class or function."])
    accepted = parameters(dotpath)
    if accepted is None:
        return
    is_open = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    found: Any = OmegaConf.to_container(node)
    problems = []
    for argument, value in found.items():
        if argument in accepted and accepted[argument].kind is not inspect.Parameter.VAR_KEYWORD:
            problems += _misfit(f"{name}.{argument}", value, accepted[argument])
        elif argument != "_component_":
            near = difflib.get_close_matches(argument, accepted, cutoff=0.85 if is_open else 0.6)
            hint = f"Did you mean {name}.{near[0]}?" if near else ""
            foreign = aliases.meaning(f"{name}.{argument}", ends=True)
            if foreign and (not near or f"mean {name}." in foreign):
                hint = foreign
            if is_open and f"mean {name}." not in hint:
                continue
            problems.append(
                f"{name}.{argument}={value}: {dotpath} has no argument {argument!r}."
                + (f" {hint}" if hint else "")
                + f" It takes {', '.join(accepted) or 'none'}."
            )
    if problems:
        raise ConfigError(problems)


def _misfit(key: str, value: Any, parameter: inspect.Parameter) -> list[str]:
    """List what is wrong with a value by its parameter's annotation, as far as YAML can say it."""
    hint = parameter.annotation
    if isinstance(value, str) and value == "???":
        return [f"{key}: missing; give {key}=<value>."]
    if hint is parameter.empty or isinstance(hint, str) or value is parameter.default:
        return []
    try:
        config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
        TypeAdapter(hint, config=config).validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return [sentence(key, value, error.errors()[0])]
    except Exception:  # an annotation that pydantic does not know
        return []
    return []


log = utils.get_logger("INFO")
T = TypeVar("T", bound=GRPOConfig)


def read_config(cfg: DictConfig, table: type[T] = GRPOConfig) -> T:  # type: ignore[assignment]
    """Read and check a config; raises a ConfigError with all mistakes.

    ``~/`` becomes the user's home, in ``cfg`` too. Settings without effect are logged. ``table``
    is a subclass if a recipe has keys of its own.
    """
    extend_import_path()
    cfg.merge_with(map_values(_with_home, OmegaConf.to_container(cfg)))
    values = _plain(cfg)
    problems, settings = Problems(), None
    with problems.noted():
        settings = read(table, values)
    for name, node in (values if settings is None else dict(settings)).items():
        if isinstance(node, (dict, DictConfig)) and isinstance(node.get("_component_"), str):
            with problems.noted():
                check_component(name, DictConfig(node))
    problems.raise_any()
    assert settings is not None
    if os.environ.get("RANK", "0") == "0":
        for sentence in without_effect(settings):
            log.warning(f"No effect: {sentence}")
    return settings


def _with_home(key: str, value: Any) -> Any:
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_path else value


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the config's values with every ``${...}`` resolved, without those still ``???``."""
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True)
    except InterpolationToMissingValueError:
        missing = [key for key in cfg if OmegaConf.is_missing(cfg, key)]
        raise ConfigError(
            f"{key}: missing from the config; give {key}=<value>." for key in missing
        ) from None
    except OmegaConfBaseException as error:
        key = (error.full_key or "the config").replace("[", ".").replace("]", "")
        why = str(error.msg).splitlines()[0]
        raise ConfigError([f"{key}: {why}; correct the ${{...}}."]) from error
    return {key: value for key, value in values.items() if value != "???"}
