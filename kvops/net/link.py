"""A connection we open: handshake, frames and payload, never blocking; its owner polls it against a deadline."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

from kvops.addresses import join_address, split_address
from kvops.errors import AuthFailed, NotLeader, Unreachable, UsageError, WireError
from kvops.net import wire
from kvops.net.auth import Caller, Hello, Welcome, WireTrouble
from kvops.net.resolve import resolver
from kvops.net.spin import GAP_S, Spin
from kvops.net.wire import Frame, Kind, decode

BUFFER_BYTES: Final = 128 << 10
IO_BYTES_MAX: Final = 1 << 20  # per system call: hash it while it is in the cache, look at the deadline
BUFFERS_PER_SEND_MAX: Final = 32
DESCRIPTORS_MAX: Final = 1
SPIN_S: Final = (
    400e-6  # look so long for an answer before sleeping: longer than the master takes to wake up …
)
SPIN_S_PER_BYTE: Final = (
    15e-9  # … and longer after a large request: a lookup takes 0.1 µs for each 16-byte key
)
SPIN_S_EXTRA_MAX: Final = 1e-3
SOCKET_BUFFER_BYTES: Final = 1 << 20  # Unix sockets only: TCP tunes its own


class LinkState(Enum):
    """How far a connection is."""

    CONNECTING = auto()
    HANDSHAKE = auto()
    READY = auto()
    CLOSED = auto()


class Receiver(Protocol):
    """Who reads a link's frames."""

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        """Where a frame's payload goes: exactly ``frame.payload_bytes`` of writable memory."""

    def frame(self, frame: Frame, body: bytes) -> None:
        """A whole frame has arrived, its payload included."""


class Address(msgspec.Struct, frozen=True):
    """Where a peer listens: ``host`` and ``port``, or the path of a Unix socket."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """``host:port``, ``[v6]:port``, or an absolute path."""
        if text.startswith("/"):
            return cls(text, 0)
        try:
            return cls(*split_address(text))
        except UsageError as error:  # a peer may have named it
            raise Unreachable(error.what, fix=error.fix) from None

    @property
    def is_unix(self) -> bool:
        """Whether it is the path of a Unix socket."""
        return self.host.startswith("/")

    def __str__(self) -> str:
        return self.host if self.is_unix else join_address(self.host, self.port)


class Link:
    """
    One outgoing connection.

    ``send`` queues frames, ``advance`` does what the socket is ready for. Frames queued before the handshake
    is over follow it. Any trouble closes the link and raises :class:`Unreachable`.
    """

    def __init__(self, address: Address, *, secret: bytes, hello: Hello) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.welcome: Welcome | None = None
        self.accepts_descriptors = False  # of files, sent with frames over a Unix socket
        self.descriptors: list[int] = []
        self.registered: dict[int, bool] = {}  # regions of ours, by number: whether the peer copies from them
        self._caller = Caller(secret, hello)
        self._out: deque[memoryview] = deque()
        self._later: deque[memoryview] = deque()  # until the handshake is over
        self._feed: Iterator[list[bytes | memoryview]] | None = None
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._sink: memoryview | None = None
        self._sink_at = 0
        self._pending: tuple[Frame, bytes] | None = None
        self.sock = self._open()

    def _open(self) -> socket.socket:
        sock: socket.socket | None = None
        try:
            unix = self.address.is_unix
            family, host = (
                (socket.AF_UNIX, self.address.host) if unix else resolver.address(self.address.host)
            )
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if unix:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(host if unix else (host, self.address.port))
        except (OSError, Unreachable) as error:  # no descriptor left, a path too long, an unknown name
            if sock is not None:
                sock.close()
            self.state = LinkState.CLOSED
            raise self._unreachable(str(error)) from error
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self.state = LinkState.CLOSED
            raise self._unreachable(os.strerror(code))
        return sock

    def _unreachable(self, why: str) -> Unreachable:
        return Unreachable(f"cannot reach {self.address}: {why}", fix="check that it runs: kvops status")

    def fileno(self) -> int:
        """For ``poll``."""
        return self.sock.fileno()

    def close(self) -> None:
        """Hang up; what was not read is lost, and nothing is written into any sink from now on."""
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CLOSED
            self.sock.close()
            self._sink = None
            self._feed = None
            self._out.clear()
            while self.descriptors:
                os.close(self.descriptors.pop())

    @property
    def events(self) -> int:
        """What to poll for."""
        if self.state is LinkState.CONNECTING:
            return select.POLLOUT
        # A feed begins once the peer is known: until then a writable socket would only keep the loop spinning.
        feeding = self._feed is not None and self.state is LinkState.READY
        return select.POLLIN | (select.POLLOUT if self._out or feeding else 0)

    def send(self, *buffers: bytes | memoryview) -> None:
        """Queue bytes; they leave with the next ``advance`` that finds the socket writable."""
        queue = self._out if self.state is LinkState.READY else self._later
        queue.extend(memoryview(buffer) for buffer in buffers)

    def send_now(self, data: bytes) -> None:
        """``send``, and what the socket takes leaves at once: the short way of a request on an idle link."""
        rest = memoryview(data)
        if self.state is LinkState.READY and not self._out and self._feed is None:
            try:
                rest = rest[self.sock.send(data) :]
            except BlockingIOError:
                pass  # it leaves when there is room
            except OSError as error:
                self.close()
                raise self._unreachable(error.strerror or str(error)) from error
        if rest:
            self.send(rest)

    def feed(self, frames: Iterator[list[bytes | memoryview]]) -> None:
        """
        Send what an iterator yields, asking it for more only when the last has left.

        Small frames go together, unless it yields nothing between them.
        """
        self._feed = frames

    def flush(self) -> None:
        """Send what the socket takes."""
        if self.state is not LinkState.READY and self.state is not LinkState.HANDSHAKE:
            return
        try:
            while self._refill():
                self._send_some()
        except BlockingIOError:
            return
        except OSError as error:
            self.close()
            raise self._unreachable(error.strerror or str(error)) from error

    def _refill(self) -> bool:
        """Take more from the feed while one call of the kernel could carry it; whether there is anything to send."""
        if self._feed is not None and self.state is LinkState.READY:
            queued = sum(map(len, self._out))
            while queued < IO_BYTES_MAX and len(self._out) < BUFFERS_PER_SEND_MAX:
                more = next(self._feed, None)
                if more is None:
                    self._feed = None
                    break
                if not more:
                    break
                self._out.extend(memoryview(buffer) for buffer in more)
                queued += sum(map(len, more))
        return bool(self._out)

    def _send_some(self) -> None:
        chunk: list[memoryview] = []
        size = 0
        for buffer in self._out:
            if len(chunk) == BUFFERS_PER_SEND_MAX or size >= IO_BYTES_MAX:
                break
            chunk.append(buffer[: IO_BYTES_MAX - size])
            size += len(chunk[-1])
        sent = self.sock.sendmsg(chunk)
        while sent:
            first = self._out[0]
            if sent < len(first):
                self._out[0] = first[sent:]
                return
            sent -= len(first)
            self._out.popleft()

    def advance(self, events: int, receiver: Receiver) -> None:
        """
        Do what ``poll`` says the socket is ready for.

        Raises:
            Unreachable: The connection failed or ended; AuthFailed when the handshake did.
        """
        if self.state is LinkState.CONNECTING:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.close()
                raise self._unreachable(os.strerror(code))
            self.state = LinkState.HANDSHAKE
            self._out.append(memoryview(wire.pack(Kind.HELLO, self._caller.hello())))
        if events & ~select.POLLOUT:
            self.read(receiver)
        self.flush()

    def read(self, receiver: Receiver) -> None:
        """
        Take what has come, without waiting.

        Raises:
            Unreachable: The connection failed or ended.
        """
        try:
            if self._sink is not None:
                room = self._sink[self._sink_at : self._sink_at + IO_BYTES_MAX]
                last = self._sink_at + len(room) == len(self._sink)  # else what follows is payload, too
                got = self.sock.recvmsg_into([room, self._view] if last else [room])[0]
                here = min(got, len(room))
                self._sink_at += here
                self._start, self._end = 0, got - here
                if self._sink_at == len(self._sink):
                    self._sink_done(receiver)
            else:
                if self._end == len(self._buffer):
                    self._make_room(self._end - self._start + 1)
                got = self._receive(self._view[self._end :])
                self._end += got
            if not got:
                self.close()
                raise self._unreachable("it closed the connection")
            if self._sink is None:
                self._parse(receiver)
        except BlockingIOError:
            return
        except OSError as error:
            self.close()
            raise self._unreachable(error.strerror or str(error)) from error
        except WireError:
            self.close()
            raise

    def _receive(self, room: memoryview) -> int:
        if not self.accepts_descriptors:
            return self.sock.recv_into(room)
        data, descriptors, _, _ = socket.recv_fds(self.sock, len(room), DESCRIPTORS_MAX)
        self.descriptors += descriptors
        room[: len(data)] = data
        return len(data)

    def _sink_done(self, receiver: Receiver) -> None:
        assert self._pending is not None
        (frame, body), self._pending, self._sink = self._pending, None, None
        receiver.frame(frame, body)

    def _make_room(self, need: int) -> None:
        unread = bytes(self._view[self._start : self._end])
        if need > len(self._buffer):
            self._buffer = bytearray(need)
            self._view = memoryview(self._buffer)
        self._view[: len(unread)] = unread
        self._start, self._end = 0, len(unread)

    def _parse(self, receiver: Receiver) -> None:
        while self._end - self._start >= wire.HEADER_BYTES and self.state is not LinkState.CLOSED:
            head = wire.unpack_header(self._view[self._start : self._start + wire.HEADER_BYTES])
            need = wire.HEADER_BYTES + head.body_bytes
            if self._end - self._start < need:
                if self._start + need > len(self._buffer):
                    self._make_room(need)
                return
            body = bytes(self._view[self._start + wire.HEADER_BYTES : self._start + need])
            self._start += need
            if head.kind == Kind.ERROR:
                trouble = decode(body, WireTrouble)
                self.close()
                what = f"{self.address}: {trouble.what}"
                if trouble.code == "NotLeader":
                    raise NotLeader(what, fix=trouble.fix, leader=trouble.leader or None)
                kind = AuthFailed if trouble.code == "AuthFailed" else Unreachable
                raise kind(what, fix=trouble.fix)
            if self.state is LinkState.HANDSHAKE:
                self._handshake(head, body)
            elif head.payload_bytes:
                self._begin_payload(receiver, head, body)
                if self._sink is not None:
                    return
            else:
                receiver.frame(head, body)
        if self._start == self._end:
            self._start = self._end = 0

    def _begin_payload(self, receiver: Receiver, head: Frame, body: bytes) -> None:
        sink = receiver.payload(head, body)
        assert len(sink) == head.payload_bytes
        here = min(self._end - self._start, len(sink))
        sink[:here] = self._view[self._start : self._start + here]
        self._start += here
        self._pending, self._sink, self._sink_at = (head, body), sink, here
        if here == len(sink):
            self._sink_done(receiver)
        else:
            self._start = self._end = 0

    def _handshake(self, head: Frame, body: bytes) -> None:
        if head.kind == Kind.CHALLENGE:
            try:
                proof = self._caller.proof(body)
            except AuthFailed:
                self.close()
                raise
            self._out.append(memoryview(wire.pack(Kind.PROOF, proof)))
        elif head.kind == Kind.WELCOME:
            self.welcome = decode(body, Welcome)
            self.state = LinkState.READY
            self._out.extend(self._later)
            self._later.clear()
        else:
            raise WireError(f"{self.address} answered the handshake with frame kind {head.kind}", fix="")


class Single:
    """A receiver that keeps the one frame it waits for."""

    def __init__(self) -> None:
        self.result: tuple[Frame, bytes] | None = None

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        """No payload is expected."""
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def frame(self, frame: Frame, body: bytes) -> None:
        """Keep it."""
        self.result = (frame, body)


def establish(link: Link, *, deadline: float) -> None:
    """
    Finish a link's handshake.

    Raises:
        Unreachable: Not by the deadline.
    """
    poll = select.poll()
    poll.register(link)
    nothing = Single()
    while link.state is not LinkState.READY:
        left = deadline - time.monotonic()
        if left <= 0:
            link.close()
            raise Unreachable(
                f"{link.address} did not answer in time", fix="check that it runs: kvops status"
            )
        poll.modify(link, link.events)
        for _, events in poll.poll(left * 1_000):
            link.advance(events, nothing)


def call(
    link: Link, kind: Kind, body: bytes, *, request: int, deadline: float, spin: Spin | None = None
) -> bytes:
    """
    One request and its answer on a link nobody else uses.

    Args:
        link: Connected or not yet.
        kind: Of the request.
        body: Its body.
        request: Echoed by the answer.
        deadline: On ``time.monotonic``.
        spin: Whether to look again and again before sleeping; None: never.

    Raises:
        Unreachable: No answer by the deadline, or the connection failed. The link is closed then.
    """
    send(link, kind, body, request=request)
    spin_s = SPIN_S + min(len(body) * SPIN_S_PER_BYTE, SPIN_S_EXTRA_MAX)
    return receive(link, kind, request=request, deadline=deadline, spin=spin, spin_s=spin_s)


def send(link: Link, kind: Kind, body: bytes, *, request: int) -> None:
    """The first half of ``call``."""
    link.send_now(wire.pack(kind, body, request))


def receive(
    link: Link, kind: Kind, *, request: int, deadline: float, spin: Spin | None = None, spin_s: float = 0.0
) -> bytes:
    """The second half of ``call``: an answer to a request that was sent."""
    single = Single()
    poll: select.poll | None = None
    if link.state is LinkState.READY and spin is not None and spin.pays():
        now = time.monotonic()
        spin_until = min(now + spin_s, deadline)
        gap = 0.0
        while single.result is None and now < spin_until and gap < GAP_S:
            link.read(single)
            before, now = now, time.monotonic()
            gap = now - before
        spin.learn(now < spin_until and gap < GAP_S)
    while single.result is None:
        left = deadline - time.monotonic()
        if left <= 0:
            link.close()
            raise Unreachable(
                f"{link.address} did not answer in time", fix="check that it runs: kvops status"
            )
        if poll is None:
            poll = select.poll()
            poll.register(link)
        poll.modify(link, link.events)
        for _, events in poll.poll(left * 1_000):
            link.advance(events, single)
    frame, answer = single.result
    if frame.request != request or frame.kind != wire.reply(kind):
        link.close()
        raise WireError(f"{link.address} answered request {request} with {frame.request}", fix="")
    return answer
