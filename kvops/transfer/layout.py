"""
How an object lies in a segment, and how a reader proves that what it copied is that object.

::

    Object, at a multiple of 64 bytes:   header (64 B) | payload | trailer (8 B a chunk) | padding to 64 B

    ObjectHeader. Little-endian, 64 bytes; the node writes it last, and clears its magic before reuse.
    offset  0  magic           4 s   b"KVOB"
            4  layout          u16   1
            6  flags           u16   0; a reader refuses flags it does not know
            8  incarnation     u64   of the node's process
           16  generation      u64   of the allocation; what a location must name exactly
           24  key_digest     16 s   blake2b of namespace and key
           40  size            u64   of the payload, in bytes
           48  chunk           u32   payload bytes one digest of the trailer covers
           52  reserved        u32   0
           56  trailer_digest  u64   xxh3_64 of the trailer, seeded with the generation

    Trailer: xxh3_64 of each chunk, in canonical (big-endian) form, in order.

A flipped bit anywhere is found: of the payload by its chunk's digest, of the trailer by the header's, of the
header by comparison with what the reader was told, or because the trailer then no longer fits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvops.errors import ParseError
from kvops.limits import (
    ALIGN_BYTES,
    CHUNK_BYTES,
    COPY_BYTES_MAX,
    DIGEST_BYTES,
    OBJECT_BYTES_MAX,
    PART_CHUNK_BYTES,
)

MAGIC: Final = b"KVOB"
MAGIC_CLEARED: Final = bytes(4)
"""What the node writes over the magic of a slot before its memory is given away."""
LAYOUT: Final = 1
HEADER: Final = struct.Struct("<4sHHQQ16sQIIQ")
HEADER_BYTES: Final = 64
CHUNK_DIGEST_BYTES: Final = 8
CHUNK_BYTES_MIN: Final = 64  # what a reader accepts: powers of two in this range
CHUNK_BYTES_MAX: Final = COPY_BYTES_MAX
assert HEADER.size == HEADER_BYTES == ALIGN_BYTES
assert CHUNK_BYTES_MIN <= PART_CHUNK_BYTES <= CHUNK_BYTES <= CHUNK_BYTES_MAX

_EXPECTED: Final = struct.Struct("<4sHHQQ16sQ")  # the part a reader knows beforehand
_REST: Final = struct.Struct("<IIQ")
assert _EXPECTED.size + _REST.size == HEADER_BYTES


class Mismatch(StrEnum):
    """Why memory does not hold the object a location names; checked in this order."""

    CLEARED = "cleared"  # the slot was freed
    DAMAGED = "damaged"  # no header of ours, or one that contradicts itself
    LAYOUT_UNKNOWN = "layout_unknown"  # written by a newer version
    FOREIGN = "foreign"  # by another process: the node was restarted
    STALE = "stale"  # another allocation: the memory was given to another object
    OTHER_KEY = "other_key"  # two keys collide in the index
    OTHER_SIZE = "other_size"


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """The 64 bytes before a payload."""

    incarnation: int
    generation: int
    key_digest: bytes
    size: int
    chunk: int
    trailer_digest: int
    flags: int = 0

    def pack(self) -> bytes:
        """The header's 64 bytes."""
        assert len(self.key_digest) == DIGEST_BYTES, "struct would pad or cut it in silence"
        return HEADER.pack(
            MAGIC,
            LAYOUT,
            self.flags,
            self.incarnation,
            self.generation,
            self.key_digest,
            self.size,
            self.chunk,
            0,
            self.trailer_digest,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> ObjectHeader:
        """
        Read a header from the first 64 bytes of ``data``.

        Raises:
            ParseError: They are not a header of this version.
        """
        if len(data) < HEADER_BYTES:
            raise ParseError(
                f"an object header of {len(data)} B; it has {HEADER_BYTES}", fix="read the whole header"
            )
        magic, layout, flags, incarnation, generation, key, size, chunk, zero, trailer = HEADER.unpack_from(
            data
        )
        if magic != MAGIC:
            raise ParseError(
                f"not an object header: starts with {magic!r}", fix="the slot is free or the offset wrong"
            )
        if layout != LAYOUT or flags:
            raise ParseError(
                f"an object of layout {layout}, flags {flags:#x}; this side reads {LAYOUT} without flags",
                fix="upgrade this side",
            )
        if zero or not _possible(size, chunk):
            raise ParseError(
                f"a damaged object header: size {size}, chunk {chunk}, reserved {zero}",
                fix="treat it as a miss",
            )
        return cls(incarnation, generation, key, size, chunk, trailer)


def _possible(size: int, chunk: int) -> bool:
    return (
        size <= OBJECT_BYTES_MAX and CHUNK_BYTES_MIN <= chunk <= CHUNK_BYTES_MAX and not chunk & (chunk - 1)
    )


Count = TypeVar("Count", int, NDArray[np.int64])


def chunk_count(size: Count, chunk: Count) -> Count:
    """Chunks that ``size`` bytes of payload make; the last may be short."""
    return -(-size // chunk)


def trailer_bytes(size: Count, chunk: Count) -> Count:
    """Bytes of the trailer behind ``size`` bytes of payload."""
    return chunk_count(size, chunk) * CHUNK_DIGEST_BYTES


def footprint_bytes(size: Count, chunk: Count) -> Count:
    """Bytes an object takes in a segment: header, payload, trailer and padding, a multiple of 64."""
    return (HEADER_BYTES + size + trailer_bytes(size, chunk) + ALIGN_BYTES - 1) & -ALIGN_BYTES


def chunk_digests(data: memoryview, chunk: int) -> bytes:
    """
    The trailer (or a part's share of it) for ``data``; the writer's side.

    Args:
        data: Bytes, contiguous; a part starts at a chunk's boundary.
        chunk: Payload bytes a digest covers.

    Returns:
        8 bytes a chunk.
    """
    assert data.itemsize == 1, "lengths are in bytes"
    return b"".join([xxh3_64_digest(data[at : at + chunk]) for at in range(0, len(data), chunk)])


def trailer_digest(trailer: bytes | bytearray | memoryview, generation: int) -> int:
    """What the header says of the trailer; the seed ties it to one allocation."""
    return xxh3_64_intdigest(trailer, generation)


def verify_header(
    header: bytes | bytearray | memoryview, *, incarnation: int, generation: int, key_digest: bytes, size: int
) -> ObjectHeader | Mismatch:
    """
    Compare a header that was read with what the location and the caller say.

    Args:
        header: 64 bytes.
        incarnation: Of the store, as its view entry or handshake gave it.
        generation: Of the location.
        key_digest: Of the key that was asked for, in its namespace.
        size: Of the location.
    """
    expected = _EXPECTED.pack(MAGIC, LAYOUT, 0, incarnation, generation, key_digest, size)
    if header[: _EXPECTED.size] == expected:
        chunk, reserved, trailer = _REST.unpack_from(header, _EXPECTED.size)
        if reserved or not _possible(size, chunk):
            return Mismatch.DAMAGED
        return ObjectHeader(incarnation, generation, key_digest, size, chunk, trailer)
    return _difference(header, incarnation, generation, key_digest)


def _difference(
    header: bytes | bytearray | memoryview, incarnation: int, generation: int, key_digest: bytes
) -> Mismatch:
    magic, layout, flags, its_incarnation, its_generation, its_key, _size = _EXPECTED.unpack_from(header)
    if magic == MAGIC_CLEARED:
        return Mismatch.CLEARED
    if magic != MAGIC:
        return Mismatch.DAMAGED
    if layout != LAYOUT or flags:
        return Mismatch.LAYOUT_UNKNOWN
    if its_incarnation != incarnation:
        return Mismatch.FOREIGN
    if its_generation != generation:
        return Mismatch.STALE
    if its_key != key_digest:
        return Mismatch.OTHER_KEY
    return Mismatch.OTHER_SIZE


def verify_trailer(header: ObjectHeader, trailer: bytes | bytearray | memoryview) -> bool:
    """Whether the trailer is the one the header was sealed with."""
    return (
        len(trailer) == trailer_bytes(header.size, header.chunk)
        and xxh3_64_intdigest(trailer, header.generation) == header.trailer_digest
    )


def verify_chunks(
    data: memoryview, trailer: bytes | bytearray | memoryview, *, chunk: int, first_chunk: int = 0
) -> int:
    """
    Compare a payload, or a range of it, with a trailer that was verified.

    Args:
        data: Bytes from the boundary of chunk ``first_chunk`` up to another boundary or the payload's end.
        trailer: Of the whole object.
        chunk: Of the header.
        first_chunk: Index of the chunk that ``data`` starts with.

    Returns:
        Index, in the object, of the first chunk that differs; -1 when none does.
    """
    wanted = _wanted(data, trailer, chunk, first_chunk)
    digests = [xxh3_64_digest(data[at : at + chunk]) for at in range(0, len(data), chunk)]
    if b"".join(digests) == wanted:
        return -1
    return first_chunk + _first_difference(digests, wanted)


def copy_verified(
    target: memoryview,
    source: memoryview,
    trailer: bytes | bytearray | memoryview,
    *,
    chunk: int,
    first_chunk: int = 0,
) -> int:
    """
    Copy a payload out of mapped memory and verify the copy, each chunk while it is in the CPU's cache.

    What is verified is ``target``: the source may change meanwhile. At most ``COPY_BYTES_MAX`` a call keeps
    the caller near its deadline. Arguments and result are those of ``verify_chunks``.
    """
    assert len(target) == len(source), "a copy has the length of its source"
    assert target.itemsize == source.itemsize == 1, "lengths are in bytes"
    wanted = _wanted(source, trailer, chunk, first_chunk)
    digests: list[bytes] = []
    if chunk >= CHUNK_BYTES:
        for at in range(0, len(source), chunk):
            piece = target[at : at + chunk]
            piece[:] = source[at : at + chunk]
            digests.append(xxh3_64_digest(piece))
    else:  # small chunks are copied together: a slice costs as much as 2 KiB of copy
        for at in range(0, len(source), CHUNK_BYTES):
            piece = target[at : at + CHUNK_BYTES]
            piece[:] = source[at : at + CHUNK_BYTES]
            digests += [xxh3_64_digest(piece[small : small + chunk]) for small in range(0, len(piece), chunk)]
    if b"".join(digests) == wanted:
        return -1
    return first_chunk + _first_difference(digests, wanted)


def _wanted(
    data: memoryview, trailer: bytes | bytearray | memoryview, chunk: int, first_chunk: int
) -> bytes | bytearray | memoryview:
    first = first_chunk * CHUNK_DIGEST_BYTES
    last = first + trailer_bytes(len(data), chunk)
    assert last <= len(trailer), "the range lies within the object"
    return trailer[first:last]


def _first_difference(digests: list[bytes], wanted: bytes | bytearray | memoryview) -> int:
    return next(index for index, digest in enumerate(digests) if wanted[index * 8 : index * 8 + 8] != digest)


def chunk_span(offset: int, length: int, *, size: int, chunk: int) -> tuple[int, int]:
    """
    The range to read so that ``[offset, offset + length)`` can be verified.

    Returns:
        Start and end in the payload, in bytes: whole chunks, the last cut at ``size``.
    """
    assert 0 <= offset <= offset + length <= size, "the range lies within the object"
    return offset - offset % chunk, min(size, chunk_count(offset + length, chunk) * chunk)
