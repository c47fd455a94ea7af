"""The words of the pool: outcomes, options, locations, and what master and clients know of its stores."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from operator import index
from typing import Final, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvops.errors import UsageError
from kvops.limits import CHUNK_BYTES, PART_CHUNK_BYTES, REPLICAS_MAX, TENANT_MAX, TTL_MS_MAX

StoreId = NewType("StoreId", int)
"""A mount of one store node at one master: a restarted node gets a new one. 1 to 65,535."""

Generation = NewType("Generation", int)
"""An allocation's age, unique in a group for ever: master term in the high 24 bits, sequence in the low 40."""

GENERATION_SEQUENCE_BITS: Final = 40

LOCATION: Final = np.dtype(
    [
        ("generation", "<u8"),
        ("offset", "<u8"),  # of the object's header, from the start of the segment, in bytes
        ("size", "<u4"),  # of the payload, in bytes
        ("store", "<u2"),  # 0: no such object
        ("flags", "<u2"),  # ObjectFlag
    ]
)
"""Where one replica lies: 24 bytes, the same in the index and on the wire."""
LOCATION_ROW: Final = struct.Struct("<QQIHH")
"""The same, for one row."""
assert LOCATION.itemsize == LOCATION_ROW.size == 24

Locations = NDArray[np.void]
"""Rows of ``LOCATION``."""
Slots = NDArray[np.int64]
"""Positions in the master's per-object arrays; 0 is "absent"."""
Digests = NDArray[np.uint64]
"""Key digests, shape ``[keys, 2]``: xxh3_128 of namespace and key, as two little-endian words."""


class ObjectFlag:
    """What a location says beside where. Plain ints: masking an IntFlag costs 2 µs, once or more an object."""

    SOFT_PIN: Final = 1  # evicted last
    HARD_PIN: Final = 2  # never evicted
    HAS_TTL: Final = 4  # the master keeps an expiry for it
    REPLICATED: Final = 8  # further replicas follow the rows of a lookup's reply
    PARTS: Final = 16  # written by several ranks, in chunks of PART_CHUNK_BYTES


PERMANENT_FLAGS: Final = ObjectFlag.SOFT_PIN | ObjectFlag.HARD_PIN | ObjectFlag.PARTS
"""Flags a writer may ask for; the others are the master's own."""


def chunk_of(flags: int) -> int:
    """The chunk size of an object, in bytes."""
    return PART_CHUNK_BYTES if flags & ObjectFlag.PARTS else CHUNK_BYTES


def chunks_of(flags: NDArray[np.uint16]) -> NDArray[np.int64]:
    """``chunk_of``, for many."""
    return np.where(flags & ObjectFlag.PARTS, np.int64(PART_CHUNK_BYTES), np.int64(CHUNK_BYTES))


class Reason(StrEnum):
    """Why a key's outcome is what it is."""

    HIT = "HIT"
    STORED = "STORED"
    EXISTS = "EXISTS"
    MISS = "MISS"
    TIMEOUT = "TIMEOUT"
    STORE_DOWN = "STORE_DOWN"
    MASTER_DOWN = "MASTER_DOWN"
    BREAKER_OPEN = "BREAKER_OPEN"
    CORRUPT = "CORRUPT"
    STALE = "STALE"
    NO_SPACE = "NO_SPACE"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one key in one call."""

    ok: bool
    reason: Reason
    size_bytes: int = 0
    store: str | None = None
    replicas: int = 0  # of a put that was STORED: how many were written


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    """
    How an object is to be kept.

    Raises:
        UsageError: A number is none, or beyond what the wire carries.
    """

    replicas: int = 1
    soft_pin: bool = False
    hard_pin: bool = False
    ttl_ms: int = 0  # 0: until evicted
    tenant: int = 0

    def __post_init__(self) -> None:
        """Refuse here what would otherwise fail somewhere below."""
        for name, value, least, most in (
            ("replicas", self.replicas, 1, REPLICAS_MAX),
            ("ttl_ms", self.ttl_ms, 0, TTL_MS_MAX),
            ("tenant", self.tenant, 0, TENANT_MAX),
        ):
            try:
                fits = least <= index(value) <= most
            except TypeError:
                fits = False
            if not fits:
                raise UsageError(f"{name} {value!r}", fix=f"use a whole number from {least} to {most}")


class PlacementPolicy(StrEnum):
    """How the master chooses stores for a put."""

    LOCAL_FIRST = "local-first"
    RANDOM = "random"


class StoreState(StrEnum):
    """A mounted store's life at the master."""

    ANNOUNCING = "announcing"  # its slot table is still being read: serves, allocates nothing
    READY = "ready"
    SUSPECTED = "suspected"  # silent or reported: hidden from lookups until it beats again
    DRAINING = "draining"  # hidden on purpose: held by a drain, or about to end
    GONE = "gone"


class HoldKind(StrEnum):
    """What an operator keeps a store from."""

    CORDON = "cordon"  # new objects; what it holds is read
    DRAIN = "drain"  # everything


class HoldState(StrEnum):
    """How far a hold has come."""

    CORDONED = "cordoned"
    MIGRATING = "migrating"  # its objects are copied elsewhere; until then it is only cordoned
    DRAINING = "draining"  # nothing names it; leases end, then its metadata is swept
    DRAINED = "drained"  # counted: nothing is left
    LOST = "lost"  # its store died meanwhile; the hold stays
    LIFTED = "lifted"  # by undrain; the next sweep of the journal forgets it


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """
    An operator's word about a store, or about every store of a host, in whatever life of its process.

    This much is durable: it is one row of a journal entry, and of what standbys are told.
    """

    number: int  # all targets of one command share it
    target: str  # name of a store, or of a host
    host: bool  # the target is a host
    kind: HoldKind
    state: HoldState
    reason: str
    owner: str  # user@machine
    since: str  # RFC 3339, UTC
    migrate: bool = False
    bandwidth_bps: int = 0  # of the migration, bits per second; 0: no limit


class HoldInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A hold as operators see it, with its progress; sums over its mounted stores."""

    number: int
    target: str
    host: bool
    kind: HoldKind
    state: HoldState
    reason: str
    owner: str
    since: str
    migrate: bool
    bandwidth_bps: int
    stores: list[str]  # mounted now
    objects_at_call: int
    bytes_at_call: int
    leases_left_ms: int  # until the last lease given before the call has ended; 0: they have
    swept: int
    left: int  # counted after the sweep; -1: not counted yet
    objects: int  # that are there now
    migrated: int
    migrated_bytes: int
    unmoved: int  # objects that a migration could not place elsewhere


class StopCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to "may this be taken away?"; a check that says no refuses, unless it is forced by name."""

    name: str
    ok: bool
    text: str
    fix: str = ""


class HoldReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request about holds, or would."""

    holds: list[HoldInfo]
    checks: list[StopCheck] = []
    unchanged: list[str] = []  # targets that were so already; of ok_to_stop, those that hold masters alone
    capacity_bytes: int = 0  # of these targets' stores, as far as they serve
    pool_bytes: int = 0  # of all that serve
    pool_used_bytes: int = 0


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients need to reach a store, and operators to know it."""

    id: int
    name: str
    host: str  # logical: placement and failure domains go by it
    numa_node: int
    incarnation: int  # u64, new at every start of the process
    boot_id: str  # of the machine: decides whether its memory can be mapped
    pid: int
    address: str  # host:port of the tcp transport
    unix_path: str  # "" when it has none
    http_address: str
    state: StoreState
    capacity_bytes: int
    populated_bytes: int
    used_bytes: int
    objects: int
    transports: list[str]


class ClientInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A client connected to the master."""

    name: str
    host: str
    pid: int
    connections: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """The stores a client may meet in locations; the epoch grows with every change."""

    epoch: int
    term: int
    stores: list[StoreInfo]


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a master from doing its part."""

    code: str
    text: str
    fix: str


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """What a standby knows that is to lead without being in the in-sync set."""

    term: int  # the last one that it knows of
    members: list[str]  # the set that it replaces
    objects: int  # the stores' own word is added when it leads
    holds: int


class MasterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kvops status`` asks a master for."""

    group: str
    name: str
    host: str
    pid: int
    address: str
    role: str
    term: int
    uptime_s: float
    placement: PlacementPolicy
    objects: int
    processing: int
    capacity_bytes: int
    used_bytes: int
    evicted_total: int
    lookups_total: int
    hits_total: int
    breaker_open: bool
    stores: list[StoreInfo]
    clients: list[ClientInfo]
    holds: list[HoldInfo] = []
    sequence: int = 0  # of the last operation: done, at a leader; applied, at a standby
    members: list[str] = []  # the in-sync set: who may lead next
    promotable: bool = True  # it leads, or could at once with everything that was acknowledged
    etcd_silent_ms: int = 0  # since etcd last answered it; 0: it does, or there is none
    troubles: list[Trouble] = []


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change worth a line in ``kvops events``."""

    time: str  # RFC 3339, UTC
    event: str  # noun.past_verb
    subject: str
    actor: str
    detail: dict[str, str | int | float | bool]
