"""Messages and plain values between processes that do not trust each other.

A message is four bytes of length, then that many bytes, mostly of JSON. After the socket's own
timeout a ``TimeoutError`` is raised.

A Python value crosses as data that JSON can hold, and only exact builtin types are rebuilt from
data. So an object with an ``__eq__`` of its own never gets across, and a subclass (a Counter, a
namedtuple, an IntEnum) arrives as the builtin type that it derives from.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_BYTES = 64 * 2**20  # of a message
MAX_DEPTH = 100  # of a value
MAX_ITEMS = 100_000  # of an iterator
_PLAIN_INT = 2**53  # json writes larger ones too, but parsing long decimals takes quadratic time


class PeerGone(Exception):
    """The other side ended, or sent what cannot be read; the text says which."""


class NotPlain(Exception):
    """A value that cannot cross, or data that stands for none."""


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(f"ended ({error})") from error


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Send one message; raises PeerGone if the other side has ended."""
    with _talking():
        sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_bytes(sock: socket.socket, *, limit: int = MAX_BYTES) -> bytes:
    """Read one message; raises PeerGone if none will come, or one of more than ``limit`` bytes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > limit:
        raise PeerGone(f"sent {length} bytes at once, more than {limit}")
    return _read(sock, length)


def send(sock: socket.socket, message: Any) -> None:
    """Send a message of plain data, as :func:`send_bytes`."""
    send_bytes(sock, json.dumps(message).encode())


def receive(sock: socket.socket, *, limit: int = MAX_BYTES) -> Any:
    """Read a message of plain data, as :func:`receive_bytes`."""
    data = receive_bytes(sock, limit=limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone(f"sent something that is not a message ({error})") from error


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    with _talking():
        while len(data) < count:
            part = sock.recv(min(count - len(data), 2**20))
            if not part:
                raise PeerGone("ended")
            data += part
    return bytes(data)


def dump(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Write a value as plain data.

    Raises NotPlain for anything but None, bools, numbers, text, bytes, and lists, tuples, dicts,
    sets, frozensets and iterators of such, nested at most ``depth`` deep.
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
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return [kind.__name__, *(dump(part, depth - 1) for part in parts(value))]
    raise NotPlain(f"a {type(value).__name__} is not plain data")


def load(data: Any, depth: int = MAX_DEPTH) -> Any:
    """Rebuild what :func:`dump` wrote; raises NotPlain for data that it did not write."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is not list or not data or type(data[0]) is not str or depth == 0:
        raise NotPlain("malformed")
    kind, *parts = data
    try:
        return _BUILDERS[kind](*(load(part, depth - 1) for part in parts))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise NotPlain(f"malformed {kind[:20]!r}: {error}") from error


def _items(iterator: Iterator[Any]) -> list[Any]:
    items = list(islice(iterator, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise NotPlain(f"an iterator has more than {MAX_ITEMS} items")
    return items


# The parts of a value of each type, and how it is rebuilt from them.
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    complex: lambda value: (value.real, value.imag),
    bytes: lambda value: (bytes.hex(value),),
    list: iter,
    tuple: iter,
    set: iter,
    frozenset: iter,
    dict: lambda value: chain.from_iterable(value.items()),
    Iterator: _items,
}
_BUILDERS: dict[str, Callable[..., Any]] = {
    "int": lambda digits: int(digits, 16),
    "complex": complex,
    "bytes": bytes.fromhex,
    "list": lambda *items: list(items),
    "tuple": lambda *items: items,
    "set": lambda *items: set(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "Iterator": lambda *items: iter(items),
}
