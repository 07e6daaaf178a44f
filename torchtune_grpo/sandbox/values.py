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
_MUTABLE = (list, dict, set, deque, bytearray)


class NotPlain(Exception):
    """A value that cannot cross."""


class TooDeep(NotPlain):
    """A value that is nested too deep to cross."""


class Copies:
    """The values of one call, on one side of it.

    What can change (a list, say) gets a number on both sides, in the order in which it crosses, and
    crosses once: where it stands again, the number does. So ``[row, row]`` stays one row twice, and
    what was changed can be named.
    """

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}  # by number
        self._numbers: dict[int, int] = {}  # by id

    def dump(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        """Value -> what ``json`` can write.

        Raises:
            NotPlain: for anything but None, bool, numbers, text, bytes, dates and times, ranges,
                and lists, tuples, deques, sets, frozensets, dicts and their views of such, nested
                at most ``depth`` deep.
        """
        if value is None or value is True or value is False:
            return value
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        if depth == 0:
            raise TooDeep("nested too deep")
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__pos__(value)
            return number if abs(number) < _PLAIN_INT else ["int", f"{number:x}"]
        if isinstance(value, float):
            return float.__pos__(value)
        data = self._take_apart(value, depth)
        self._share(value)
        return data

    def load(self, data: Any, depth: int = MAX_DEPTH) -> Any:
        """The inverse of :meth:`dump`, for data from anyone.

        Raises:
            NotPlain: if ``dump`` did not write it.
        """
        if type(data) is list and data[:1] == ["same"]:
            return self._build(data, 1)
        value = self._build(data, depth)
        self._share(value)
        return value

    def contents(self, count: int | None = None) -> list[Any]:
        """Of each of the first ``count`` that can change: what it is made of, as ``json`` can write
        it. None = of all."""
        values = list(self._shared.values())[:count]
        return [self._take_apart(value, MAX_CALL_DEPTH) for value in values]

    def refill(self, number: int, data: Any) -> None:
        """Makes one that can change of what :meth:`contents` wrote on the other side.

        Raises:
            NotPlain: if it did not.
        """
        old, new = self._shared.get(number), self._build(data, MAX_CALL_DEPTH)
        if type(new) not in _MUTABLE or not isinstance(old, type(new)):
            raise NotPlain("malformed")
        old.clear()
        (old.update if isinstance(old, (dict, set)) else old.extend)(new)

    def _share(self, value: Any) -> None:
        if isinstance(value, _MUTABLE):
            self._numbers[id(value)] = len(self._shared)
            self._shared[len(self._shared)] = value

    def _take_apart(self, value: Any, depth: int) -> list[Any]:
        for kind, parts in _PARTS.items():
            if isinstance(value, kind):
                return [kind.__name__, *(self.dump(part, depth - 1) for part in parts(value))]
        raise NotPlain(f"a {type(value).__name__} is no plain data")

    def _build(self, data: Any, depth: int) -> Any:
        if data is None or type(data) in (bool, int, float, str):
            return data
        if type(data) is not list or not data or type(data[0]) is not str or depth == 0:
            raise NotPlain("malformed")
        kind, *parts = data
        try:
            if kind == "same":
                return self._shared[parts[0]]
            return _BUILDERS[kind](*(self.load(part, depth - 1) for part in parts))
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            raise NotPlain(f"malformed {kind[:20]!r}: {error}") from error


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
