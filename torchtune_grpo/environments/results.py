"""What environments return, in the forms that libraries have, as text. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_PARTS = ("text", "image", "image_url", "audio", "video")  # values of "type"


def step_result(value: Any) -> tuple[Any, float, bool]:
    """Read observation, reward and whether the conversation is over from what ``step`` returned.

    That is a tuple of three, gymnasium's of five, an object or a mapping (SkyRL-Gym's).
    """
    if isinstance(value, (tuple, list)) and len(value) in (3, 5):
        observation, reward, *ends = value
        return observation_of(observation), float(reward or 0.0), any(ends[: len(value) - 3 or 1])
    if isinstance(value, Mapping) and "done" in value:
        seen = value.get("observation", value.get("observations"))
        return observation_of(seen), float(value.get("reward") or 0.0), bool(value["done"])
    if hasattr(value, "observation") and hasattr(value, "done"):
        reward = getattr(value, "reward", None)
        return observation_of(value.observation), float(reward or 0.0), bool(value.done)
    raise TypeError(
        f"step returned {type(value).__name__}; return (observation, reward, done), gymnasium's "
        "five, or an object or a mapping with these names"
    )


def call(
    tools: Mapping[str, Callable[..., Any]],
    environment: Any,
    name: str,
    arguments: Mapping[str, Any],
    *,
    wait: Callable[[Any], Any],
) -> Any:
    """Call a tool or else a method; ``wait`` returns what an awaitable gives."""
    if name in tools:
        return wait(tools[name](**arguments))
    method = getattr(environment, name)
    if name == "reset":
        return observation_of(wait(method(**known_columns(method, arguments))))
    if name == "step":  # its parameter has another name in each library
        return step_result(wait(method(*arguments.values())))
    return wait(method(**arguments))


def known_columns(reset: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that ``reset`` takes: gymnasium's takes hardly any."""
    known = inspect.signature(reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return {name: value for name, value in row.items() if takes_all or name in known}


def observation_of(value: Any) -> Any:
    """Return the observation that ``reset`` or ``step`` gave: None, a text or a list of parts."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value = value[0]  # gymnasium's info
    if hasattr(value, "observation"):
        value = value.observation
    if value is None or isinstance(value, list):
        return value
    return str(value)


def text_of(value: Any) -> str:
    """Return a result as text that any tokenizer takes; raises a ValueError for pictures.

    That is how Python writes it, as in TRL, except for a list of parts as chat templates know them.
    """
    if isinstance(value, list) and value and all(map(_is_part, value)):
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a part of it is not text, and only text models are trained")
        value = "".join(map(str, texts))
    return str(value).encode(errors="replace").decode()


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _PARTS
