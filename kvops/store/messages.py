"""
Bodies of the master's frames: packed rows where they are many, msgpack structs where they are few.

Every row type is little-endian and pinned by golden bytes in the tests. Digests are 16 bytes a key, concatenated.

====================  =======================================  ==============================================
request               body                                     answer
====================  =======================================  ==============================================
EXISTS                digests                                  one byte a key: 1 present, 0 absent
LOOKUP                digests                                  LOOKUP_HEAD, LOCATION rows, EXTRA rows
PUT_START             PUT_HEAD, PUT_ROW rows                   PUT_REPLY_HEAD, statuses, padding to 8, LOCATIONs
MOVE_START            as PUT_START, by a store's own mover      as PUT_START
PUT_END               END_ROW rows                             one PutStatus byte a row
PUT_REVOKE            END_ROW rows                             one PutStatus byte a row
TOUCH                 digests                                  LOOKUP_HEAD, u64s: generations renewed, or 0
REMOVE                digests                                  one RemoveStatus byte a key
STAT                  digests                                  STAT_ROW rows
VIEW                  nothing                                  View
REPORT                Report                                   LOOKUP_HEAD
MOUNT                 Mount                                    Mounted
SLOTS                 SLOT_ROW rows; none: the end             FREE_ROW rows of slots to forget
BEAT                  Beat                                     BEAT_REPLY
FREE (from master)    FREE_HEAD, FREE_ROW rows                 FREE_ROW rows (all of them, when cleared)
LEAVE                 nothing                                  LEAVE_REPLY
MIGRATE (from master) MIGRATE                                  nothing; said again with every beat
MIGRATED              MIGRATED                                 nothing
UNMOUNT               nothing                                  nothing
JOIN                  Join                                     Joined
REPLICATE (leader)    ENTRYs, each with its body               ACK
====================  =======================================  ==============================================
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np

from kvops.store.model import LOCATION

LOOKUP_HEAD: Final = struct.Struct("<IIII")
"""View epoch, lease in ms (0: the group's breaker is open), count of EXTRA rows, reserved."""

EXTRA: Final = np.dtype([("index", "<u4"), ("reserved", "<u4"), ("location", LOCATION)])
"""A further replica of the key at ``index`` in the request."""
assert EXTRA.itemsize == 32


def newest_named(answer: bytes) -> int:
    """The highest generation in a LOOKUP's answer; 0 without a hit."""
    further = LOOKUP_HEAD.unpack_from(answer)[2]
    rows = (len(answer) - LOOKUP_HEAD.size - further * EXTRA.itemsize) // LOCATION.itemsize
    return int(np.frombuffer(answer, LOCATION, rows, LOOKUP_HEAD.size)["generation"].max(initial=0))


PUT_HEAD: Final = struct.Struct("<HHHHI")
"""Replicas, ObjectFlag, tenant, reserved, TTL in ms."""

PUT_ROW: Final = np.dtype([("digest", "<u8", (2,)), ("size", "<u4"), ("depth", "<u2"), ("reserved", "<u2")])
PUT: Final = struct.Struct("<16sIHH")  # the same, for one row
assert PUT_ROW.itemsize == PUT.size == 24

PUT_REPLY_HEAD: Final = struct.Struct("<II")
"""View epoch, replicas; then ``n`` PutStatus bytes, zeros up to a multiple of 8, ``n * replicas`` LOCATIONs."""

END_ROW: Final = np.dtype([("digest", "<u8", (2,)), ("generation", "<u8"), ("written", "<u8")])
"""``written``: bit i is set when replica i holds the whole object."""
END: Final = struct.Struct("<16sQQ")  # the same, for one row
assert END_ROW.itemsize == END.size == 32

STAT_ROW: Final = np.dtype(
    [
        ("location", LOCATION),
        ("age_ms", "<u4"),
        ("depth", "<u2"),
        ("tenant", "<u2"),
        ("ttl_left_ms", "<u4"),
        ("replicas", "<u4"),
    ]
)
assert STAT_ROW.itemsize == 40

FREE_HEAD: Final = struct.Struct("<Q")
"""The oldest generation whose put may still be under way: a node refuses to open slots below it."""

FREE_ROW: Final = np.dtype([("generation", "<u8"), ("offset", "<u8")])
assert FREE_ROW.itemsize == 16

SLOT_ROW: Final = np.dtype(
    [
        ("digest", "<u8", (2,)),
        ("generation", "<u8"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("chunk", "<u4"),
        ("depth", "<u2"),
        ("tenant", "<u2"),
        ("flags", "<u4"),
    ]
)
assert SLOT_ROW.itemsize == 48
BEAT_REPLY: Final = struct.Struct("<IIQ")
"""Term, 1 when the master no longer knows this mount, the FREE_HEAD floor."""


LEAVE_REPLY: Final = struct.Struct("<I")
"""For how many ms readers may still hold a lease on the store's memory; no new one is given."""


MIGRATE: Final = struct.Struct("<QQ")
"""Number of the hold, bits per second (0: no limit): copy what you hold elsewhere. Over when it is said no more."""

MIGRATED: Final = struct.Struct("<QQ")
"""Number of the hold, and how many objects found no room elsewhere: there is nothing left to copy."""


class PutStatus(IntEnum):
    """What became of one row of a put."""

    GRANTED = 0
    EXISTS = 1
    IN_PROGRESS = 2
    NO_SPACE = 3
    REFUSED = 4
    STORED = 5
    GONE = 6  # pre-empted, revoked, or its store was lost
    REVOKED = 7


class RemoveStatus(IntEnum):
    """What became of one key of a remove."""

    ABSENT = 0
    REMOVED = 1
    HIDDEN = 2  # no lookup names it; its store has not confirmed yet that the slot is cleared


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A store node offers its memory."""

    name: str
    host: str
    numa_node: int
    incarnation: int
    boot_id: str
    pid: int
    address: str
    unix_path: str
    http_address: str
    capacity_bytes: int
    populated_bytes: int
    highest_generation: int
    objects: int
    transports: list[str]


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """The master's answer: the id that locations will carry."""

    store_id: int
    term: int
    announce: bool  # the master does not know what the store holds: send the slot table
    floor: int  # as FREE_HEAD; to be raised before the first slot is announced


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A store node lives."""

    populated_bytes: int
    objects: int
    used_bytes: int
    loop_lag_ms: int  # since the data loop last ticked
    misplaced_bytes: int = 0  # of a segment that is bound to a NUMA node, on other ones


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A standby asks for the whole state, and for every operation after it."""

    name: str
    version: str


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The leader's answer; REPLICATE frames follow."""

    term: int
    now_ms: int  # on the leader's clock: times that objects expire at are on it


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A client's experience with a store."""

    store_id: int
    reason: str  # Reason
    stores: int  # that this client knows
    stores_down: int  # … and whose breaker is open
