"""Messages over a stream socket: four bytes of length, then the bytes, mostly of JSON.

The socket's own timeout holds; when it has passed, there is a ``TimeoutError``.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LENGTH = struct.Struct("!I")

# Far above what a test or a completion needs; a peer that announces more is not read.
MAX_BYTES = 64 * 2**20


class PeerGone(Exception):
    """The other side ended, or sent what cannot be read; the text says which."""


@contextmanager
def _talking() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(f"ended ({error})") from error


def send_bytes(sock: socket.socket, data: bytes) -> None:
    """Sends one message; raises PeerGone if nobody is there to read it."""
    with _talking():
        sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_bytes(sock: socket.socket, *, limit: int = MAX_BYTES) -> bytes:
    """Reads one message; raises PeerGone if none will come, or one of more than ``limit`` bytes."""
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size))
    if length > limit:
        raise PeerGone(f"sent {length} bytes at once, more than {limit}")
    return _read(sock, length)


def send(sock: socket.socket, message: Any) -> None:
    """Sends a message of plain data; see :func:`send_bytes`."""
    send_bytes(sock, json.dumps(message).encode())


def receive(sock: socket.socket, *, limit: int = MAX_BYTES) -> Any:
    """Reads a message of plain data; see :func:`receive_bytes`."""
    data = receive_bytes(sock, limit=limit)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone(f"sent what is no message ({error})") from error


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    with _talking():
        while len(data) < count:
            part = sock.recv(min(count - len(data), 2**20))
            if not part:
                raise PeerGone("ended")
            data += part
    return bytes(data)
