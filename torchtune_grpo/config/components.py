"""Components of a config: what they take, whether the config gives it, and how one is made."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune import config
from torchtune.config._utils import _get_component_from_path

FLOAT32_MAX = torch.finfo(torch.float32).max


def component_parameters(dotpath: Any) -> dict[str, inspect.Parameter] | None:
    """Parameters of a component; None where it cannot be found or does not say."""
    try:
        component = _get_component_from_path(dotpath)
        try:
            return dict(inspect.signature(component, eval_str=True).parameters)
        except NameError:  # an annotation that is imported for type checkers alone
            return dict(inspect.signature(component).parameters)
    except Exception:  # whatever importing a user's module raises
        return None


def plain_arguments(node: DictConfig) -> dict[str, Any]:
    """A component's arguments as plain Python values."""
    values = OmegaConf.to_container(node).items()
    return {str(arg): value for arg, value in values if arg != "_component_"}


def fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a type; of types that YAML has no values of, all but tensors."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in items)
    if origin is typing.Literal:
        return value in items
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        number = isinstance(value, (int, float) if hint is float else int)
        return number and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    kind = origin or hint
    if kind in (list, tuple, Sequence, Iterable):
        if not isinstance(value, (list, tuple)):
            return False
        if kind is tuple and items and items[-1] is not Ellipsis:
            return len(value) == len(items) and all(map(fits, value, items))
        return all(fits(item, items[0]) for item in value) if items else True
    if kind in (dict, Mapping):
        return isinstance(value, dict) and (
            not items or all(fits(k, items[0]) and fits(v, items[1]) for k, v in value.items())
        )
    return kind is not Tensor


def unusable_number(value: Any, *, finite: bool) -> str | None:
    """What keeps a number, or one in a list or mapping, from being computed with, if anything."""
    if isinstance(value, (list, tuple, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return next(filter(None, (unusable_number(v, finite=finite) for v in inner)), None)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "beyond 64 bits; give a smaller number"
    if not finite or not isinstance(value, float):
        return None
    if not math.isfinite(value):
        return "not a finite number"
    return "beyond float32; give a smaller number" if abs(value) > FLOAT32_MAX else None


def check_arguments(
    arguments: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    *,
    prefix: str = "",
    finite: bool = False,
) -> None:
    """Raises a ValueError where a plain value is of another type than its parameter's.

    Args:
        arguments: name -> value, as read from YAML.
        parameters: of the component; an argument that is not among them is not judged.
        prefix: of the names in errors, such as ``model.``.
        finite: numbers end up in float32 arithmetic, so that they have to be finite there.
    """
    for arg, value in arguments.items():
        wrong = unusable_number(value, finite=finite)
        if wrong is not None or value == "???":  # which is how YAML says that it has to be given
            raise ValueError(f"{prefix}{arg}={value!r}: {wrong or 'missing'}.")
        if arg not in parameters or parameters[arg].kind is inspect.Parameter.VAR_KEYWORD:
            continue
        hint, default = parameters[arg].annotation, parameters[arg].default
        if hint is inspect.Parameter.empty and finite and isinstance(default, float):
            hint = float  # torchao's optimizers have no annotations
        if hint is inspect.Parameter.empty or isinstance(hint, str) or value is default:
            continue
        if value == "" and arg.endswith(("path", "dir", "file", "source", "split")):
            raise ValueError(f"{prefix}{arg}='': it is empty; give a name.")
        if not fits(value, hint):
            wanted = inspect.formatannotation(hint).replace("typing.", "")
            raise ValueError(f"{prefix}{arg}={value!r}: not of type {wanted}; correct it.")


def instantiate(name: str, node: DictConfig | None, *args: Any, **kwargs: Any) -> Any:
    """torchtune's ``config.instantiate`` of the config's key ``name``.

    Raises:
        ValueError: if the component raises anything. One of this package says itself what is wrong;
            of another, the argument without which it could be made is named, if there is one, or
            else all arguments, and the value.
    """
    try:
        return config.instantiate(node, *args, **kwargs)
    except Exception as error:
        assert node is not None
        if isinstance(error, ValueError) and node._component_.startswith("torchtune_grpo."):
            joint = "." if re.match(r"\w+[:=]", str(error)) else ": "
            raise ValueError(f"{name}{joint}{error}") from error
        given = plain_arguments(node)
        rest = {arg: {k: v for k, v in node.items() if k != arg} for arg in given}
        blamed = [a for a in given if _is_made(DictConfig(rest[a]), *args, **kwargs)]
        told = ", ".join(f"{name}.{arg}={given[arg]!r}" for arg in blamed[:1] or given)
        raise ValueError(
            f"{told or name}: {node.get('_component_')} cannot be made so: {error}"
        ) from error


def _is_made(node: DictConfig, *args: Any, **kwargs: Any) -> bool:
    try:
        config.instantiate(node, *args, **kwargs)
    except Exception:
        return False
    return True
