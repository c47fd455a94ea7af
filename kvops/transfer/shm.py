"""Reads on a store's own host: its segment is mapped read-only, a read is a verified copy."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable

from kvops.errors import Unreachable, WireError
from kvops.limits import COPY_BYTES_MAX
from kvops.net import wire
from kvops.net.link import Link
from kvops.net.wire import Frame, Kind, decode
from kvops.transfer.engine import Until
from kvops.transfer.layout import (
    HEADER_BYTES,
    ObjectHeader,
    copy_verified,
    footprint_bytes,
    trailer_bytes,
    verify_header,
    verify_trailer,
)
from kvops.transfer.messages import MapReply
from kvops.transfer.model import ReadSlice, SliceState


class Mapping:
    """
    One incarnation's segment in our address space, read-only.

    Reference-counted: ``drop`` says that no new reader may come, and the last reader unmaps.
    """

    def __init__(self, fd: int, reply: MapReply) -> None:
        self.incarnation = reply.incarnation
        self._memory = mmap.mmap(fd, reply.segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = memoryview(self._memory)
        self._lock = threading.Lock()
        self._readers = 0
        self._dropped = False

    def acquire(self) -> memoryview | None:
        """The segment's bytes, until ``release``; None when it was dropped."""
        with self._lock:
            if self._dropped:
                return None
            self._readers += 1
            return self._view

    def release(self) -> None:
        """A reader is done."""
        with self._lock:
            self._readers -= 1
            self._unmap_if_unused()

    def drop(self) -> None:
        """The store is gone: unmap as soon as nobody reads."""
        with self._lock:
            self._dropped = True
            self._unmap_if_unused()

    def _unmap_if_unused(self) -> None:
        if self._dropped and not self._readers and not self._memory.closed:
            self._view.release()
            self._memory.close()


def read(mapping: Mapping, slices: Iterable[ReadSlice], until: Until) -> None:
    """Copy and verify slices one by one, while there is time."""
    segment = mapping.acquire()
    if segment is None:
        for piece in slices:
            piece.state = SliceState.FAILED
        return
    try:
        for piece in slices:
            late = until.left(time.monotonic()) <= 0
            piece.state = SliceState.LATE if late else _copy(segment, piece, until)
    finally:
        mapping.release()


def _copy(segment: memoryview, piece: ReadSlice, until: Until) -> SliceState:
    at = piece.offset
    if at + footprint_bytes(piece.size, piece.chunk) > len(segment):
        return SliceState.STALE
    header = bytes(segment[at : at + HEADER_BYTES])
    found = verify_header(
        header,
        incarnation=piece.incarnation,
        generation=piece.generation,
        key_digest=piece.key_digest,
        size=piece.size,
    )
    if not isinstance(found, ObjectHeader) or found.chunk != piece.chunk:
        return SliceState.STALE
    payload = at + HEADER_BYTES
    trailer_at = payload + piece.size
    trailer = bytes(segment[trailer_at : trailer_at + trailer_bytes(piece.size, piece.chunk)])
    if not verify_trailer(found, trailer):
        return SliceState.CORRUPT
    source = payload + piece.start
    for done in range(0, len(piece.buffer), COPY_BYTES_MAX):
        if done and until.left(time.monotonic()) <= 0:
            return SliceState.LATE
        target = piece.buffer[done : done + COPY_BYTES_MAX]
        bad = copy_verified(
            target,
            segment[source + done : source + done + len(target)],
            trailer,
            chunk=found.chunk,
            first_chunk=(piece.start + done) // found.chunk,
        )
        if bad >= 0:
            return SliceState.CORRUPT
    return SliceState.DONE


class MapJob:
    """Ask a node on this host for its segment's descriptor."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.mapping: Mapping | None = None
        self.done = False
        link.accepts_descriptors = True
        link.send(wire.pack(Kind.MAP, b""))

    def advance(self, events: int) -> None:
        """The link is ready."""
        self.link.advance(events, self)

    def payload(self, frame: Frame, body: bytes) -> memoryview:
        """None is expected."""
        raise WireError(f"frame kind {frame.kind} carries no payload", fix="")

    def frame(self, frame: Frame, body: bytes) -> None:
        """The descriptor comes with its answer."""
        if frame.kind != wire.reply(Kind.MAP) or not self.link.descriptors:
            raise WireError(f"a store answered MAP with frame kind {frame.kind}", fix="")
        fd = self.link.descriptors.pop()
        try:
            self.mapping = Mapping(fd, decode(body, MapReply))
        except (OSError, ValueError) as error:
            raise Unreachable(f"cannot map the segment of {self.link.address}: {error}", fix="") from error
        finally:
            os.close(fd)
        self.done = True

    def abandon(self, state: SliceState) -> None:
        """Give up."""
        self.link.close()
        self.done = True
