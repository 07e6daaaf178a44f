"""What environments take and return, in the forms that libraries have. Imports nothing heavy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_PARTS = ("text", "image", "image_url", "audio", "video")  # values of "type"


def step_result(value: object) -> tuple[object, float, bool]:
    """Read observation, reward and whether the conversation is over from what ``step`` returned.

    That is a tuple of three, gym's of four, gymnasium's of five, an object or a mapping
    (SkyRL-Gym's).
    """
    if isinstance(value, (tuple, list)) and len(value) in (3, 4, 5):
        observation, reward, *ends = value
        is_done = any(ends[: 2 if len(value) == 5 else 1])
        return observation_of(observation), float(reward or 0.0), is_done
    if isinstance(value, Mapping) and "done" in value:
        seen = value.get("observation", value.get("observations"))
        return observation_of(seen), float(value.get("reward") or 0.0), bool(value["done"])
    if hasattr(value, "observation") and hasattr(value, "done"):
        reward = getattr(value, "reward", None)
        return observation_of(value.observation), float(reward or 0.0), bool(value.done)
    what = f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
    raise TypeError(
        f"step returned {what}; return (observation, reward, done), gymnasium's five, or an object "
        "or a mapping with these names"
    )


def reset_arguments(
    reset: Callable[..., object], row: Mapping[str, object], seed: int
) -> dict[str, object]:
    """Return the columns of a row that ``reset`` takes, and the seed if it names one."""
    known = inspect.signature(reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in known.values())
    seeds = {"seed": seed} if "seed" in known else {}
    return seeds | {name: value for name, value in row.items() if takes_all or name in known}


def observation_of(value: object) -> object:
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
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(each, Mapping) and each.get("type") in _PARTS for each in value):
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a part of it is not text, and only text models are trained")
        value = "".join(map(str, texts))
    return str(value).encode(errors="replace").decode()
