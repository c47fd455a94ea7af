"""
A store node's own book of its segment: which writer may write where, and which objects are whole.

The node trusts this table, not its clients. A write names a generation; it is accepted only while that
generation holds the memory. A generation that comes later takes over whatever older ones it overlaps, so
that a writer that was stopped for an hour finds its memory gone, never in use by both.

A slot is OPEN while ranks write its parts, and COMPLETE once every chunk is covered and no write is under
way. An open slot is an object with its trailer; a complete one is one ``bytes`` of 48 + key: a million of
them are nothing the cyclic collector looks at. Pure: the shell moves bytes, and writes what ``seal``
returns.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kvops.limits import (
    ALIGN_BYTES,
    DEPTH_MAX,
    DIGEST_BYTES,
    KEY_BYTES_MAX,
    OBJECT_BYTES_MAX,
    PART_CHUNK_BYTES,
)
from kvops.store.messages import SLOT_ROW
from kvops.transfer.layout import (
    CHUNK_BYTES_MAX,
    CHUNK_DIGEST_BYTES,
    HEADER_BYTES,
    ObjectHeader,
    chunk_count,
    footprint_bytes,
    trailer_digest,
)

SLOT_ROW_BYTES: Final = 48
_ROW: Final = struct.Struct("<16sQQIIHHI")
_ROW_GENERATION: Final = struct.Struct("<Q")  # at 16
_ROW_SIZE_CHUNK: Final = struct.Struct("<II")  # at 32
assert SLOT_ROW.itemsize == _ROW.size == SLOT_ROW_BYTES

REGION_BITS: Final = 26  # 64 MiB: 1,000 pages of 64 KiB to a sorted array
SLOTS_OPEN_MAX: Final = 65_536  # puts under way at one node
REVOKED_MAX: Final = 65_536  # generations remembered that were freed before they were opened
LIST_SCAN_MAX: Final = 4_096  # slots looked at in one call of ``list_keys``
assert OBJECT_BYTES_MAX < 1 << 32, "a row's size is a u32"


class SlotState(StrEnum):
    """A slot's life."""

    OPEN = "open"
    COMPLETE = "complete"
    GONE = "gone"  # aborted or cleared: what is still being received for it must not land


class OpenStatus(StrEnum):
    """What became of a writer's first message."""

    OPENED = "opened"
    JOINED = "joined"  # another rank of the same put was first
    SEALED = "sealed"  # the object is whole already
    FENCED = "fenced"  # from before the floor: another master rules now
    STALE = "stale"  # the memory belongs to a later generation
    REVOKED = "revoked"  # the master freed this generation before its writer came
    MISMATCH = "mismatch"  # the same generation with another shape or key
    INVALID = "invalid"  # outside the segment, not aligned, or beyond a bound
    BUSY = "busy"  # too many open slots


@dataclass(slots=True, eq=False)
class Slot:
    """An open slot: one put's memory, and how much of it has been written."""

    offset: int  # of the header, in the segment
    size: int
    chunk: int
    generation: int
    digest: bytes  # the index's
    key_digest: bytes  # the header's
    key: bytes
    depth: int
    tenant: int
    flags: int
    footprint: int  # bytes of the segment it takes
    state: SlotState = SlotState.OPEN
    writes: int = 0  # under way
    missing: int = field(init=False)  # chunks no write has covered
    covered: bytearray = field(init=False)  # a byte a chunk
    trailer: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.missing = chunk_count(self.size, self.chunk)
        self.covered = bytearray(self.missing)
        self.trailer = bytearray(self.missing * CHUNK_DIGEST_BYTES)

    @property
    def payload_at(self) -> int:
        """Where its payload begins in the segment."""
        return self.offset + HEADER_BYTES

    @property
    def shape(self) -> tuple[int, int, int, bytes, bytes, int]:
        """What every rank of one put says alike."""
        return self.offset, self.size, self.chunk, self.key_digest, self.key, self.flags


class Sealed(NamedTuple):
    """A complete slot."""

    digest: bytes
    generation: int
    offset: int
    size: int
    chunk: int
    depth: int
    tenant: int
    flags: int
    key: bytes

    @property
    def footprint(self) -> int:
        """Bytes of the segment it takes."""
        return footprint_bytes(self.size, self.chunk)


def _sealed(row: bytes) -> Sealed:
    return Sealed._make((*_ROW.unpack_from(row), row[SLOT_ROW_BYTES:]))


class Cleared(NamedTuple):
    """A slot that lost its memory: the shell zeroes the magic at ``offset`` and stops its writers."""

    offset: int
    generation: int
    footprint: int
    slot: Slot | None  # when it was open


class Opened(NamedTuple):
    """The answer to ``open``."""

    status: OpenStatus
    slot: Slot | None = None  # to write to, when OPENED or JOINED
    cleared: tuple[Cleared, ...] = ()


class Seal(NamedTuple):
    """What the shell writes to make an object readable: the trailer first, the header last."""

    offset: int
    header: bytes
    trailer_at: int
    trailer: bytes


class SlotTable:
    """
    All slots of one segment.

    Args:
        segment_bytes: Size of the segment.
        incarnation: Of this node's process; goes into every header.
        chunk_bytes_min: Smallest chunk a writer may choose; bounds the trailer.
    """

    def __init__(
        self, segment_bytes: int, *, incarnation: int, chunk_bytes_min: int = PART_CHUNK_BYTES
    ) -> None:
        self.segment_bytes = segment_bytes
        self.incarnation = incarnation
        self.floor = 0
        self.highest_generation = 0
        self.complete_count = 0
        self.used_bytes = 0  # footprints of all slots, open and complete
        self._chunk_bytes_min = chunk_bytes_min
        regions = (segment_bytes >> REGION_BITS) + 1
        self._starts = [array("Q") for _ in range(regions)]  # offsets of live slots, ascending
        self._rows: list[dict[int, bytes]] = [{} for _ in range(regions)]  # offset → row and key, if complete
        self._occupied = 0  # bit set: regions in which a slot starts
        self._open: dict[int, Slot] = {}  # by generation
        self._open_at: dict[int, Slot] = {}  # by offset
        self._revoked: dict[int, None] = {}  # oldest first

    def open(
        self,
        *,
        offset: int,
        size: int,
        chunk: int,
        generation: int,
        digest: bytes,
        key_digest: bytes,
        key: bytes,
        depth: int = 0,
        tenant: int = 0,
        flags: int = 0,
    ) -> Opened:
        """
        Let a put have its memory: each rank's first message.

        Refused for a generation below the floor, and where a later one holds any of the memory; every older
        slot that it overlaps is cleared. Opening again what is open joins it. Nothing changes on a refusal.
        """
        footprint = footprint_bytes(size, chunk) if chunk >= self._chunk_bytes_min else 0
        if not (
            footprint
            and 0 <= size <= OBJECT_BYTES_MAX
            and chunk <= CHUNK_BYTES_MAX
            and not chunk & (chunk - 1)
            and 0 <= offset <= self.segment_bytes - footprint
            and not offset % ALIGN_BYTES
            and 0 < generation < 1 << 64
            and len(digest) == len(key_digest) == DIGEST_BYTES
            and 0 < len(key) <= KEY_BYTES_MAX
            and 0 <= depth <= DEPTH_MAX
            and 0 <= tenant < 1 << 16
            and 0 <= flags < 1 << 32
        ):
            return Opened(OpenStatus.INVALID)
        if generation < self.floor:
            return Opened(OpenStatus.FENCED)
        if generation in self._revoked:
            return Opened(OpenStatus.REVOKED)
        shape = (offset, size, chunk, key_digest, key, flags)
        ours = self._open.get(generation)
        if ours is not None:
            return Opened(OpenStatus.JOINED, ours) if ours.shape == shape else Opened(OpenStatus.MISMATCH)
        overlapped = self._overlapping(offset, offset + footprint)
        for other in overlapped:
            if other.generation > generation:
                return Opened(OpenStatus.STALE)
            if other.generation == generation:
                sealed = self.find(offset, generation)
                whole = sealed is not None and (sealed.size, sealed.chunk, sealed.key) == (size, chunk, key)
                return Opened(OpenStatus.SEALED if whole else OpenStatus.MISMATCH)
        if len(self._open) >= SLOTS_OPEN_MAX:
            return Opened(OpenStatus.BUSY)
        for other in overlapped:
            self._remove(other)
        slot = Slot(
            offset,
            size,
            chunk,
            generation,
            digest,
            key_digest,
            key,
            depth,
            tenant,
            flags,
            footprint,
        )
        self._insert(slot)
        return Opened(OpenStatus.OPENED, slot, tuple(overlapped))

    def write_begin(self, generation: int, offset: int, length: int) -> Slot | None:
        """
        Ask whether a part may be received into its slot.

        Args:
            generation: Of an open slot.
            offset: In the payload, a multiple of the chunk.
            length: Up to another multiple, or to the payload's end.

        Returns:
            The slot, to be handed to ``write_done`` or ``write_failed``; the shell lets nothing land once its
            state is no longer OPEN. None when the generation holds no memory (any more), or the part is not
            made of its chunks.
        """
        slot = self._open.get(generation)
        if slot is None or not 0 <= offset <= offset + length <= slot.size:
            return None
        if offset % slot.chunk or ((offset + length) % slot.chunk and offset + length != slot.size):
            return None
        if length == 0 and slot.size:
            return None
        slot.writes += 1
        return slot

    def write_done(self, slot: Slot, offset: int, length: int, digests: bytes) -> bool:
        """
        Note that a part has landed.

        A part that was written before may be written again: retries and ranks may overlap.

        Args:
            slot: What ``write_begin`` returned, for the same ``offset`` and ``length``.
            offset: In the payload.
            length: Of the part.
            digests: Of its chunks, 8 bytes each, as the writer computed them.

        Returns:
            True when the object is whole and nobody writes any more: call ``seal``.
        """
        first = offset // slot.chunk
        last = first + chunk_count(length, slot.chunk)
        assert len(digests) == (last - first) * CHUNK_DIGEST_BYTES, "a digest a chunk"
        slot.missing -= slot.covered[first:last].count(0)
        slot.covered[first:last] = b"\x01" * (last - first)
        slot.trailer[first * CHUNK_DIGEST_BYTES : last * CHUNK_DIGEST_BYTES] = digests
        return self.write_failed(slot)

    def write_failed(self, slot: Slot) -> bool:
        """End a write that did not land, or only in part; returns what ``write_done`` does."""
        assert slot.writes > 0, "a write ends once"
        slot.writes -= 1
        return slot.state is SlotState.OPEN and not slot.missing and not slot.writes

    def seal(self, slot: Slot) -> Seal:
        """Make a whole object COMPLETE; the shell writes trailer and header before it answers the writer."""
        assert slot.state is SlotState.OPEN, "sealed once"
        assert not slot.missing, "every byte is covered"
        assert not slot.writes, "nobody writes to it"
        slot.state = SlotState.COMPLETE
        del self._open[slot.generation], self._open_at[slot.offset]
        row = _ROW.pack(
            slot.digest,
            slot.generation,
            slot.offset,
            slot.size,
            slot.chunk,
            slot.depth,
            slot.tenant,
            slot.flags,
        )
        self._rows[slot.offset >> REGION_BITS][slot.offset] = row + slot.key
        self.complete_count += 1
        trailer = bytes(slot.trailer)
        header = ObjectHeader(
            incarnation=self.incarnation,
            generation=slot.generation,
            key_digest=slot.key_digest,
            size=slot.size,
            chunk=slot.chunk,
            trailer_digest=trailer_digest(trailer, slot.generation),
        )
        return Seal(slot.offset, header.pack(), slot.payload_at + slot.size, trailer)

    def find(self, offset: int, generation: int) -> Sealed | None:
        """The complete slot of exactly this generation at this offset, for a read."""
        if not 0 <= offset < self.segment_bytes:
            return None
        row = self._rows[offset >> REGION_BITS].get(offset)
        if row is None or _ROW_GENERATION.unpack_from(row, 16)[0] != generation:
            return None
        return _sealed(row)

    def free(self, offset: int, generation: int) -> Cleared | None:
        """
        Take the memory from exactly this generation, open or complete.

        Returns:
            What was freed, or None when this generation does not hold the memory. Either way it is
            remembered, so that a writer who comes after the master gave up on it is refused.
        """
        slot = self._open.get(generation)
        if slot is not None and slot.offset == offset:
            return self.abort_writer(generation)
        sealed = self.find(offset, generation)
        if sealed is None:
            if slot is None:
                self._revoke(generation)
            return None
        cleared = Cleared(offset, generation, sealed.footprint, None)
        self._remove(cleared)
        self._revoke(generation)  # a rank that comes late would open it again
        return cleared

    def abort_writer(self, generation: int) -> Cleared | None:
        """
        Drop an open slot for good: its put was revoked. A complete one stays.

        A connection that broke is not yet a revoked put: the writer may come back to an open slot.
        """
        slot = self._open.get(generation)
        if slot is None:
            return None
        cleared = Cleared(slot.offset, generation, slot.footprint, slot)
        self._remove(cleared)
        self._revoke(generation)
        return cleared

    def raise_floor(self, generation: int) -> tuple[Cleared, ...]:
        """
        Refuse every ``open`` below this generation from now on, and abort what is open below it.

        A new master calls it before it reads the table: no put that it does not know can complete afterwards.
        """
        self.floor = max(self.floor, generation)
        self.highest_generation = max(self.highest_generation, generation)
        aborted = [self._at(slot.offset) for slot in self._open.values() if slot.generation < self.floor]
        for cleared in aborted:
            self._remove(cleared)
        self._revoked = {old: None for old in self._revoked if old >= self.floor}
        return tuple(aborted)

    def announce(self, cursor: int, limit: int) -> tuple[bytes, int]:
        """
        Rows of complete slots in order of their offset.

        Args:
            cursor: 0 to begin; then what the last call returned.
            limit: Slots to look at, at most.

        Returns:
            ``SLOT_ROW`` rows, and the next cursor; -1 at the end.
        """
        rows: list[bytes] = []
        for scanned, offset in enumerate(self._walk(cursor)):
            if scanned >= limit:
                return b"".join(rows), offset
            row = self._rows[offset >> REGION_BITS].get(offset)
            if row is not None:
                rows.append(row[:SLOT_ROW_BYTES])
        return b"".join(rows), -1

    def list_keys(self, prefix: bytes, limit: int, cursor: int = 0) -> tuple[list[Sealed], int]:
        """
        Complete slots whose key starts with ``prefix``, in order of their offset.

        Returns:
            At most ``limit`` of them, and the next cursor; -1 at the end. Looks at a bounded number of slots,
            so a page may be empty although more follow.
        """
        found: list[Sealed] = []
        for scanned, offset in enumerate(self._walk(cursor)):
            if len(found) >= limit or scanned >= LIST_SCAN_MAX:
                return found, offset
            row = self._rows[offset >> REGION_BITS].get(offset)
            if row is not None and row.startswith(prefix, SLOT_ROW_BYTES):
                found.append(_sealed(row))
        return found, -1

    def check(self) -> None:
        """Assert every invariant, in time proportional to the slots; for tests."""
        offsets = list(self._walk(0))
        assert offsets == sorted(set(offsets))
        assert self._occupied == sum(1 << region for region, starts in enumerate(self._starts) if starts)
        assert all(at >> REGION_BITS == region for region, starts in enumerate(self._starts) for at in starts)
        end = 0
        used = 0
        for offset in offsets:
            slot = self._at(offset)
            assert offset >= end, "no two slots share a byte"
            end = offset + slot.footprint
            used += slot.footprint
        assert end <= self.segment_bytes
        assert used == self.used_bytes
        assert sum(len(rows) for rows in self._rows) == self.complete_count
        assert len(offsets) == self.complete_count + len(self._open)
        assert {slot.offset: slot for slot in self._open.values()} == self._open_at
        assert all(slot.state is SlotState.OPEN for slot in self._open.values())
        assert all(slot.missing == slot.covered.count(0) for slot in self._open.values())
        assert all(slot.generation >= self.floor for slot in self._open.values())

    def _walk(self, cursor: int) -> Iterator[int]:
        """Offsets of live slots from ``cursor`` on, ascending."""
        region = cursor >> REGION_BITS
        regions = self._occupied >> region << region
        while regions:
            region = (regions & -regions).bit_length() - 1
            regions &= regions - 1
            starts = self._starts[region]
            yield from starts[bisect_left(starts, cursor) :]

    def _at(self, offset: int) -> Cleared:
        slot = self._open_at.get(offset)
        if slot is not None:
            return Cleared(offset, slot.generation, slot.footprint, slot)
        row = self._rows[offset >> REGION_BITS][offset]
        footprint = footprint_bytes(*_ROW_SIZE_CHUNK.unpack_from(row, 32))
        return Cleared(offset, _ROW_GENERATION.unpack_from(row, 16)[0], footprint, None)

    def _overlapping(self, offset: int, end: int) -> list[Cleared]:
        """Live slots that share a byte with ``[offset, end)``; as none overlap, one at most starts before."""
        region = offset >> REGION_BITS
        starts = self._starts[region]
        at = bisect_right(starts, offset)
        before = -1
        if at:
            before = starts[at - 1]
        elif lower := self._occupied & ((1 << region) - 1):
            before = self._starts[lower.bit_length() - 1][-1]
        found = []
        if before >= 0:
            slot = self._at(before)
            if before + slot.footprint > offset:
                found.append(slot)
        if at < len(starts) and starts[at] >= end:
            return found  # the common case: its neighbour begins behind it
        for start in self._walk(offset + 1):
            if start >= end:
                break
            found.append(self._at(start))
        return found

    def _revoke(self, generation: int) -> None:
        # Bounded: forgetting one costs memory until it is taken over, never a wrong byte.
        if generation >= self.floor:
            self._revoked[generation] = None
            if len(self._revoked) > REVOKED_MAX:
                del self._revoked[next(iter(self._revoked))]

    def _insert(self, slot: Slot) -> None:
        region = slot.offset >> REGION_BITS
        starts = self._starts[region]
        if not starts:
            self._occupied |= 1 << region
        starts.insert(bisect_left(starts, slot.offset), slot.offset)
        self._open[slot.generation] = slot
        self._open_at[slot.offset] = slot
        self.used_bytes += slot.footprint
        self.highest_generation = max(self.highest_generation, slot.generation)

    def _remove(self, cleared: Cleared) -> None:
        offset, generation, footprint, slot = cleared
        region = offset >> REGION_BITS
        if slot is not None:
            slot.state = SlotState.GONE
            del self._open[generation], self._open_at[offset]
        else:
            del self._rows[region][offset]
            self.complete_count -= 1
        starts = self._starts[region]
        del starts[bisect_left(starts, offset)]
        if not starts:
            self._occupied ^= 1 << region
        self.used_bytes -= footprint
