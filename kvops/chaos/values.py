"""
Values that say what they are: whose key, which writer, which of its puts, whole or not.

::

    offset  0   magic    8 s   b"kvopsval"
            8   seq      u64   of the writer's puts; little-endian, like the rest
           16   size     u64   of the whole value, header included
           24   writer   16 s  UTF-8, zero-padded
           40   key      32 B  BLAKE2b-256 of the key
           72   check    8 B   BLAKE2b-64 of the 72 bytes above
           80   body           counter mode of xxh3 over the header: byte i depends on header and i alone

So every 8 aligned bytes of the body tell whether they belong to this header, without the server's help and
without a table of what was written: a body that fits another header of the same key is torn, not flipped.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvops.chaos.history import Content

MAGIC: Final = b"kvopsval"
HEADER: Final = struct.Struct("<8sQQ16s32s")
HEADER_BYTES: Final = 80
VALUE_BYTES_MIN: Final = HEADER_BYTES
WRITER_BYTES_MAX: Final = 16
FLIPPED_SHARE_MAX: Final = 0.05
"""More foreign words than this in one body are another value's bytes, not flipped bits."""
assert HEADER.size + 8 == HEADER_BYTES

# SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words without visible structure.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Which put a value came from."""

    writer: str
    seq: int

    def __str__(self) -> str:
        return f"{self.writer}:{self.seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the bytes of one read are."""

    content: Content
    version: Version | None  # as the header says; None when it cannot be read
    detail: str = ""


def key_digest(key: str) -> bytes:
    """32 bytes that stand for the key."""
    return hashlib.blake2b(key.encode(), digest_size=32).digest()


def make(key: str, *, writer: str, seq: int, size_bytes: int) -> bytes:
    """
    The value of one put.

    Args:
        key: Any text.
        writer: At most ``WRITER_BYTES_MAX`` bytes of UTF-8, unique in the run.
        seq: Counts this writer's puts; never used twice.
        size_bytes: Of the whole value, ``VALUE_BYTES_MIN`` at least.
    """
    name = writer.encode()
    assert 0 < len(name) <= WRITER_BYTES_MAX, f"writer {writer!r} does not fit {WRITER_BYTES_MAX} bytes"
    assert size_bytes >= VALUE_BYTES_MIN, f"a value has {VALUE_BYTES_MIN} bytes at least, not {size_bytes}"
    head = HEADER.pack(MAGIC, seq, size_bytes, name, key_digest(key))
    head += hashlib.blake2b(head, digest_size=8).digest()
    return head + _body(head, size_bytes - HEADER_BYTES).tobytes()


def digest(value: bytes | memoryview) -> str:
    """What the history keeps of a value: 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(value)


def _body(head: bytes, size: int) -> NDArray[np.uint8]:
    words = np.arange(-(-size // 8), dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = (words + np.uint64(xxhash.xxh3_64_intdigest(head))) * _GOLDEN
        words = (words ^ (words >> np.uint64(30))) * _MIX_1
        words = (words ^ (words >> np.uint64(27))) * _MIX_2
        words ^= words >> np.uint64(31)
    return words.astype("<u8").view(np.uint8)[:size]


def judge(
    key: str,
    data: bytes | memoryview,
    *,
    size_bytes: int | None = None,
    newest: Callable[[str], Version | None] | None = None,
    known: Iterable[Version] = (),
) -> Judged:
    """
    What a read of ``key`` returned.

    Args:
        key: Whose value it should be.
        data: The bytes.
        size_bytes: How long the value must be, where the reader knows.
        newest: The version of a key that every later read must see, where the reader knows: an older one is
            stale. Without it, staleness is for the checkers, which see everybody's puts.
        known: Versions of this key whose bytes may have got into a torn value.
    """
    view = memoryview(data)
    head = bytes(view[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        return Judged(content=Content.TORN, version=None, detail=f"{len(head)} bytes are less than a header")
    magic, seq, size, name, whose = HEADER.unpack_from(head)
    intact = hashlib.blake2b(head[: HEADER.size], digest_size=8).digest() == head[HEADER.size :]
    if not intact:
        # Most of the magic is there: bits of a header changed. None of it: something else's bytes.
        near = sum(a == b for a, b in zip(magic, MAGIC, strict=True))
        content = Content.FLIPPED if near >= len(MAGIC) - 2 else Content.TORN
        return Judged(content=content, version=None, detail="the header does not check")
    version = Version(writer=name.rstrip(b"\0").decode(errors="replace"), seq=seq)
    if whose != key_digest(key):
        return Judged(content=Content.CROSS_KEY, version=version, detail="a value of another key")
    if size != len(view) or (size_bytes is not None and size != size_bytes):
        return Judged(content=Content.TORN, version=version, detail=f"{len(view)} of {size} bytes")
    found = np.frombuffer(view[HEADER_BYTES:], dtype=np.uint8)
    wrong = found != _body(head, len(found))
    if wrong.any():
        return _damaged(key, found, wrong, version=version, known=known)
    if newest is not None:
        latest = newest(key)
        if latest is not None and latest.writer == version.writer and version.seq < latest.seq:
            return Judged(content=Content.STALE, version=version, detail=f"{latest} had replaced it")
    return Judged(content=Content.WHOLE, version=version)


def _damaged(
    key: str,
    found: NDArray[np.uint8],
    wrong: NDArray[np.bool_],
    *,
    version: Version,
    known: Iterable[Version],
) -> Judged:
    first, count = int(np.argmax(wrong)) + HEADER_BYTES, int(wrong.sum())
    where = f"{count} bytes differ, the first at {first}"
    for other in known:
        size = len(found) + HEADER_BYTES
        body = np.frombuffer(make(key, writer=other.writer, seq=other.seq, size_bytes=size), dtype=np.uint8)
        if other != version and (found[wrong] == body[HEADER_BYTES:][wrong]).all():
            return Judged(content=Content.TORN, version=version, detail=f"{where}, bytes of {other}")
    content = Content.FLIPPED if count <= max(1, FLIPPED_SHARE_MAX * len(found)) else Content.TORN
    return Judged(content=content, version=version, detail=where)
