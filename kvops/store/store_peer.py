"""A client's connection to a store node: writes into the segment, reads from it, descriptors both ways."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvops.errors import Refused, WireError
from kvops.limits import COPY_BYTES_MAX, REGIONS_MAX
from kvops.log import log
from kvops.net import wire
from kvops.net.auth import Listener
from kvops.net.peer import WirePeer
from kvops.net.wire import Frame, Kind
from kvops.store.node_core import Write
from kvops.transfer import messages as tm
from kvops.transfer.model import WRITES_PER_FRAME_MAX
from kvops.transfer.region import Borrowed

if TYPE_CHECKING:
    from kvops.store.node import Node

DESCRIPTOR_TIMEOUT_S: Final = 2.0


class StorePeer(WirePeer):
    """A client's connection to the node."""

    buffer_bytes = 4 << 10

    def __init__(self, node: Node, listener: Listener) -> None:
        super().__init__(listener, node.welcome, node.connections)
        self._node = node
        self._core = node.core
        self._write: Write | None = None
        self._regions: dict[int, Borrowed] = {}
        self._awaiting: _Descriptor | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """A write under way is given up; its slot stays open until the master frees it."""
        super().connection_lost(exc)
        if self._write is not None:
            self._core.write_lost(self._write)
            self._write = None
        if self._awaiting is not None:
            self._awaiting.close()
            self._awaiting = None
            self._node.regions.leave()
        while self._regions:
            self._let_go(next(iter(self._regions)))

    def payload(self, frame: Frame, body: bytes) -> memoryview | None:
        """Straight into the segment, if the slot may be written."""
        if frame.kind != Kind.WRITE:
            return super().payload(frame, body)
        self._write = self._core.write_begin(body, frame.payload_bytes, on_abort=self.discard_payload)
        return self._write.target

    def frame(self, frame: Frame, body: bytes) -> None:
        """One request."""
        match frame.kind:
            case Kind.WRITE if self._write is not None:
                write, self._write = self._write, None
                self.reply(frame, self._core.write_end(write))
            case Kind.READ:
                self._read(frame, body)
            case Kind.WRITE_REGISTERED:
                self._work(self._write_registered(frame, body))
            case Kind.REGISTER:
                self._register(frame, body)
            case Kind.MAP:
                self._map(frame)
            case Kind.LIST:
                self.reply(frame, self._core.list(body))
            case _:
                raise WireError(f"a store got frame kind {frame.kind}", fix="")

    def _read(self, frame: Frame, body: bytes) -> None:
        buffers: list[bytes | memoryview] = []
        for head, payload in self._core.read(body):
            size = 0 if payload is None else len(payload)
            buffers.append(wire.pack(wire.reply(Kind.READ), head, frame.request, size))
            if payload is not None:
                buffers.append(payload)
        self.transport.writelines(buffers)

    # Registered memory: see kvops/transfer/region.py.

    def _register(self, frame: Frame, body: bytes) -> None:
        raw = self.transport.get_extra_info("socket")
        possible = raw.family == socket.AF_UNIX and len(body) == tm.REGISTER.size
        if not possible or len(self._regions) >= REGIONS_MAX or not self._node.regions.enter():
            self.reply(frame, tm.NOT_REGISTERED)
            return
        number, _, size_bytes = tm.REGISTER.unpack(body)
        try:
            self._awaiting = _Descriptor(
                raw.fileno(), lambda fd: self._registered(frame, number, size_bytes, fd), self.transport.abort
            )
        except OSError:  # others have taken all descriptors
            self._node.regions.leave()
            self.reply(frame, tm.NOT_REGISTERED)
            return
        self.hold()  # the loop's own read would lose the descriptor
        self.reply(frame, tm.GO_ON)

    def _registered(self, frame: Frame, number: int, size_bytes: int, fd: int) -> None:
        self._awaiting = None
        try:
            region = Borrowed(fd, size_bytes)
        except Refused as error:
            self._node.regions.leave()
            log.warning("region.refused", error=error.what)
            self.reply(frame, tm.NOT_REGISTERED)
        else:
            if number in self._regions:
                self._let_go(number)
            self._regions[number] = region
            self.reply(frame, tm.REGISTERED)
        self.proceed()

    def _let_go(self, number: int) -> None:
        self._regions.pop(number).close()
        self._node.regions.leave()

    def _write_registered(self, frame: Frame, body: bytes) -> Iterator[None]:
        """Copy each of several payloads; pauses after every ``COPY_BYTES_MAX``."""
        answers: list[bytes] = []
        copied = at = 0
        while at < len(body):
            start = at + tm.SOURCE.size
            if len(answers) == WRITES_PER_FRAME_MAX:
                raise WireError(f"more than {WRITES_PER_FRAME_MAX} registered writes in one frame", fix="")
            if start > len(body):
                raise WireError("a registered write is shorter than its head", fix="")
            number, body_bytes, offset, length = tm.SOURCE.unpack_from(body, at)
            at = start + body_bytes
            if at > len(body):
                raise WireError("a registered write is shorter than it says", fix="")
            region = self._regions.get(number)
            if region is None or offset + length > region.size_bytes:
                raise WireError("a write names memory that is not registered", fix="register it first")
            self._write = write = self._core.write_begin(body[start:at], length)
            done = 0
            while write.target is not None and done < length:
                size = min(length - done, COPY_BYTES_MAX - copied)
                region.copy(write.target[done : done + size], offset + done)
                done += size
                self._node.registered_bytes_total += size
                copied += size
                if copied == COPY_BYTES_MAX:
                    copied = 0
                    yield
            self._write = None
            answers.append(self._core.write_end(write))
        self.reply(frame, b"".join(answers))

    def _work(self, turns: Iterator[None]) -> None:
        """Take the next turn of work that is too long for one; its connection takes no other frame meanwhile."""
        if self.transport.is_closing():
            return
        for _ in turns:
            self.hold()
            self._node.loop.call_soon(self.attempt, lambda: self._work(turns))
            return
        if self.held:
            self.proceed()

    def _map(self, frame: Frame) -> None:
        """Send the segment's descriptor; the frame is small and nothing is queued before it."""
        node = self._node
        body = wire.encode(
            tm.MapReply(incarnation=node.core.incarnation, segment_bytes=node.segment.size_bytes)
        )
        answer = wire.pack(wire.reply(Kind.MAP), body, frame.request)
        raw = self.transport.get_extra_info("socket")
        if raw.family != socket.AF_UNIX:
            raise Refused("a segment can be mapped on its own host only", fix="read by tcp")
        try:
            with socket.socket(fileno=os.dup(raw.fileno())) as sock:
                sock.setblocking(False)
                socket.send_fds(sock, [answer], [node.segment.fd])
        except OSError:
            self.transport.abort()  # it does not read, or no descriptor is left: it can ask again


class _Descriptor:
    """Waits for a file descriptor on a connection that the loop does not read from meanwhile."""

    def __init__(self, fd: int, arrived: Callable[[int], None], failed: Callable[[], None]) -> None:
        self._sock = socket.socket(fileno=os.dup(fd))
        self._arrived = arrived
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._receive)
        self._timeout = self._loop.call_later(DESCRIPTOR_TIMEOUT_S, self._failed)

    def _receive(self) -> None:
        try:
            _, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            descriptors = []
        self.close()
        if descriptors:
            self._arrived(descriptors[0])
        else:
            self._failed()

    def close(self) -> None:
        """Wait no longer."""
        self._timeout.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
