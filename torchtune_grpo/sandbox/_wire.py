"""Messages over a stream socket: four bytes of length, then the bytes; file descriptors on top."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")

# Far above what a test or a completion needs; a peer that announces more is not read.
MAX_BYTES = 64 * 2**20


class PeerGone(Exception):
    """The other side closed the socket, or sent what cannot be read."""


def send_bytes(
    sock: socket.socket, data: bytes, *, fds: Sequence[int] = (), deadline: float | None = None
) -> None:
    """Sends one message, together with open files.

    Raises:
        TimeoutError: if it was not taken whole by the deadline (on ``time.monotonic``'s clock).
        PeerGone: if nobody is there to read it.
    """
    left = memoryview(_LENGTH.pack(len(data)) + data)
    try:
        if fds:
            left = left[socket.send_fds(sock, [left[: _LENGTH.size]], list(fds)) :]
        while left:
            _await(sock, select.POLLOUT, deadline)
            flags = 0 if deadline is None else socket.MSG_DONTWAIT
            left = left[sock.send(left, flags) :]
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerGone(str(error)) from error


def receive_bytes(
    sock: socket.socket,
    *,
    limit: int = MAX_BYTES,
    deadline: float | None = None,
    max_fds: int = 0,
) -> tuple[bytes, list[int]]:
    """Reads one message.

    Args:
        sock (socket.socket): a blocking stream socket.
        limit (int): a longer message is not read.
        deadline (float | None): on ``time.monotonic``'s clock; None waits forever.
        max_fds (int): how many open files may come with it.

    Returns:
        The message, and the descriptors that came with it.

    Raises:
        TimeoutError: if it has not come whole by the deadline.
        PeerGone: if it never will, or is longer than ``limit``.
    """
    fds: list[int] = []
    try:
        (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, deadline, fds, max_fds))
        if length > limit:
            raise PeerGone(f"a message of {length} bytes, more than {limit}")
        return _read(sock, length, deadline, fds, 0), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def send(sock: socket.socket, message: Any, *, fds: Sequence[int] = ()) -> None:
    """Sends a message of plain data; see :func:`send_bytes`."""
    send_bytes(sock, json.dumps(message).encode(), fds=fds)


def receive(sock: socket.socket, *, limit: int = MAX_BYTES, deadline: float | None = None) -> Any:
    """Reads a message of plain data; see :func:`receive_bytes`."""
    data, _ = receive_bytes(sock, limit=limit, deadline=deadline)
    return parse(data)


def parse(data: bytes) -> Any:
    """JSON -> value.

    Raises:
        PeerGone: if it is none, or nested too deep.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PeerGone(f"not a message: {error}") from error


def _read(
    sock: socket.socket, count: int, deadline: float | None, fds: list[int], max_fds: int
) -> bytes:
    """Reads that many bytes; descriptors that come with the first of them go to ``fds``."""
    parts: list[bytes] = []
    while count:
        _await(sock, select.POLLIN, deadline)
        try:
            if max_fds and not parts:
                part, received, _, _ = socket.recv_fds(sock, count, max_fds)
                fds += received
            else:
                part = sock.recv(min(count, 2**20))
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not part:
            raise PeerGone("closed")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _await(sock: socket.socket, event: int, deadline: float | None) -> None:
    """Returns when the socket is ready; at once without a deadline."""
    if deadline is not None:
        # poll and not select, which cannot watch descriptors beyond 1,023.
        waiter = select.poll()
        waiter.register(sock, event)
        if not waiter.poll(max(deadline - time.monotonic(), 0) * 1000):
            raise TimeoutError
