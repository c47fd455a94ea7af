"""A connection that somebody opened to us: handshake, frames and payload, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

import msgspec

from kvops.errors import AuthFailed, KvopsError, NotLeader, Refused, WireError
from kvops.net import wire
from kvops.net.auth import HANDSHAKE_BYTES_MAX, Hello, Listener, Welcome, WireTrouble
from kvops.net.wire import Frame, Kind

HANDSHAKE_TIMEOUT_S: Final = 2.0
BUFFER_BYTES: Final = 64 << 10
READ_BYTES_MAX: Final = 1 << 20  # one read of payload: the loop looks at its other peers in between
UNSENT_BYTES_MAX: Final = 4 << 20  # a peer that does not read its answers is not read from beyond this


class Peers:
    """
    The connections of one process: a bounded set.

    Those that have not proved the secret have a place only while nobody else wants it: whoever opens connections
    and says nothing keeps nobody out.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._peers: set[WirePeer] = set()
        self._strangers: dict[WirePeer, None] = {}  # of them, those that have proved nothing, oldest first

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, peer: WirePeer) -> bool:
        """Take a connection in, if there is room or can be made."""
        if len(self._peers) >= self._count_max:
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.transport.abort()
        self._peers.add(peer)
        self._strangers[peer] = None
        return True

    def proved(self, peer: WirePeer) -> None:
        """A connection is no stranger's any more."""
        self._strangers.pop(peer, None)

    def leave(self, peer: WirePeer) -> None:
        """A connection ended."""
        self._peers.discard(peer)
        self._strangers.pop(peer, None)

    def abort(self) -> None:
        """Hang up all."""
        for peer in list(self._peers):
            peer.transport.abort()


class WirePeer(asyncio.BufferedProtocol):
    """
    One accepted connection; a subclass says what its frames do.

    Payload goes straight from the socket into the memory that ``payload`` names. A frame that breaks the
    protocol is answered by ERROR and ends the connection.
    """

    buffer_bytes = BUFFER_BYTES
    """For frames without their payload; what of a payload comes in one read with its frame is copied once more."""

    def __init__(self, listener: Listener, welcome: Callable[[], Welcome], peers: Peers) -> None:
        self.hello: Hello | None = None  # once the secret is proved
        self.transport: asyncio.Transport
        self._listener = listener
        self._welcome = welcome
        self._peers = peers
        self._buffer = bytearray(wire.HEADER_BYTES + HANDSHAKE_BYTES_MAX)  # until the secret is proved
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._sink: memoryview | None = None
        self._sink_at = 0
        self._skip = 0  # bytes of payload to throw away
        self._pending: tuple[Frame, bytes] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self.held = False
        self._unread = False  # the peer does not read its answers

    # What a subclass does.

    def admit(self, hello: Hello) -> None:
        """The peer has proved the secret; raise to turn it away."""

    def authenticated(self, hello: Hello) -> None:
        """The peer has been welcomed."""

    def frame(self, frame: Frame, body: bytes) -> None:
        """A whole frame has arrived, its payload included."""
        raise NotImplementedError

    def payload(self, frame: Frame, body: bytes) -> memoryview | None:
        """Where a frame's payload goes: exactly ``frame.payload_bytes`` of writable memory, or None for nowhere."""
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def lost(self) -> None:
        """The connection ended, after it was authenticated."""

    # What it offers.

    def discard_payload(self) -> None:
        """What is still to come of the payload under way must not be written where it was meant to go."""
        if self._sink is not None:
            self._skip = len(self._sink) - self._sink_at
            self._sink = None

    def hold(self) -> None:
        """Take no further frame until ``proceed``: this one takes more than a turn of the loop."""
        self.held = True
        self.transport.pause_reading()

    def proceed(self) -> None:
        """Go on with the next frame."""
        self.held = False
        if self.transport.is_closing():
            return
        if not self._unread:
            self.transport.resume_reading()
        self.attempt(self._parse)

    def reply(self, frame: Frame, body: bytes) -> None:
        """Answer a request."""
        self.transport.write(wire.pack(wire.reply(frame.kind), body, frame.request))

    def fail(self, error: KvopsError) -> None:
        """Tell the peer why, and hang up."""
        leader = error.leader or "" if isinstance(error, NotLeader) else ""
        trouble = WireTrouble(
            code=type(error).__name__, what=error.what[:1_000], fix=error.fix[:1_000], leader=leader
        )
        self.transport.write(wire.pack(Kind.ERROR, msgspec.msgpack.encode(trouble)))
        self.transport.close()

    # asyncio's side.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if not self._peers.enter(self):
            self.fail(Refused(f"{len(self._peers)} connections are open, which is all", fix="close some"))
            return
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._timeout = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._sink = None
        self._peers.leave(self)
        if self.hello is not None:
            self.lost()

    def pause_writing(self) -> None:
        """The peer does not read its answers: take no more requests from it."""
        self._unread = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """It reads again."""
        self._unread = False
        if not self.held:
            self.transport.resume_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._sink is not None:
            return self._sink[self._sink_at : self._sink_at + READ_BYTES_MAX]
        if self._skip:
            return self._view[: min(self._skip, len(self._view))]  # nothing unread is in there now
        if self._end == len(self._buffer):
            self._make_room(2 * (self._end - self._start))
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._sink is not None:
            self._sink_at += nbytes
            if self._sink_at == len(self._sink):
                self.attempt(self._payload_done)
        elif self._skip:
            self._skip -= nbytes
            if not self._skip:
                self.attempt(self._payload_done)
        else:
            self._end += nbytes
            self.attempt(self._parse)

    def attempt(self, step: Callable[[], None]) -> None:
        """Do a step; one that breaks the protocol ends the connection."""
        try:
            step()
        except KvopsError as error:
            self._sink = None
            self._skip = self._start = self._end = 0
            self.fail(error)

    def _payload_done(self) -> None:
        assert self._pending is not None
        (frame, body), self._pending, self._sink = self._pending, None, None
        self.frame(frame, body)

    def _make_room(self, need: int) -> None:
        """Move what is unread to the front; grow for a frame of ``need`` bytes."""
        unread = bytes(self._view[self._start : self._end])
        if need > len(self._buffer) or (len(self._buffer) > self.buffer_bytes and need <= self.buffer_bytes):
            self._buffer = bytearray(max(need, self.buffer_bytes))
            self._view = memoryview(self._buffer)
        self._view[: len(unread)] = unread
        self._start, self._end = 0, len(unread)

    def _parse(self) -> None:
        while self._end - self._start >= wire.HEADER_BYTES:
            head = wire.unpack_header(self._view[self._start : self._start + wire.HEADER_BYTES])
            if self.hello is None and (head.body_bytes > HANDSHAKE_BYTES_MAX or head.payload_bytes):
                raise AuthFailed("the peer sent a large frame before it proved the group secret", fix="")
            need = wire.HEADER_BYTES + head.body_bytes
            if self._end - self._start < need:
                if self._start + need > len(self._buffer):
                    self._make_room(need)
                return
            body = bytes(self._view[self._start + wire.HEADER_BYTES : self._start + need])
            self._start += need
            if self._start == self._end:
                self._start = self._end = 0
            if self.hello is None:
                self._handshake(head, body)
            elif head.payload_bytes:
                self._begin_payload(head, body)
                if self._pending is not None:
                    return
            else:
                self.frame(head, body)
            if self.held or self.transport.is_closing():
                return

    def _begin_payload(self, head: Frame, body: bytes) -> None:
        sink = self.payload(head, body)
        assert sink is None or len(sink) == head.payload_bytes
        here = min(self._end - self._start, head.payload_bytes)
        if sink is not None:
            sink[:here] = self._view[self._start : self._start + here]
        self._start += here
        if self._start == self._end:
            self._start = self._end = 0
        self._pending = (head, body)
        if here == head.payload_bytes:
            self._payload_done()
        elif sink is not None:
            self._sink, self._sink_at = sink, here
        else:
            self._skip = head.payload_bytes - here

    def _handshake(self, head: Frame, body: bytes) -> None:
        if head.kind == Kind.HELLO:
            self.transport.write(wire.pack(Kind.CHALLENGE, self._listener.challenge(body)))
        elif head.kind == Kind.PROOF:
            hello = self._listener.accept(body)
            self.admit(hello)
            self.hello = hello
            self._peers.proved(self)
            self._make_room(self.buffer_bytes)
            if self._timeout is not None:
                self._timeout.cancel()
            self.transport.write(wire.pack(Kind.WELCOME, msgspec.msgpack.encode(self._welcome())))
            self.authenticated(self.hello)
        else:
            raise AuthFailed(f"frame kind {head.kind} before the group secret was proved", fix="")
