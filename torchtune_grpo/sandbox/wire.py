"""Messages and plain values between processes that do not trust each other.

A message is its length in four bytes, then that many bytes, mostly JSON. When the socket's own
timeout passes, a ``TimeoutError`` is raised.

A Python value crosses as data that JSON can hold, and only Python's own types are rebuilt from
data. So an object with an ``__eq__`` of its own never gets across: a subclass (an IntEnum, say)
arrives as the type that it derives from, and any other object stays behind.
"""

from __future__ import annotations

import builtins
import json
import socket
import struct
import sys
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import chain
from typing import Any, NoReturn

_LENGTH = struct.Struct("!I")
MAX_BYTES = 64 * 2**20  # size of a message
MAX_DEPTH = 100  # nesting depth of a value
_PLAIN_INT = 2**53  # json writes larger ones too, but parsing long decimals takes quadratic time


class PeerGone(Exception):
    """Raised when the other side ended, or sent something unreadable; the text says which."""


class TooLong(PeerGone):
    """Raised when the other side announced a message above the limit."""


class NotPlain(Exception):
    """Raised for a value that cannot cross, or for data that stands for no value."""


@contextmanager
def talking() -> Iterator[None]:
    """Raise PeerGone where the socket reports that the other side has ended."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(f"ended ({error})") from error


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send one message; raises PeerGone if the other side has ended."""
    with talking():
        sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_bytes(sock: socket.socket, *, limit: int = MAX_BYTES) -> bytes:
    """Read one message; raises PeerGone if none will come, or if it exceeds ``limit`` bytes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > limit:
        raise TooLong(f"sent {length} bytes at once, more than {limit}")
    return _read(sock, length)


def send(sock: socket.socket, message: object) -> None:
    """Send a message of plain data, as ``send_bytes`` does."""
    send_bytes(sock, json.dumps(message).encode())


def receive(sock: socket.socket, *, limit: int = MAX_BYTES) -> Any:
    """Read a message of plain data, as ``receive_bytes`` does."""
    data = receive_bytes(sock, limit=limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise PeerGone(f"sent something that is not a message ({error!r})") from error


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    with talking():
        while len(data) < count:
            part = sock.recv(min(count - len(data), 2**20))
            if not part:
                raise PeerGone("ended")
            data += part
    return bytes(data)


def refuse(value: object) -> NoReturn:
    """Raise NotPlain for an object that stays behind."""
    raise NotPlain(f"a {type(value).__name__} is not plain data")


def dump(
    value: object, keep: Callable[[object], list[object]] = refuse, depth: int = MAX_DEPTH
) -> object:
    """Write a value as plain data, nested at most ``depth`` deep, or else raise NotPlain.

    Plain values are None, bools, numbers, text, bytes, dates, and lists, tuples, dicts and sets of
    these. Any other object is represented by the list that ``keep`` returns for it.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__pos__(value)
        return number if abs(number) < _PLAIN_INT else ["int", f"{number:x}"]
    if isinstance(value, float):
        return float.__pos__(value)
    if depth == 0:
        raise NotPlain("nested too deep")
    if isinstance(value, type) and value in _BUILTIN_TYPES.values():
        return ["type", value.__name__]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        record = (type(value).__name__, value._fields, *value)
        return ["namedtuple", *(dump(part, keep, depth - 1) for part in record)]
    for kind, (parts, _) in _TYPES.items():
        if isinstance(value, kind):
            return [kind.__name__, *(dump(part, keep, depth - 1) for part in parts(value))]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return ["ndarray", value.dtype.str, dump(value.tolist(), keep, depth - 1)]
    return ["object", *keep(value)]


def load(data: Any, find: Callable[..., Any] = refuse, depth: int = MAX_DEPTH) -> Any:
    """Rebuild what ``dump`` wrote; raises NotPlain for data that it did not write.

    ``find`` returns any other object, given the items of the list that ``keep`` returned.
    """
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is not list or not data or type(data[0]) is not str or depth == 0:
        raise NotPlain("malformed")
    kind, *parts = data
    try:
        if kind == "object":
            return find(*parts)
        return _BUILDERS[kind](*(load(part, find, depth - 1) for part in parts))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise NotPlain(f"malformed {kind[:20]!r}: {error}") from error


def _array(dtype: str, items: object) -> object:
    numpy = sys.modules["numpy"]
    if numpy.dtype(dtype).kind not in "biufcUS":
        raise ValueError("neither of numbers nor of text")
    return numpy.array(items, dtype)[()]


_record = cache(namedtuple)  # slow to make

# For each type: the parts of a value, and how it is rebuilt from them.
_TYPES: dict[type, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    complex: (lambda value: (value.real, value.imag), complex),
    Fraction: (lambda value: (value.numerator, value.denominator), Fraction),
    Decimal: (lambda value: (str(value),), Decimal),
    datetime: (lambda value: (value.isoformat(),), datetime.fromisoformat),
    date: (lambda value: (value.isoformat(),), date.fromisoformat),
    time: (lambda value: (value.isoformat(),), time.fromisoformat),
    timedelta: (lambda value: (value.days, value.seconds, value.microseconds), timedelta),
    bytes: (lambda value: (bytes.hex(value),), bytes.fromhex),
    bytearray: (lambda value: (bytes(value),), bytearray),
    range: (lambda value: (value.start, value.stop, value.step), range),
    list: (iter, lambda *items: list(items)),
    deque: (lambda value: (list(value), value.maxlen), deque),
    tuple: (iter, lambda *items: items),
    set: (iter, lambda *items: set(items)),
    frozenset: (iter, lambda *items: frozenset(items)),
    Counter: (lambda value: (dict(value),), Counter),
    dict: (
        lambda value: chain.from_iterable(value.items()),
        lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    ),
}
_BUILTIN_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_BUILDERS: dict[str, Callable[..., object]] = {
    **{kind.__name__: build for kind, (_, build) in _TYPES.items()},
    "int": lambda digits: int(digits, 16),
    "type": _BUILTIN_TYPES.__getitem__,
    "namedtuple": lambda name, fields, *values: _record(name, fields)(*values),
    "ndarray": _array,
}
