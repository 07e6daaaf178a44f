"""Components of a config: what they take, and how one is constructed."""

from __future__ import annotations

import difflib
import inspect
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.errors import ConfigError


def instantiate(name: str, node: DictConfig | None, *args: Any, **kwargs: Any) -> Any:
    """Constructs the component of the config's key ``name``, as torchtune's ``instantiate`` does.

    Raises:
        ValueError: with the component's own message behind the key, whatever it raised.
    """
    try:
        return config.instantiate(node, *args, **kwargs)
    except Exception as error:
        assert node is not None
        if isinstance(error, ValidationError):
            raise ConfigError(
                f"{name}.{e['loc'][0]}={e['input']!r}: {e['msg'].removeprefix('Input ')}."
                for e in error.errors()
            ) from error
        if isinstance(error, ValueError) and node._component_.startswith("torchtune_grpo."):
            joint = "." if re.match(r"\w+[:=]", str(error)) else ": "
            raise ValueError(f"{name}{joint}{error}") from error
        given = {key: value for key, value in node.items() if key != "_component_"}
        raise ValueError(
            f"{name}: could not construct {node._component_} with {given}: {error}"
        ) from error


def parameters(dotpath: Any) -> dict[str, inspect.Parameter] | None:
    """A component's parameters; None if it cannot be found or does not say."""
    try:
        component = _get_component_from_path(dotpath)
        try:
            return dict(inspect.signature(component, eval_str=True).parameters)
        except NameError:  # an annotation that is imported for type checkers alone
            return dict(inspect.signature(component).parameters)
    except Exception:  # whatever importing a user's module raises
        return None


def check_component(name: str, node: DictConfig) -> None:
    """Raises a ConfigError if a component cannot be imported or does not take an argument.

    Whether it takes the values is up to the component, but for their annotated types.
    """
    dotpath = node._component_
    try:
        component = _get_component_from_path(dotpath)
    except Exception as error:
        raise ConfigError([f"{name}._component_={dotpath}: cannot be imported: {error}"]) from error
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
        elif argument != "_component_" and not is_open:
            near = difflib.get_close_matches(argument, accepted, n=1)
            problems.append(
                f"{name}.{argument}={value}: {dotpath} has no argument {argument!r}."
                + (f" Did you mean {name}.{near[0]}?" if near else "")
                + f" It takes {', '.join(accepted) or 'none'}."
            )
    if problems:
        raise ConfigError(problems)


def _misfit(key: str, value: Any, parameter: inspect.Parameter) -> list[str]:
    """Whether a value is of a parameter's annotated type, as far as YAML has such values."""
    hint = parameter.annotation
    if isinstance(value, str) and value == "???":
        return [f"{key}: missing; give {key}=<value>."]
    if hint is parameter.empty or isinstance(hint, str) or value is parameter.default:
        return []
    try:
        config = ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True)
        TypeAdapter(hint, config=config).validate_python(value, strict=not isinstance(value, list))
    except ValidationError as error:
        return [f"{key}={value!r}: {error.errors()[0]['msg'].removeprefix('Input ')}."]
    except Exception:  # an annotation that pydantic does not know
        return []
    return []
