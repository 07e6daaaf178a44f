"""Python values as plain data, so that two processes need not trust each other to exchange them.

Only exact builtin types are rebuilt. An object with an ``__eq__`` of its own never gets across; a
subclass (a Counter, a namedtuple, an IntEnum) arrives as the builtin type that it derives from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import chain
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
        NotPlain: for anything but None, bool, numbers, text, bytes, dates and times, ranges, and
            lists, tuples, deques, sets, frozensets, dicts and their views of such, nested at most
            ``depth`` deep.
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
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return [kind.__name__, *(dump(part, depth - 1) for part in parts(value))]
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
    kind, *parts = data
    if kind not in _BUILDERS:
        raise NotPlain(f"malformed: {kind[:20]!r}")
    try:
        return _BUILDERS[kind](*(load(part, depth - 1) for part in parts))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise NotPlain(f"malformed: {error}") from error


# What the values of a type are made of, and how they are made of it. A subclass stands before what
# it derives from.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    complex: lambda value: (value.real, value.imag),
    bytes: lambda value: (bytes.hex(value),),
    bytearray: lambda value: (bytearray.hex(value),),
    list: iter,
    tuple: iter,
    set: iter,
    frozenset: iter,
    deque: lambda value: (value.maxlen, *value),
    dict: lambda value: chain.from_iterable(value.items()),
    KeysView: iter,
    ValuesView: iter,
    ItemsView: chain.from_iterable,
    range: lambda value: (value.start, value.stop, value.step),
    Decimal: lambda value: (str(value),),
    Fraction: lambda value: (value.numerator, value.denominator),
    datetime: lambda value: (datetime.isoformat(value),),
    date: lambda value: (date.isoformat(value),),
    time: lambda value: (time.isoformat(value),),
    timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
_BUILDERS: dict[str, Callable[..., Any]] = {
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "deque": lambda maxlen, *items: deque(items, maxlen),
    "dict": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "KeysView": lambda *keys: dict.fromkeys(keys).keys(),
    "ValuesView": lambda *items: dict(enumerate(items)).values(),
    "ItemsView": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)).items(),
    "range": range,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": timedelta,
}


def write_back(old: Any, new: Any) -> Any:
    """Makes what changed in a copy change in the original.

    Args:
        old (Any): an argument, or part of one.
        new (Any): what became of its copy.

    Returns:
        ``old``, changed in place, or ``new`` if nothing of ``old`` can be.
    """
    if isinstance(old, (list, deque)) and isinstance(new, (list, deque)):
        items = [*map(write_back, old, new), *list(new)[len(old) :]]
        old.clear()
        old.extend(items)
    elif isinstance(old, dict) and isinstance(new, dict):
        pairs = {key: write_back(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(pairs)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for pair in zip(old, new):
            write_back(*pair)
    else:
        return new
    return old
