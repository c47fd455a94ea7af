"""
The store node's logic, without I/O: request bodies in, answers out, and the bytes of its own segment between.

Only this writes the segment's headers and trailers. Payload is received by the shell straight into the memory
that ``write_begin`` names, and stops landing there once ``on_abort`` was called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvops.errors import WireError
from kvops.limits import KEYS_PER_BATCH_MAX
from kvops.net import wire
from kvops.net.wire import decode
from kvops.store import messages as m
from kvops.store.slots import Cleared, OpenStatus, Slot, SlotState, SlotTable
from kvops.transfer import messages as tm
from kvops.transfer.layout import (
    HEADER_BYTES,
    MAGIC_CLEARED,
    ObjectHeader,
    chunk_count,
    chunk_span,
    trailer_bytes,
)
from kvops.transfer.messages import NodeStatus
from kvops.transfer.model import READ_SLICES_PER_FRAME_MAX

_STATUS = {
    OpenStatus.FENCED: NodeStatus.STALE,
    OpenStatus.STALE: NodeStatus.STALE,
    OpenStatus.REVOKED: NodeStatus.STALE,
    OpenStatus.SEALED: NodeStatus.OK,
}


@dataclass(slots=True, eq=False)
class Write:
    """One range on its way into the segment; ``target`` is None when it is not wanted."""

    status: NodeStatus
    target: memoryview | None = None
    slot: Slot | None = None
    start: int = 0
    length: int = 0
    digests: bytes = b""
    sealed: bool = False
    on_abort: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One complete object in a store's memory, as a mover needs it."""

    digest: bytes
    key_digest: bytes
    key: bytes
    generation: int
    offset: int
    size: int
    chunk: int
    depth: int
    tenant: int
    flags: int
    payload: memoryview
    trailer: bytes


class NodeCore:
    """One node's slots and their memory."""

    def __init__(self, memory: memoryview, *, incarnation: int) -> None:
        self.incarnation = incarnation
        self.read_bytes_total = 0
        self.written_bytes_total = 0
        self.stale_total = 0
        self._memory = memory
        self._slots = SlotTable(len(memory), incarnation=incarnation)
        self._writes: dict[int, set[Write]] = {}  # by generation, under way

    @property
    def objects(self) -> int:
        """Complete objects."""
        return self._slots.complete_count

    @property
    def used_bytes(self) -> int:
        """Memory of slots, open and complete."""
        return self._slots.used_bytes

    @property
    def highest_generation(self) -> int:
        """The newest that was ever opened."""
        return self._slots.highest_generation

    # Writing.

    def write_begin(
        self, body: bytes, payload_bytes: int, *, on_abort: Callable[[], None] | None = None
    ) -> Write:
        """
        A WRITE body: open (or join) its slot and say where the payload goes.

        Args:
            body: WRITE_HEAD, key text, chunk digests.
            payload_bytes: Of its frame.
            on_abort: Called when the memory goes to somebody else while the payload comes in.

        Raises:
            WireError: The body contradicts itself.
        """
        try:
            fields = tm.WRITE_HEAD.unpack_from(body)
        except struct.error as error:
            raise WireError("a write is shorter than its head", fix="") from error
        (
            digest,
            key_digest,
            generation,
            offset,
            size,
            start,
            length,
            chunk,
            depth,
            tenant,
            flags,
            key_bytes,
        ) = fields
        digests_at = tm.WRITE_HEAD.size + key_bytes
        if (
            not length == payload_bytes > 0
            or not chunk
            or len(body) != digests_at + 8 * chunk_count(length, chunk)
        ):
            raise WireError("a write's lengths contradict each other", fix="")
        opened = self._slots.open(
            offset=offset,
            size=size,
            chunk=chunk,
            generation=generation,
            digest=digest,
            key_digest=key_digest,
            key=body[tm.WRITE_HEAD.size : digests_at],
            depth=depth,
            tenant=tenant,
            flags=flags,
        )
        self._clear(opened.cleared)
        if opened.slot is None:
            status = _STATUS.get(opened.status, NodeStatus.REFUSED)
            self.stale_total += status is NodeStatus.STALE
            return Write(status, sealed=opened.status is OpenStatus.SEALED)
        slot = self._slots.write_begin(generation, start, length)
        if slot is None:
            return Write(NodeStatus.REFUSED)
        at = slot.payload_at + start
        write = Write(
            NodeStatus.OK,
            self._memory[at : at + length],
            slot,
            start,
            length,
            body[digests_at:],
            on_abort=on_abort,
        )
        self._writes.setdefault(generation, set()).add(write)
        return write

    def write_end(self, write: Write) -> bytes:
        """The payload has come in: a WRITE_REPLY body. A whole object is sealed, its header written last."""
        slot = write.slot
        if slot is None:
            return tm.WRITE_REPLY.pack(write.status, write.sealed, 0)
        self._leave(write)
        if slot.state is not SlotState.OPEN:
            return tm.WRITE_REPLY.pack(NodeStatus.GONE, 0, 0)
        self.written_bytes_total += write.length
        whole = self._slots.write_done(slot, write.start, write.length, write.digests)
        if whole:
            self._seal(slot)
        return tm.WRITE_REPLY.pack(NodeStatus.OK, whole, 0)

    def write_lost(self, write: Write) -> None:
        """The writer's connection ended in the middle."""
        slot = write.slot
        if slot is None:
            return
        self._leave(write)
        if slot.state is SlotState.OPEN and self._slots.write_failed(slot):
            self._seal(slot)

    def _leave(self, write: Write) -> None:
        assert write.slot is not None
        writes = self._writes[write.slot.generation]
        writes.discard(write)
        if not writes:
            del self._writes[write.slot.generation]

    def _seal(self, slot: Slot) -> None:
        seal = self._slots.seal(slot)
        self._memory[seal.trailer_at : seal.trailer_at + len(seal.trailer)] = seal.trailer
        self._memory[seal.offset : seal.offset + HEADER_BYTES] = seal.header

    def _clear(self, cleared: tuple[Cleared, ...]) -> None:
        for gone in cleared:
            self._memory[gone.offset : gone.offset + len(MAGIC_CLEARED)] = MAGIC_CLEARED
            for write in self._writes.get(gone.generation, ()):
                write.target = None
                if write.on_abort is not None:
                    write.on_abort()

    # Freeing.

    def free(self, body: bytes) -> bytes:
        """A FREE body: clear those slots; FREE_ROW rows of all of them, cleared now or before."""
        floor = m.FREE_HEAD.unpack_from(body)[0]
        for generation, offset in np.frombuffer(body, m.FREE_ROW, offset=m.FREE_HEAD.size).tolist():
            cleared = self._slots.free(offset, generation)
            if cleared is not None:
                self._clear((cleared,))
        self.raise_floor(floor)
        return body[m.FREE_HEAD.size :]

    def raise_floor(self, generation: int) -> None:
        """No put below this generation is under way: none may be opened, what is open is given up."""
        self._clear(self._slots.raise_floor(generation))

    # Reading.

    def read(self, body: bytes) -> list[tuple[bytes, memoryview | None]]:
        """
        A READ body: for each row a READ_REPLY body (header and trailer behind it), and its payload.

        Raises:
            WireError: Not whole rows, or too many.
        """
        size = tm.READ_ROW.itemsize
        if len(body) % size or len(body) > size * READ_SLICES_PER_FRAME_MAX:
            raise WireError(f"a read of {len(body)} B", fix=f"at most {READ_SLICES_PER_FRAME_MAX} rows")
        return [self._read_one(*row) for row in np.frombuffer(body, tm.READ_ROW).tolist()]

    def _read_one(
        self, generation: int, offset: int, start: int, length: int
    ) -> tuple[bytes, memoryview | None]:
        slot = self._slots.find(offset, generation)
        if slot is None:
            self.stale_total += 1
            return tm.READ_REPLY.pack(NodeStatus.STALE, 0, 0), None
        if not length or start + length > slot.size:
            return tm.READ_REPLY.pack(NodeStatus.REFUSED, 0, 0), None
        if chunk_span(start, length, size=slot.size, chunk=slot.chunk) != (start, start + length):
            return tm.READ_REPLY.pack(NodeStatus.REFUSED, 0, 0), None
        payload_at = offset + HEADER_BYTES
        trailer_at = payload_at + slot.size
        trailer_size = trailer_bytes(slot.size, slot.chunk)
        head = b"".join(
            (
                tm.READ_REPLY.pack(NodeStatus.OK, 0, trailer_size),
                self._memory[offset:payload_at],
                self._memory[trailer_at : trailer_at + trailer_size],
            )
        )
        self.read_bytes_total += length
        return head, self._memory[payload_at + start : payload_at + start + length]

    # Moving.

    def sources(self, rows: NDArray[np.void]) -> list[Source | None]:
        """The objects at SLOT_ROW rows (generation and offset count); None where that is gone."""
        found: list[Source | None] = []
        for generation, offset in zip(rows["generation"].tolist(), rows["offset"].tolist(), strict=True):
            slot = self._slots.find(offset, generation)
            if slot is None:
                found.append(None)
                continue
            payload_at = offset + HEADER_BYTES
            trailer_at = payload_at + slot.size
            found.append(
                Source(
                    digest=slot.digest,
                    key_digest=ObjectHeader.unpack(self._memory[offset:payload_at]).key_digest,
                    key=slot.key,
                    generation=generation,
                    offset=offset,
                    size=slot.size,
                    chunk=slot.chunk,
                    depth=slot.depth,
                    tenant=slot.tenant,
                    flags=slot.flags,
                    payload=self._memory[payload_at:trailer_at],
                    trailer=bytes(
                        self._memory[trailer_at : trailer_at + trailer_bytes(slot.size, slot.chunk)]
                    ),
                )
            )
        return found

    # Looking.

    def announce(self, cursor: int, limit: int) -> tuple[bytes, int]:
        """SLOT_ROW rows from a cursor on, and the next; no rows at the end."""
        while cursor >= 0:
            rows, cursor = self._slots.announce(cursor, limit)
            if rows:
                return rows, cursor
        return b"", -1

    def list(self, body: bytes) -> bytes:
        """
        A ListQuery: a page of keys in the order in which they lie.

        Raises:
            WireError: Not a ListQuery, or an unreasonable one.
        """
        query = decode(body, tm.ListQuery)
        if not 0 < query.limit <= KEYS_PER_BATCH_MAX or query.cursor < 0:
            raise WireError(f"a page of {query.limit} keys", fix=f"ask for 1 to {KEYS_PER_BATCH_MAX}")
        page, cursor = self._slots.list_keys(query.prefix.encode(), query.limit, query.cursor)
        rows = [
            tm.KeyRow(
                key=s.key.decode("utf-8", "backslashreplace"),
                size_bytes=s.size,
                generation=s.generation,
                depth=s.depth,
            )
            for s in page
        ]
        return wire.encode(tm.ListReply(rows=rows, cursor=cursor))

    def check(self) -> None:
        """Assert what must hold between slots, and between them and memory; for tests: walks everything."""
        self._slots.check()
        for generation, writes in self._writes.items():
            assert writes, "a generation without writes is forgotten"
            for write in writes:
                assert write.slot is not None
                assert write.slot.generation == generation
                assert (write.target is None) == (write.slot.state is SlotState.GONE)
