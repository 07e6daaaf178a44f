"""Python values as plain data, so that two processes need not trust each other to exchange them.

Only exact builtin types are rebuilt. An object with an ``__eq__`` of its own never gets across; a
subclass (a Counter, a namedtuple, an IntEnum) arrives as the builtin type that it derives from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 50
MAX_CALL_DEPTH = 2 * MAX_DEPTH  # of arguments, which may hold answers
_PLAIN_INT = 2**53  # json writes larger ones too, but parsing long decimals takes quadratic time


class NotPlain(Exception):
    """A value that cannot cross."""


class TooDeep(NotPlain):
    """A value that is nested too deep to cross."""


def dump(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Value -> what ``json`` can write.

    Raises:
        NotPlain: for anything but None, bool, numbers, text, bytes, and lists, tuples, sets,
            frozensets and dicts of such, nested at most ``MAX_DEPTH`` deep.
    """
    if value is None or value is True or value is False:
        return value
    if depth == 0:
        raise TooDeep("nested too deep")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__pos__(value)
        return number if abs(number) < _PLAIN_INT else ["int", f"{number:x}"]
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(value).hex()]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, *(dump(item, depth - 1) for item in value)]
    if isinstance(value, dict):
        items = value.items()
        return ["dict", *([dump(k, depth - 1), dump(v, depth - 1)] for k, v in items)]
    raise NotPlain(f"a {type(value).__name__} is no plain data")


def load(data: Any, depth: int = MAX_DEPTH) -> Any:
    """The inverse of :func:`dump`, for data from anyone.

    Raises:
        NotPlain: if ``dump`` did not write it.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is not list or not data or type(data[0]) is not str or depth == 0:
        raise NotPlain("malformed")
    kind, *items = data
    if kind not in _BUILDERS:
        raise NotPlain(f"malformed: {kind[:20]!r}")
    try:
        return _BUILDERS[kind](items, depth - 1)
    except (TypeError, ValueError, OverflowError) as error:
        raise NotPlain(f"malformed: {error}") from error


def _values(items: list[Any], depth: int) -> list[Any]:
    return [load(item, depth) for item in items]


def _integer(items: list[Any], depth: int) -> int:
    (digits,) = items
    return int(digits, 16)


def _complex(items: list[Any], depth: int) -> complex:
    real, imag = items
    return complex(float(real), float(imag))


def _dict(items: list[Any], depth: int) -> dict[Any, Any]:
    return {load(key, depth): load(value, depth) for key, value in items}


_BUILDERS: dict[str, Callable[[list[Any], int], Any]] = {
    "int": _integer,
    "complex": _complex,
    "bytes": lambda items, depth: bytes.fromhex("".join(items)),
    "bytearray": lambda items, depth: bytearray.fromhex("".join(items)),
    "list": _values,
    "tuple": lambda items, depth: tuple(_values(items, depth)),
    "set": lambda items, depth: set(_values(items, depth)),
    "frozenset": lambda items, depth: frozenset(_values(items, depth)),
    "dict": _dict,
}
