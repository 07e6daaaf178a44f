"""From the config's list ``rewards`` to rewards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from omegaconf import OmegaConf
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_grpo.config.files import extend_import_path
from torchtune_grpo.rewards.isolated import IsolatedReward
from torchtune_grpo.rewards.reward import (
    Reward,
    RewardFunction,
    keyword_parameters,
    nearest,
    takes_any_keyword,
)

_OWN_KEYS = ("_component_", "name", "weight", "format", "isolation")
_FORMATS = ("text", "chat")
# Keys of `isolation: process`; without it they are the component's own arguments.
_ISOLATION_KEYS = {"timeout": 10.0, "workers": 2}


def rewards_from_config(cfg: Sequence[Mapping[str, Any]] | None) -> list[Reward]:
    """Builds the rewards that a config's key ``rewards`` lists; there is at least one.

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
    path = node["_component_"]
    component = _component(path, f"{key}._component_")
    isolated = _isolation(node, key)
    own = (*_OWN_KEYS, *isolated)
    arguments = {str(name): value for name, value in node.items() if name not in own}
    _check_arguments(component, arguments, key, own)
    is_class, is_factory = inspect.isclass(component), _is_factory(component)
    makes = is_class or is_factory
    if makes:
        _check_constructor(component, arguments, key)
    declared: RewardFunction = component(**arguments) if is_factory else component
    name = node.get("name", getattr(declared, "__name__", type(declared).__name__))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{key}.name is {name!r}; give a text that is not blank, or no name.")
    text_or_chat = node.get("format", "text")
    if text_or_chat not in _FORMATS:
        raise ValueError(f"{key}.format is {text_or_chat!r}; give one of {', '.join(_FORMATS)}.")
    if arguments and not makes:
        declared = partial(component, **arguments)
    function: RewardFunction
    if isolated:
        function = IsolatedReward(path, arguments=arguments, makes=makes, name=name, **isolated)
    else:
        function = component(**arguments) if is_class else declared
    return Reward(
        name,
        function,
        node.get("weight", 1.0),  # check_reward judges it, as for rewards from no config
        chat=text_or_chat == "chat",
        declaration=declared if isolated else None,
    )


def _isolation(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The settings of a reward's own processes; none if it has none."""
    isolation = node.get("isolation")
    if isolation is None:
        return {}
    if isolation != "process":
        raise ValueError(f"{key}.isolation is {isolation!r}; give process, or null for none.")
    settings = {name: node.get(name, default) for name, default in _ISOLATION_KEYS.items()}
    timeout, workers = settings["timeout"], settings["workers"]
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (number and 0 < timeout < float("inf")):
        raise ValueError(f"{key}.timeout is {timeout!r}; give a number of seconds above 0.")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"{key}.workers is {workers!r}; give a number of processes, 1 or more.")
    return settings


def _component(path: str, key: str) -> Callable[..., Any]:
    extend_import_path()
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        raise ValueError(f"{key} is {path!r}, which cannot be loaded: {error}") from error
    if not callable(component):
        raise ValueError(f"{key} is {path!r}, which is {component!r}; give a function or a class.")
    return cast(Callable[..., Any], component)


def _is_factory(component: Callable[..., Any]) -> bool:
    """Whether a function makes a reward and is none: no reward lacks ``**columns``."""
    if inspect.isclass(component) or takes_any_keyword(component):
        return False
    given = {"prompts", "completions", "completion_ids"}
    return given.isdisjoint(inspect.signature(component).parameters)


def _check_arguments(
    component: Callable[..., Any], arguments: dict[str, Any], key: str, own: tuple[str, ...]
) -> None:
    """Refuses a misspelt key, which a reward's ``**columns`` would swallow."""
    try:
        known = list(keyword_parameters(component))
        open_ended = inspect.isclass(component) and takes_any_keyword(component)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}._component_: its signature cannot be read: {error}") from error
    for name, value in arguments.items():
        if name not in known and not open_ended:
            names = [*known, *own[1:]]
            if name in _ISOLATION_KEYS:
                names.append("isolation: process")  # with which it would be a key
            raise ValueError(
                f"{key}.{name} is {value!r}, but {component!r} has no such argument"
                f"{nearest(name, names)}; valid here: {names}"
            )


def _check_constructor(component: Callable[..., Any], arguments: dict[str, Any], key: str) -> None:
    try:
        inspect.signature(component).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{key} gives {component!r} the arguments {arguments}: {error}; add or remove keys."
        ) from error
