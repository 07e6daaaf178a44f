"""Messages between processes: whole, in time, and of a limited length."""

import socket

import pytest

from torchtune_grpo.sandbox.wire import PeerGone, receive, receive_bytes, send, send_bytes


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_one_by_one(ends):
    ours, theirs = ends
    send_bytes(theirs, b"first")
    send(theirs, {"second": [1, None]})
    assert receive_bytes(ours) == b"first"
    assert receive(ours) == {"second": [1, None]}


def test_a_message_that_is_too_long_is_not_read(ends):
    ours, theirs = ends
    send_bytes(theirs, b"12345")
    with pytest.raises(PeerGone, match="sent 5 bytes at once, more than 4"):
        receive_bytes(ours, limit=4)
    assert ours.recv(10) == b"12345"
    send(theirs, "12")
    assert receive(ours, limit=4) == "12"


def test_half_a_message_ends_with_the_timeout_or_with_its_sender(ends):
    ours, theirs = ends
    theirs.sendall(b"\0\0\0\x05" + b"123")
    ours.settimeout(0.01)
    with pytest.raises(TimeoutError):
        receive(ours)
    theirs.close()
    with pytest.raises(PeerGone, match="ended"):
        receive(ours)
    with pytest.raises(PeerGone):
        send(ours, 1)


def test_a_message_that_nobody_takes_ends_with_the_timeout(ends):
    """More than the socket holds; one that fits is sent."""
    ours, theirs = ends
    ours.settimeout(0.01)
    send_bytes(ours, b"small")
    assert receive_bytes(theirs) == b"small"
    with pytest.raises(TimeoutError):
        send_bytes(ours, bytes(2**22))


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 10**5])
def test_what_is_no_message_is_refused(ends, data):
    ours, theirs = ends
    send_bytes(theirs, data)
    with pytest.raises(PeerGone, match="sent something that is not a message"):
        receive(ours)
