"""
Bodies of the frames between a client and a store node.

====================  =======================================  ==============================================
request               body                                     answer
====================  =======================================  ==============================================
WRITE                 WRITE_HEAD, key, digests; payload        WRITE_REPLY
READ                  READ_ROW rows                            a frame a row: READ_REPLY, header, trailer; payload
MAP                   nothing                                  MapReply, with the segment's descriptor
LIST                  ListQuery                                ListReply
REGISTER              REGISTER head; then 1 B, a descriptor    GO_ON, then REGISTERED; or NOT_REGISTERED at once
WRITE_REGISTERED      one or more: SOURCE, and as for WRITE    WRITE_REPLY rows
====================  =======================================  ==============================================
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np

WRITE_HEAD: Final = struct.Struct("<16s16sQQIIIIHHHH")
"""Digests of index and key, generation, offset, size, part offset and length, chunk, depth, tenant, flags, key size."""

REGISTER: Final = struct.Struct("<IIQ")
"""A number the connection knows the region by, reserved, its size in bytes."""

GO_ON, REGISTERED, NOT_REGISTERED = b"\0", b"\1", b"\2"
"""The store waits for the descriptor; has taken it; takes none, go on by socket."""

SOURCE: Final = struct.Struct("<IIQQ")
"""A registered region, bytes of the WRITE body that follows, offset and length of the payload in the region."""

WRITE_REPLY: Final = struct.Struct("<HHI")
"""NodeStatus, 1 when the object is whole and sealed, reserved."""

READ_ROW: Final = np.dtype([("generation", "<u8"), ("offset", "<u8"), ("start", "<u4"), ("length", "<u4")])
"""``start`` and ``length`` in bytes of payload, chunk-aligned but for the object's end."""
assert READ_ROW.itemsize == 24

READ_REPLY: Final = struct.Struct("<HHI")
"""NodeStatus, reserved, trailer bytes that follow the 64-byte header (the whole trailer)."""


class NodeStatus(IntEnum):
    """What a node says to one write or read."""

    OK = 0
    STALE = 1  # no such generation at that offset
    REFUSED = 2  # bounds, or a shape that does not fit the slot
    GONE = 3  # the slot was given to somebody else while the payload came in


class MapReply(msgspec.Struct, frozen=True, kw_only=True):
    """The segment whose descriptor comes with this frame."""

    incarnation: int
    segment_bytes: int


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of one store, by prefix."""

    prefix: str
    limit: int
    cursor: int  # 0 to begin; then what the last page said


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One key of one store."""

    key: str
    size_bytes: int
    generation: int
    depth: int


class ListReply(msgspec.Struct, frozen=True, kw_only=True):
    """A page of keys, in the order in which they lie; ``cursor`` is -1 at the end."""

    rows: list[KeyRow]
    cursor: int
