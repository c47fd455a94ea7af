"""Reads and writes over a node's socket: tcp for other hosts, a Unix socket for writes on its own."""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from kvops.errors import WireError
from kvops.limits import COPY_BYTES_MAX
from kvops.net import wire
from kvops.net.link import Link, LinkState
from kvops.net.wire import Frame, Kind
from kvops.transfer.layout import (
    HEADER_BYTES,
    ObjectHeader,
    chunk_digests,
    verify_chunks,
    verify_header,
    verify_trailer,
)
from kvops.transfer.messages import READ_REPLY, READ_ROW, SOURCE, WRITE_HEAD, WRITE_REPLY, NodeStatus
from kvops.transfer.model import (
    READ_SLICES_PER_FRAME_MAX,
    WRITES_PER_FRAME_MAX,
    ReadSlice,
    SliceState,
    WriteSlice,
)
from kvops.transfer.region import Region, Regions

_WRITTEN = (wire.reply(Kind.WRITE), wire.reply(Kind.WRITE_REGISTERED))
_STATES = {
    NodeStatus.STALE: SliceState.STALE,
    NodeStatus.GONE: SliceState.STALE,
    NodeStatus.REFUSED: SliceState.REFUSED,
}


def verify(piece: ReadSlice, header: bytes, trailer: bytes) -> SliceState:
    """Judge the bytes that lie in a slice's buffer."""
    found = verify_header(
        header,
        incarnation=piece.incarnation,
        generation=piece.generation,
        key_digest=piece.key_digest,
        size=piece.size,
    )
    if not isinstance(found, ObjectHeader):
        return SliceState.STALE
    if not verify_trailer(found, trailer):
        return SliceState.CORRUPT
    first = piece.start // found.chunk
    good = verify_chunks(piece.buffer, trailer, chunk=found.chunk, first_chunk=first) < 0
    return SliceState.DONE if good else SliceState.CORRUPT


class _StreamJob:
    """What reads and writes share: a link, slices in order, and when it last got on."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.progress_at = time.monotonic()

    def advance(self, events: int) -> None:
        if self.link.state is not LinkState.CONNECTING and events == select.POLLOUT:
            self.link.flush()  # the kernel took bytes: of the peer that says nothing
            return
        self.progress_at = time.monotonic()
        self.link.advance(events, self)

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def frame(self, frame: Frame, body: bytes) -> None:
        raise NotImplementedError


class ReadJob(_StreamJob):
    """Slices of one store, asked for at once and answered in order."""

    def __init__(self, link: Link, slices: Sequence[ReadSlice]) -> None:
        super().__init__(link)
        self._pending = deque(slices)
        rows = np.array([(s.generation, s.offset, s.start, len(s.buffer)) for s in slices], READ_ROW)
        for first in range(0, len(rows), READ_SLICES_PER_FRAME_MAX):
            link.send(wire.pack(Kind.READ, rows[first : first + READ_SLICES_PER_FRAME_MAX].tobytes()))

    @property
    def done(self) -> bool:
        return not self._pending

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        piece = self._pending[0] if self._pending else None
        if piece is None or frame.kind != wire.reply(Kind.READ) or frame.payload_bytes != len(piece.buffer):
            raise WireError("a store sent bytes nobody asked for", fix="")
        return piece.buffer

    def frame(self, frame: Frame, body: bytes) -> None:
        if frame.kind != wire.reply(Kind.READ) or not self._pending or len(body) < READ_REPLY.size:
            raise WireError(f"a store answered a read with frame kind {frame.kind}", fix="")
        piece = self._pending.popleft()
        status, _, trailer_size = READ_REPLY.unpack_from(body)
        if status != NodeStatus.OK:
            piece.state = _STATES.get(status, SliceState.REFUSED)
            return
        header_end = READ_REPLY.size + HEADER_BYTES
        if len(body) != header_end + trailer_size or frame.payload_bytes != len(piece.buffer):
            raise WireError("a store's answer to a read does not hold what it says", fix="")
        piece.state = verify(piece, body[READ_REPLY.size : header_end], body[header_end:])

    def abandon(self, state: SliceState) -> None:
        self.link.close()
        while self._pending:
            self._pending.popleft().state = state


class WriteJob(_StreamJob):
    """
    Slices for one store; each is hashed when its turn to leave has come.

    What lies in a region that the store copies from is named, everything else sent. ``unregistered`` are the
    regions it could have copied from, had it been asked to.
    """

    def __init__(self, link: Link, slices: Sequence[WriteSlice], regions: Regions | None = None) -> None:
        super().__init__(link)
        self.unregistered: dict[int, Region] = {}
        self._regions = regions
        self._pending = deque(slices)
        link.feed(self._frames(tuple(slices)))

    @property
    def done(self) -> bool:
        return not self._pending

    def _source(self, data: memoryview) -> tuple[int, int] | None:
        """Number of the region in which the store finds these bytes by itself, and where."""
        found = self._regions.find(data) if self._regions else None
        if found is None:
            return None
        region, offset = found
        registered = self.link.registered.get(region.number)
        if registered is None:
            self.unregistered[region.number] = region
        return (region.number, offset) if registered else None

    def _frames(self, slices: Sequence[WriteSlice]) -> Iterator[list[bytes | memoryview]]:
        named: list[bytes] = []
        named_bytes = 0
        for s in slices:
            length = len(s.data)
            source = self._source(s.data)
            if named and (source is None or len(named) == 2 * WRITES_PER_FRAME_MAX):
                yield [wire.pack(Kind.WRITE_REGISTERED, b"".join(named))]
                named, named_bytes = [], 0
            head = WRITE_HEAD.pack(
                s.digest,
                s.key_digest,
                s.generation,
                s.offset,
                s.size,
                s.start,
                length,
                s.chunk,
                s.depth,
                s.tenant,
                s.flags,
                len(s.key),
            )
            body = head + s.key + (s.digests or chunk_digests(s.data, s.chunk))
            if source is None:
                yield [wire.pack(Kind.WRITE, body, 0, length), s.data]
                continue
            number, offset = source
            named += (SOURCE.pack(number, len(body), offset, length), body)
            named_bytes += length
            if named_bytes >= COPY_BYTES_MAX:
                yield [wire.pack(Kind.WRITE_REGISTERED, b"".join(named))]
                yield []  # the store copies while we hash the next
                named, named_bytes = [], 0
        if named:
            yield [wire.pack(Kind.WRITE_REGISTERED, b"".join(named))]

    def frame(self, frame: Frame, body: bytes) -> None:
        count, rest = divmod(len(body), WRITE_REPLY.size)
        if frame.kind not in _WRITTEN or not 0 < count <= len(self._pending) or rest:
            raise WireError(f"a store answered a write with frame kind {frame.kind}", fix="")
        for status, sealed, _ in WRITE_REPLY.iter_unpack(body):
            piece = self._pending.popleft()
            piece.state = (
                SliceState.DONE if status == NodeStatus.OK else _STATES.get(status, SliceState.REFUSED)
            )
            piece.sealed = bool(sealed)

    def abandon(self, state: SliceState) -> None:
        self.link.close()
        while self._pending:
            self._pending.popleft().state = state
