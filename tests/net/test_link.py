"""Connections that we open: what they do with a peer that is slow, foreign, or gone."""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvops.errors import AuthFailed, KvopsError, Unreachable, WireError
from kvops.net import wire
from kvops.net.link import Address, Link, LinkState, call, establish
from kvops.net.wire import Frame, Kind
from kvops.transfer.engine import Until, drive
from kvops.transfer.model import ReadSlice, SliceState
from kvops.transfer.stream import ReadJob
from tests.net.servers import (
    HELLO,
    SECRET,
    accept_handshake,
    random_bytes,
    receive_frame,
    serve_echo,
    serve_script,
)
from tests.waiting import WAIT_S


def link_to(address: Address, secret: bytes = SECRET) -> Link:
    return Link(address, secret=secret, hello=HELLO)


def soon() -> float:
    return time.monotonic() + WAIT_S


class Sink:
    """Takes one payload into a buffer of its own."""

    def __init__(self, size: int) -> None:
        self.buffer = bytearray(size)
        self.frames: list[Frame] = []
        self.began = False

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        self.began = True
        return memoryview(self.buffer)

    def frame(self, frame: Frame, body: bytes) -> None:
        self.frames.append(frame)


def advance_until(link: Link, sink: Sink, done: Callable[[], bool], *, wait: bool = False) -> None:
    """Poll and advance; with ``wait`` only when no more is coming into the socket's buffer."""
    poll = select.poll()
    poll.register(link)
    deadline = soon()
    while not done():
        assert time.monotonic() < deadline
        poll.modify(link, link.events)
        for _, events in poll.poll(1_000):
            if wait and sink.began:
                unread_settles(link.sock)
            link.advance(events, sink)


def unread_settles(sock: socket.socket) -> None:
    """Wait until what lies unread no longer grows: the sender has filled the window."""
    before = -1
    still = 0
    deadline = soon()
    while still < 20 and time.monotonic() < deadline:
        now = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, b"\0" * 4))[0]
        still = still + 1 if now == before else 0
        before = now
        select.select([], [], [], 0.001)


@pytest.mark.parametrize("by", ["tcp", "unix"])
@pytest.mark.parametrize("wait", [False, True], ids=["eager", "late"])
def test_large_payload_is_scattered_right(tmp_path: Path, by: str, wait: bool) -> None:
    """A payload of many reads lands in place, and the frame behind it is understood, however much came at once."""
    payload = random_bytes((12 << 20) + 7)

    def script(sock: socket.socket) -> None:
        accept_handshake(sock)
        sock.sendall(wire.pack(Kind.READ + 1, b"head", 1, len(payload)))
        sock.sendall(payload)
        sock.sendall(wire.pack(Kind.LOOKUP + 1, b"", 2))
        sock.recv(1)

    family = socket.AF_UNIX if by == "unix" else socket.AF_INET
    path = str(tmp_path / "s") if by == "unix" else ""
    with serve_script(script, family=family, path=path) as address:
        link, sink = link_to(address), Sink(len(payload))
        advance_until(link, sink, lambda: len(sink.frames) == 2, wait=wait)
        link.close()

    assert sink.buffer == payload
    assert [frame.request for frame in sink.frames] == [1, 2]


def test_call_and_answer(tmp_path: Path) -> None:
    """A request is answered by tcp and by a Unix socket, on a new connection and on one that is in use."""
    for path in (None, tmp_path / "s"):
        with serve_echo(path) as address:
            link = link_to(address)
            for request in range(3):
                body = b"x" * request * 100_000
                assert call(link, Kind.LOOKUP, body, request=request, deadline=soon()) == body
            assert link.welcome is not None
            link.close()


def test_wrong_secret() -> None:
    """The caller's side notices another secret, and says so."""
    with serve_echo() as address, pytest.raises(AuthFailed, match="secret"):
        establish(link_to(address, b"x" * 32), deadline=soon())


def test_nobody_listens(tmp_path: Path) -> None:
    """A port or a path where nobody listens is Unreachable, and names it."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", unused.getsockname()[1])
        with pytest.raises(Unreachable, match=str(address.port)):
            establish(link_to(address), deadline=soon())
    with pytest.raises(Unreachable, match="nowhere"):
        link_to(Address(str(tmp_path / "nowhere"), 0))


def test_another_protocol() -> None:
    """A port where somebody else serves is no kvops port."""
    with (
        serve_script(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6 and more than a header\r\n")) as address,
        pytest.raises(WireError, match="not a kvops frame"),
    ):
        establish(link_to(address), deadline=soon())


def test_peer_that_never_answers() -> None:
    """A listener whose process hangs costs no more than the deadline."""
    over = threading.Event()
    with serve_script(lambda _: over.wait(WAIT_S) and None) as address:  # type: ignore[func-returns-value]
        link = link_to(address)
        with pytest.raises(Unreachable, match="in time"):
            call(link, Kind.LOOKUP, b"", request=1, deadline=time.monotonic() + 0.05)
        over.set()

    assert link.state is LinkState.CLOSED


@pytest.mark.parametrize("sent", [0, 10, wire.HEADER_BYTES, 500_000])
def test_peer_that_dies_in_mid_answer(sent: int) -> None:
    """A connection that ends in the middle of a frame is Unreachable."""
    answer = wire.pack(Kind.READ + 1, b"", 1, 1 << 20) + bytes(1 << 20)

    def script(sock: socket.socket) -> None:
        accept_handshake(sock)
        receive_frame(sock)
        sock.sendall(answer[:sent])

    with serve_script(script) as address:
        link, sink = link_to(address), Sink(1 << 20)
        link.send(wire.pack(Kind.READ, b"", 1))
        with pytest.raises(Unreachable):
            advance_until(link, sink, lambda: False)

    assert sink.frames == []


def test_nothing_lands_after_close() -> None:
    """What arrives after ``close`` is written nowhere."""
    more = threading.Event()
    payload = b"\xff" * (1 << 20)

    def script(sock: socket.socket) -> None:
        accept_handshake(sock)
        sock.sendall(wire.pack(Kind.READ + 1, b"", 1, len(payload)) + payload[:1_000])
        more.wait(WAIT_S)
        sock.sendall(payload[1_000:])

    with serve_script(script) as address:
        link, sink = link_to(address), Sink(len(payload))
        advance_until(link, sink, lambda: sink.buffer.count(0xFF) == 1_000)
        link.close()
        more.set()
        with pytest.raises(Unreachable):
            link.advance(select.POLLIN, sink)

    assert sink.buffer.count(0xFF) == 1_000


def test_job_whose_link_is_closed_already() -> None:
    """A job on a link that broke before its first look fails; the jobs beside it go on."""
    with serve_echo() as address:
        link = link_to(address)
        establish(link, deadline=soon())
        piece = ReadSlice(0, 1, 0, 10, 4_096, 1, b"k" * 16, 0, memoryview(bytearray(10)))
        job = ReadJob(link, [piece])
        link.close()

        drive([job], Until(soon()))

    assert piece.state is SliceState.FAILED


def test_answers_that_nobody_asked_for() -> None:
    """Payload beyond what was asked for ends the connection and touches no buffer."""

    def script(sock: socket.socket) -> None:
        accept_handshake(sock)
        sock.sendall(wire.pack(Kind.READ + 1, b"", 1, 4_096) + b"\xff" * 4_096)
        sock.recv(1)

    with serve_script(script) as address:
        buffer = bytearray(10)
        piece = ReadSlice(0, 1, 0, 10, 4_096, 1, b"k" * 16, 0, memoryview(buffer))
        drive([ReadJob(link_to(address), [piece])], Until(soon()))

    assert piece.state is SliceState.FAILED
    assert buffer == bytes(10)


@pytest.mark.parametrize("text", ["", "nowhere", ":1", "host:", "host:x", "host:70000"])
def test_addresses_that_are_none(text: str) -> None:
    """What is no address is refused as one."""
    with pytest.raises(KvopsError, match="address"):
        Address.parse(text)
