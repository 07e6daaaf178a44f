"""Messages over a stream socket: four bytes of length, then the bytes, mostly of JSON."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!I")

# Far above what a test or a completion needs; a peer that announces more is not read.
MAX_BYTES = 64 * 2**20


class PeerGone(Exception):
    """The other side ended, or sent what cannot be read; the text says which."""


def send_bytes(sock: socket.socket, data: bytes, *, deadline: float | None = None) -> None:
    """Sends one message.

    Raises:
        TimeoutError: if it was not taken whole by the deadline (on ``time.monotonic``'s clock).
        PeerGone: if nobody is there to read it.
    """
    try:
        sock.settimeout(_left(deadline))
        sock.sendall(_LENGTH.pack(len(data)) + data)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(f"ended ({error})") from error


def receive_bytes(
    sock: socket.socket, *, limit: int = MAX_BYTES, deadline: float | None = None
) -> bytes:
    """Reads one message.

    Args:
        sock (socket.socket): a stream socket.
        limit (int): a longer message is not read.
        deadline (float | None): on ``time.monotonic``'s clock; None waits forever.

    Raises:
        TimeoutError: if it has not come whole by the deadline.
        PeerGone: if it never will, or is longer than ``limit``.
    """
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline))
    if length > limit:
        raise PeerGone(f"sent {length} bytes at once, more than {limit}")
    return _read(sock, length, deadline)


def send(sock: socket.socket, message: Any, *, deadline: float | None = None) -> None:
    """Sends a message of plain data; see :func:`send_bytes`."""
    send_bytes(sock, json.dumps(message).encode(), deadline=deadline)


def receive(sock: socket.socket, *, limit: int = MAX_BYTES, deadline: float | None = None) -> Any:
    """Reads a message of plain data; see :func:`receive_bytes`."""
    data = receive_bytes(sock, limit=limit, deadline=deadline)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone(f"sent what is no message ({error})") from error


def _read(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray()
    try:
        while len(data) < count:
            sock.settimeout(_left(deadline))
            part = sock.recv(min(count - len(data), 2**20))
            if not part:
                raise PeerGone("ended")
            data += part
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(f"ended ({error})") from error
    return bytes(data)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 1e-6)
