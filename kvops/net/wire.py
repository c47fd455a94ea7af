"""
The wire's frames: a checked header, a body of packed arrays or msgpack, and raw payload after it.

::

    FrameHeader, before every frame. Little-endian, 32 bytes.
    offset  0  magic     4 s   b"KVOP"
            4  version   u16   a peer accepts this and the one before
            6  kind      u16
            8  body      u32   bytes of encoded body that follow
           12  request   u32   echoed in the answer
           16  payload   u64   raw bytes after the body; their digests are the object's own
           24  flags     u32   must-understand bits low, may-ignore bits high
           28  crc32     u32   of bytes 0–27; checked before any field is used
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import msgspec

from kvops.errors import WireError
from kvops.limits import BODY_BYTES_MAX, OBJECT_BYTES_MAX

MAGIC: Final = b"KVOP"
VERSION: Final = 1
VERSION_MIN: Final = 1
HEADER: Final = struct.Struct("<4sHHIIQII")
HEADER_BYTES: Final = 32
assert HEADER.size == HEADER_BYTES
_CRC: Final = struct.Struct("<I")
_FLAGS_MUST_UNDERSTAND: Final = 0xFFFF

PAYLOAD_BYTES_MAX: Final = OBJECT_BYTES_MAX

T = TypeVar("T")


class Kind(IntEnum):
    """What a frame is. Numbers are never reused; a reply is its request's kind + 1."""

    # Handshake, on every connection before anything else.
    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    ERROR = 5

    # Client → master.
    EXISTS = 16
    LOOKUP = 18
    PUT_START = 20
    PUT_END = 22
    PUT_REVOKE = 24
    TOUCH = 26
    REMOVE = 28
    VIEW = 30
    REPORT = 32
    STAT = 34
    MOVE_START = 36

    # Store → master, and the master's commands back on the same connection.
    MOUNT = 64
    SLOTS = 66
    BEAT = 68
    FREE = 70
    UNMOUNT = 72
    LEAVE = 74
    MIGRATE = 76
    MIGRATED = 78

    # Standby → leader, and the leader's operations back on the same connection.
    JOIN = 80
    REPLICATE = 82

    # Client → store.
    WRITE = 96
    READ = 98
    MAP = 100
    LIST = 104
    REGISTER = 106
    WRITE_REGISTERED = 108


def reply(kind: int) -> int:
    """The kind of the answer to a request."""
    return kind + 1


class Frame(NamedTuple):
    """One decoded header."""

    kind: int
    body_bytes: int
    request: int
    payload_bytes: int
    flags: int


def pack_header(kind: int, body_bytes: int, request: int, payload_bytes: int = 0, flags: int = 0) -> bytes:
    """The 32 bytes before a frame's body."""
    head = HEADER.pack(MAGIC, VERSION, kind, body_bytes, request, payload_bytes, flags, 0)[:28]
    return head + _CRC.pack(crc32(head))


def pack(kind: int, body: bytes, request: int = 0, payload_bytes: int = 0) -> bytes:
    """Header and body of a frame; the payload is sent after it by the caller."""
    return pack_header(kind, len(body), request, payload_bytes) + body


def unpack_header(data: bytes | bytearray | memoryview) -> Frame:
    """
    Read the first 32 bytes of a frame.

    Raises:
        WireError: Not a frame of ours, damaged, from an unknown version, or beyond a bound.
    """
    magic, version, kind, body_bytes, request, payload_bytes, flags, crc = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(
            f"not a kvops frame: starts with {magic!r}", fix="check that the address is a kvops port"
        )
    if crc32(data[:28]) != crc:
        raise WireError("a frame's header is damaged: its checksum does not fit", fix="")
    if not VERSION_MIN <= version <= VERSION:
        raise WireError(
            f"a frame of wire version {version}; this side speaks {VERSION_MIN} to {VERSION}",
            fix="upgrade one side: neighbouring versions work together",
        )
    if flags & _FLAGS_MUST_UNDERSTAND:
        raise WireError(
            f"a frame with unknown must-understand flags {flags & _FLAGS_MUST_UNDERSTAND:#x}", fix=""
        )
    if body_bytes > BODY_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise WireError(
            f"a frame of {body_bytes} B body and {payload_bytes} B payload;"
            f" at most {BODY_BYTES_MAX} and {PAYLOAD_BYTES_MAX} are accepted",
            fix="send smaller batches",
        )
    return Frame(kind, body_bytes, request, payload_bytes, flags)


def encode(body: msgspec.Struct) -> bytes:
    """A msgpack body."""
    return msgspec.msgpack.encode(body)


def decode(body: bytes | memoryview, kind: type[T]) -> T:
    """
    Decode a msgpack body.

    Raises:
        WireError: Not of that kind.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame's body is no {kind.__name__}: {error}", fix="") from error
