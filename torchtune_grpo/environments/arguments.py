"""A call's arguments, in the types of its tool's JSON schema: models often write 7 as a text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any


def typed_argument(value: Any, schema: Any) -> Any:
    """Read a text as the first type of its schema that it can be, as TRL 1.16 does; or keep it."""
    for kind in _kinds(schema) if isinstance(value, str) else ():
        with suppress(ValueError, RecursionError):
            return _read(value, kind)
    return value


def _kinds(schema: Any) -> Iterator[str]:
    """List the types that a schema allows."""
    if isinstance(schema, Mapping):
        kinds = schema.get("type", ())
        yield from [kinds] if isinstance(kinds, str) else kinds
        for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from _kinds(choice)
        if schema.get("nullable"):
            yield "null"


def _read(text: str, kind: str) -> Any:
    """Return the value of this type that a text states; raises a ValueError if it states none."""
    word = text.strip()
    match kind:
        case "integer" | "number":
            with suppress(ValueError):
                return int(word)
            number = float(word)
            if number.is_integer() and (kind == "integer" or "." not in word):
                return int(number)
            if kind == "number" and math.isfinite(number):
                return number
        case "boolean" if word.lower() in ("true", "1", "false", "0"):
            return word.lower() in ("true", "1")
        case "null" if word in ("null", "None"):
            return None
        case "object" | "array":
            value = json.loads(word)
            if isinstance(value, dict if kind == "object" else list):
                return value
    raise ValueError(f"not of type {kind}")
