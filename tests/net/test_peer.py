"""Connections that others open to us: every way of cutting, damaging and delaying what they send."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.net import wire
from kvops.net.auth import HANDSHAKE_BYTES_MAX, Caller, Challenge, WireTrouble
from kvops.net.link import Address
from kvops.net.peer import UNSENT_BYTES_MAX, Peers
from kvops.net.wire import Kind
from tests.net.servers import (
    ANSWER_BYTES,
    HELLO,
    SECRET,
    Echo,
    connect_proved,
    connect_raw,
    random_bytes,
    receive_exactly,
    receive_frame,
    serve_echo,
)


class Wire:
    """A transport that keeps what is written; reads are whatever a test feeds."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int) -> None:
        pass


def feed(peer: Echo, data: bytes) -> None:
    """One read of the loop, or as many as the peer has room for."""
    while data:
        room = peer.get_buffer(-1)
        size = min(len(room), len(data))
        assert size, "a peer always has room"
        room[:size] = data[:size]
        peer.buffer_updated(size)
        data = data[size:]


async def conversation(cuts: list[int], requests: bytes) -> bytes:
    """What a peer answers to a handshake and requests that arrive in these pieces."""
    peer, line = Echo(Peers(1)), Wire()
    peer.connection_made(cast(asyncio.BaseTransport, line))
    caller = Caller(SECRET, HELLO)
    feed(peer, wire.pack(Kind.HELLO, caller.hello()))
    challenge = bytes(line.written[wire.HEADER_BYTES :])
    data = wire.pack(Kind.PROOF, caller.proof(challenge)) + requests
    start = len(line.written)
    for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True):
        feed(peer, data[first:last])
    peer.connection_lost(None)
    welcome = wire.unpack_header(line.written[start : start + wire.HEADER_BYTES])
    assert welcome.kind == Kind.WELCOME
    return bytes(line.written[start + wire.HEADER_BYTES + welcome.body_bytes :])


PAYLOAD = random_bytes(300)
REQUESTS = (
    wire.pack(Kind.LOOKUP, b"first", 1)
    + wire.pack(Kind.WRITE, b"body", 2, len(PAYLOAD))
    + PAYLOAD
    + wire.pack(Kind.WRITE, b"nowhere", 3, len(PAYLOAD))
    + PAYLOAD
    + wire.pack(Kind.LOOKUP, b"", 4)
)
ANSWERS = (
    wire.pack(Kind.LOOKUP + 1, b"first", 1)
    + wire.pack(Kind.WRITE + 1, PAYLOAD, 2)
    + wire.pack(Kind.WRITE + 1, bytes(len(PAYLOAD)), 3)
    + wire.pack(Kind.LOOKUP + 1, b"", 4)
)


def test_cut_at_every_byte() -> None:
    """Wherever one read ends and the next begins, the answers are the same."""
    for cut in range(len(REQUESTS)):
        assert asyncio.run(conversation([cut], REQUESTS)) == ANSWERS


def test_one_byte_at_a_time() -> None:
    """A peer that sends single bytes is answered like any other."""
    size = 67 + len(REQUESTS)

    assert asyncio.run(conversation(list(range(1, size)), REQUESTS)) == ANSWERS


@given(st.lists(st.integers(0, len(REQUESTS))))
def test_cut_anywhere(cuts: list[int]) -> None:
    """Nor does the number of cuts matter."""
    assert asyncio.run(conversation(sorted(cuts), REQUESTS)) == ANSWERS


@pytest.mark.parametrize("received", [0, 1, 100, 299])
def test_discarded_payload_does_not_land(received: int) -> None:
    """From discard_payload on nothing is written where the payload was to go; the next frame is understood."""

    async def talk() -> tuple[bytes, bytes]:
        peer, line = Echo(Peers(1)), Wire()
        peer.connection_made(cast(asyncio.BaseTransport, line))
        caller = Caller(SECRET, HELLO)
        feed(peer, wire.pack(Kind.HELLO, caller.hello()))
        feed(peer, wire.pack(Kind.PROOF, caller.proof(bytes(line.written[wire.HEADER_BYTES :]))))
        feed(peer, wire.pack(Kind.WRITE, b"body", 2, len(PAYLOAD)) + PAYLOAD[:received])
        sink = peer.sink
        peer.discard_payload()
        line.written.clear()
        feed(peer, PAYLOAD[received:] + wire.pack(Kind.LOOKUP, b"next", 3))
        peer.connection_lost(None)
        return bytes(sink), bytes(line.written)

    sink, written = asyncio.run(talk())

    assert sink == PAYLOAD[:received] + bytes(len(PAYLOAD) - received)
    assert written.endswith(wire.pack(Kind.LOOKUP + 1, b"next", 3))


def test_large_frames_by_real_sockets(tmp_path: Path) -> None:
    """Bodies and payloads of several megabytes arrive whole, by tcp and by a Unix socket."""
    body, payload = random_bytes(3 << 20), random_bytes(5 << 20)
    for path in (None, tmp_path / "s"):
        with serve_echo(path) as address, connect_proved(address) as sock:
            sock.sendall(wire.pack(Kind.LOOKUP, body, 1))
            assert receive_frame(sock)[1] == body
            sock.sendall(wire.pack(Kind.WRITE, b"", 2, len(payload)))
            sock.sendall(payload)
            assert receive_frame(sock)[1] == payload


def trouble_of(sock: socket.socket) -> WireTrouble:
    """The ERROR frame that a peer ends with."""
    frame, body = receive_frame(sock)
    assert frame.kind == Kind.ERROR
    assert sock.recv(1) == b"", "an ERROR is the last frame"
    return msgspec.msgpack.decode(body, type=WireTrouble)


def damaged(data: bytes) -> bytes:
    return data[:9] + bytes([data[9] ^ 1]) + data[10:]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not a kvops frame"),
        (damaged(wire.pack(Kind.LOOKUP, b"")), "checksum"),
        (wire.pack_header(Kind.LOOKUP, wire.BODY_BYTES_MAX + 1, 0), "at most"),
        (wire.pack(Kind.LOOKUP, b"", 0, 1), "carries no payload"),
        (wire.pack(4_242, b""), "kind 4242"),
    ],
    ids=["another protocol", "damaged", "huge", "payload", "unknown kind"],
)
def test_bad_frames_end_their_connection_alone(data: bytes, says: str) -> None:
    """A frame that breaks the protocol is answered by ERROR and a hang-up; others are served on."""
    with serve_echo() as address, connect_proved(address) as bad, connect_proved(address) as good:
        bad.sendall(data)

        assert says in trouble_of(bad).what
        good.sendall(wire.pack(Kind.LOOKUP, b"still here", 1))
        assert receive_frame(good)[1] == b"still here"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (wire.pack(Kind.LOOKUP, bytes(16)), "AuthFailed"),
        (wire.pack_header(Kind.HELLO, HANDSHAKE_BYTES_MAX + 1, 0), "AuthFailed"),
        (wire.pack_header(Kind.HELLO, 10, 0, 1 << 20), "AuthFailed"),
        (wire.pack(Kind.HELLO, b"nonsense"), "WireError"),
        (wire.pack(Kind.PROOF, b""), "WireError"),
    ],
    ids=["request", "large body", "payload", "nonsense", "proof first"],
)
def test_unproved_peers_get_nowhere(data: bytes, code: str) -> None:
    """Whatever a peer sends before it has proved the secret, but a handshake, ends the connection."""
    with serve_echo() as address, connect_raw(address) as sock:
        sock.sendall(data)

        assert trouble_of(sock).code == code


def test_wrong_secret_is_told_so() -> None:
    """A caller with another secret gets an ERROR that says what to do."""
    with serve_echo() as address, connect_raw(address) as sock:
        caller = Caller(b"x" * 32, HELLO)
        sock.sendall(wire.pack(Kind.HELLO, caller.hello()))
        msgspec.msgpack.decode(receive_frame(sock)[1], type=Challenge)
        sock.sendall(wire.pack(Kind.PROOF, msgspec.msgpack.encode({"mac": b"\0" * 32})))

        trouble = trouble_of(sock)
        assert (trouble.code, trouble.fix) == ("AuthFailed", "install the group's secret file on its host")


def test_peer_that_does_not_read_holds_up_nobody() -> None:
    """A peer that asks and does not read costs bounded memory; it gets everything once it reads, others at once."""
    count = 4 * UNSENT_BYTES_MAX // ANSWER_BYTES
    with serve_echo() as address, connect_proved(address) as slow, connect_proved(address) as quick:
        slow.sendall(wire.pack(Kind.READ, b"", 5) * count)
        quick.sendall(wire.pack(Kind.LOOKUP, b"hello", 1))
        assert receive_frame(quick)[1] == b"hello"

        for _ in range(count):
            frame, _ = receive_frame(slow)
            assert (frame.request, frame.payload_bytes) == (5, ANSWER_BYTES)
            receive_exactly(slow, ANSWER_BYTES)


def test_connections_are_bounded() -> None:
    """One connection too many is told so and closed; when one ends there is room again."""
    with serve_echo(count_max=1) as address:
        with connect_proved(address), connect_raw(address) as second:
            assert trouble_of(second).code == "Refused"
        for _ in range(100):
            try:
                connect_proved(address).close()
            except (EOFError, ConnectionError):
                continue  # the first one's end has not been noticed yet
            break
        else:
            pytest.fail("a place that fell free was not given again")


def connect_half(address: Address) -> socket.socket:
    """A blocking socket that was accepted and challenged, and has proved nothing."""
    sock = connect_raw(address)
    sock.sendall(wire.pack(Kind.HELLO, Caller(SECRET, HELLO).hello()))
    assert receive_frame(sock)[0].kind == Kind.CHALLENGE
    return sock


def test_strangers_keep_nobody_out() -> None:
    """Where there is no room left, the stranger who has proved nothing for longest makes some."""
    with (
        serve_echo(count_max=2) as address,
        connect_half(address) as first,
        connect_half(address) as second,
        connect_proved(address) as friend,
    ):
        assert first.recv(1) == b""
        with connect_proved(address) as another:
            assert second.recv(1) == b""
            for sock in (friend, another):
                sock.sendall(wire.pack(Kind.LOOKUP, b"hello", 1))
                assert receive_frame(sock)[1] == b"hello"


def test_strangers_cost_little_memory() -> None:
    """A connection gets its buffer once it has proved the secret."""

    async def talk() -> tuple[int, int]:
        peer, line = Echo(Peers(1)), Wire()
        peer.connection_made(cast(asyncio.BaseTransport, line))
        caller = Caller(SECRET, HELLO)
        before = len(peer.get_buffer(-1))
        feed(peer, wire.pack(Kind.HELLO, caller.hello()))
        feed(peer, wire.pack(Kind.PROOF, caller.proof(bytes(line.written[wire.HEADER_BYTES :]))))
        after = len(peer.get_buffer(-1))
        peer.connection_lost(None)
        return before, after

    assert asyncio.run(talk()) == (HANDSHAKE_BYTES_MAX + wire.HEADER_BYTES, Echo.buffer_bytes)
