"""From the config's list ``rewards`` to rewards."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from omegaconf import OmegaConf
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.rewards._reward import (
    Reward,
    RewardFunction,
    keyword_parameters,
    nearest,
    takes_any_keyword,
)

_OWN_KEYS = ("_component_", "name", "weight")


def rewards_from_config(cfg: Sequence[Mapping[str, Any]] | None) -> list[Reward]:
    """Builds the rewards that a config lists.

    Args:
        cfg (Sequence[Mapping[str, Any]] | None): the value of the key ``rewards``, as plain lists
            and dicts or as OmegaConf nodes.

    Returns:
        One reward per node, in order; there is at least one.

    Raises:
        ValueError: naming the key, the value given and the remedy.
    """
    plain = _plain(cfg)
    if not isinstance(plain, (list, tuple)) or not plain:
        raise ValueError(
            f"rewards is {plain!r}; give a list with at least one reward, such as "
            "- _component_: torchtune_grpo.rewards.math_correctness_reward"
        )
    return [_reward(_plain(node), f"rewards[{index}]") for index, node in enumerate(plain)]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def _reward(node: Any, key: str) -> Reward:
    if not isinstance(node, Mapping) or not isinstance(node.get("_component_"), str):
        raise ValueError(
            f"{key}._component_ is missing or no text in {node!r}; give the dotpath of a reward, "
            "such as torchtune_grpo.rewards.math_correctness_reward"
        )
    component = _component(node["_component_"], f"{key}._component_")
    arguments = {str(name): value for name, value in node.items() if name not in _OWN_KEYS}
    _check_arguments(component, arguments, key)
    name = node.get("name", getattr(component, "__name__", type(component).__name__))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{key}.name is {name!r}; give a text that is not blank, or no name.")
    # check_reward judges the weight, also that of rewards which come from no config.
    return Reward(name, _bind(component, arguments, key), node.get("weight", 1.0))


def _component(path: str, key: str) -> Callable[..., Any]:
    # As in torchtune.config.instantiate: a reward may lie beside the user's recipe.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        raise ValueError(f"{key} is {path!r}, which cannot be loaded: {error}") from error
    if not callable(component):
        raise ValueError(f"{key} is {path!r}, which is {component!r}; give a function or a class.")
    return cast(Callable[..., Any], component)


def _check_arguments(component: Callable[..., Any], arguments: dict[str, Any], key: str) -> None:
    """Refuses a misspelt key, which a reward's ``**columns`` would swallow."""
    try:
        known = list(keyword_parameters(component))
        open_ended = inspect.isclass(component) and takes_any_keyword(component)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}._component_: its signature cannot be read: {error}") from error
    for name, value in arguments.items():
        if name not in known and not open_ended:
            names = [*known, *_OWN_KEYS[1:]]
            raise ValueError(
                f"{key}.{name} is {value!r}, but {component!r} has no such argument"
                f"{nearest(name, names)}; valid here: {names}"
            )


def _bind(component: Callable[..., Any], arguments: dict[str, Any], key: str) -> RewardFunction:
    if not inspect.isclass(component):
        return partial(component, **arguments) if arguments else component
    try:
        inspect.signature(component).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{key} gives {component!r} the arguments {arguments}: {error}; add or remove keys."
        ) from error
    return cast(RewardFunction, component(**arguments))
