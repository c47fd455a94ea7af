"""
The master's logic, without I/O: requests and the time go in, replies and frames for others come out.

One event loop owns it; nothing here locks, waits or reads a clock. What must be sent to a connection other than
the caller's, or later than now, is left in ``out``; what must be remembered, in ``journal``.

An object's life::

    put_start  →  PROCESSING (puts)  →  put_end  →  COMPLETE (index)  →  evicted, removed or replaced
                       │                                                    │
                       └── revoked, pre-empted, store lost ──→  releasing (stores)  →  free (allocator)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvops.errors import Refused, WireError
from kvops.limits import (
    ALIGN_BYTES,
    DIGEST_BYTES,
    KEYS_PER_FRAME_MAX,
    LEASE_TTL_MS,
    OBJECT_BYTES_MAX,
    PROCESSING_MAX,
    PUT_TTL_MS,
    PUTS_PER_FRAME_MAX,
    REPLICAS_MAX,
    STORE_SILENT_MS,
    STORE_TTL_MS,
)
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store.allocator import SEGMENT_BYTES_MAX
from kvops.store.breaker import REPORT_HOSTS_MIN, REPORT_WINDOW_MS, BreakerState, GroupBreaker
from kvops.store.drain import Cause, Holds, Sweep, Sweeper
from kvops.store.eviction import Evictor
from kvops.store.journal import COMPLETE, COMPLETE_ROW, EXPIRES_ROW, GONE_ROW, LESS_ROW, Recovery
from kvops.store.journal import Kind as JournalKind
from kvops.store.lease import LeaseTable
from kvops.store.messages import PutStatus, RemoveStatus
from kvops.store.model import (
    GENERATION_SEQUENCE_BITS,
    LOCATION,
    LOCATION_ROW,
    ClientInfo,
    Digests,
    Generation,
    Hold,
    ObjectFlag,
    PlacementPolicy,
    Slots,
    StoreId,
    StoreInfo,
    StoreState,
    View,
    chunk_of,
    chunks_of,
)
from kvops.store.objects import Objects, Place, with_ttl
from kvops.store.placement import RAMP_MS, Candidate, Placement, Ramp, Writer, choose
from kvops.store.puts import Put, PutTable
from kvops.store.stores import SERVING, Store, StoreTable
from kvops.transfer.layout import footprint_bytes

U32: Final = 0xFFFFFFFF
TICK_MS: Final = 100
SUSPECT_MS: Final = 2_000  # a store stays hidden on its readers' evidence
ORPHAN_MS: Final = 5_000  # a put outlives the connection of its last writer, which may come back by another
REMOVED_MAX: Final = 65_536  # removed keys remembered, so that a store that was lost does not bring them back
REMOVE_WAIT_MS: Final = 200  # a remove replies HIDDEN when a node has not cleared its slot by then
EVICT_INTERVAL_MS: Final = 10
CLAMP_SLOTS: Final = 512  # a tick; a round over 16 M slots takes an hour, and one is due within 24 days
RESTORE_BATCH: Final = 65_536
EVICT_SLICE: Final = 64  # objects; about 0.1 ms, and at most some 100 slices a second (field measurements)
SPLIT_SLICE: Final = 64  # buckets, after a response
PERMANENT_FLAGS: Final = ObjectFlag.SOFT_PIN | ObjectFlag.HARD_PIN | ObjectFlag.PARTS
"""Flags a writer may ask for; the others are the master's own."""


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What must be remembered: rows of COMPLETE_ROW, GONE_ROW or EXPIRES_ROW, a store, or holds."""

    kind: JournalKind
    rows: NDArray[np.void] | None = None
    store: StoreInfo | None = None
    holds: tuple[Hold, ...] = ()

    def encode(self) -> tuple[JournalKind, int, bytes]:
        """Kind, count of rows and body, as the journal and the standbys get it."""
        if self.rows is not None:
            return self.kind, len(self.rows), self.rows.tobytes()
        if self.holds:
            return self.kind, len(self.holds), msgspec.msgpack.encode(self.holds)
        return self.kind, 1, msgspec.msgpack.encode(self.store)


@dataclass(frozen=True, slots=True)
class CoreEvent:
    """A change worth a line in ``kvops events``."""

    time_ms: int  # on the core's clock
    event: str
    subject: str
    detail: dict[str, str | int | float | bool]


@dataclass(slots=True)
class _Remove:
    """A remove that waits for nodes to clear slots."""

    conn: int
    request: int
    status: bytearray
    waiting: int
    deadline_ms: int


@dataclass(slots=True)
class _Conn:
    """A connection that proved the secret."""

    hello: Hello
    writer: Writer
    store: Store | None = None


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened since the master started."""

    puts: int = 0
    evicted: int = 0
    removed: int = 0
    preempted: int = 0
    no_space: int = 0
    adopted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings:
    """What an operator may set."""

    group: str
    placement: PlacementPolicy = PlacementPolicy.LOCAL_FIRST
    eviction_high_watermark: float = 0.95
    eviction_low_watermark: float = 0.93
    objects_max: int = 16_000_000
    ramp_ms: int = RAMP_MS
    seed: int = 0


class MasterCore:
    """The pool's directory: which key lies where, who may hold it, and where the next one goes."""

    def __init__(self, settings: MasterSettings, *, term: int, now_ms: int) -> None:
        self.settings = settings
        self.term = term
        self.objects = Objects(objects_max=settings.objects_max)
        self.index = self.objects.index
        self.stores = StoreTable(self.index.set_hidden)
        self.puts = PutTable()
        self.counters = Counters()
        self.out: list[tuple[int, bytes]] = []
        self.journal: list[JournalEntry] = []
        self.events: list[CoreEvent] = []
        self.breaker = GroupBreaker(rng=Random(settings.seed))
        self._leases = LeaseTable(self.index.touched_ms)
        self._evictor = Evictor(self.index, seed=settings.seed)
        self._placement = Placement(settings.placement, seed=settings.seed)
        self._ramp = Ramp(ramp_ms=settings.ramp_ms)
        self._candidates: tuple[int, list[Candidate]] = (0, [])
        self._sequence = 0
        self._conns: dict[int, _Conn] = {}
        self._removes: dict[tuple[StoreId, Generation], tuple[_Remove, int]] = {}
        self._removes_open: deque[_Remove] = deque()
        self._orphans: deque[tuple[int, Put]] = deque()  # since when a put has had no writer's connection
        self._removed: dict[bytes, Generation] = {}  # key digest → the newest generation that a remove meant
        self._unconfirmed: set[Store] = set()  # those of which the index may say more than they hold
        self.sweeper = Sweeper(
            self.objects,
            self.stores,
            self.puts,
            drop=self._drop_from,
            unindex=self._unindex,
            unplace=self._unplace,
            release=self._release_replica,
            revoke=self._take_place,
            done=self._swept,
            requests=lambda: self.index.lookups_total + self.counters.puts,
        )
        self.holds = Holds(
            self.stores,
            self.sweeper,
            remember=lambda holds: self.journal.append(JournalEntry(JournalKind.HOLDS, holds=tuple(holds))),
            settle=lambda store, now: self._settle(store, now_ms=now),
            leases_end_ms=self._leases_end_ms,
            event=self._event,
        )
        self._leases_seen = 0  # hits and touches so far, as the timer last saw them
        self._touches = 0
        self._leased_ms = now_ms  # when it last saw new ones; a former master may have given some until now
        self._started_ms = now_ms
        self._pressure_bytes = 0  # a put found no room for this much: evict, whatever the watermark says
        self._evicting = False
        self._earlier_leases_end_ms = now_ms  # a new leader waits for the leases of the one before
        self._left: list[tuple[StoreId, int, int]] = []  # memory that those may lie on
        self._ticked_ms = now_ms
        self._paused_ms = 0
        self._last_evict_ms = now_ms

    # Connections.

    def connected(self, conn: int, hello: Hello) -> None:
        """A peer has proved the secret."""
        self._conns[conn] = _Conn(hello, Writer(hello.host, hello.numa_node))

    def disconnected(self, conn: int, *, now_ms: int) -> None:
        """A peer's connection ended: its store is hidden at once, its unfinished puts are anybody's."""
        peer = self._conns.pop(conn, None)
        if peer is None:
            return
        self._orphans += [(self._awake_ms(now_ms), put) for put in self.puts.leave(conn)]
        store = peer.store
        if store is not None and store.conn == conn:
            store.conn = 0
            store.seen_ms = now_ms
            if store.state in (StoreState.READY, StoreState.ANNOUNCING):
                self.stores.set_state(store, StoreState.SUSPECTED)
                self._event(now_ms, "store.suspected", store.mount.name, reason="its connection closed")

    @property
    def breaker_open(self) -> bool:
        """Whether the group's breaker keeps everybody away."""
        return self.breaker.state is BreakerState.OPEN

    def clients(self) -> list[ClientInfo]:
        """Who is connected, one row a process."""
        rows: dict[tuple[str, str, int], int] = {}
        for peer in self._conns.values():
            if peer.hello.role == "client":
                key = (peer.hello.name, peer.hello.host, peer.hello.pid)
                rows[key] = rows.get(key, 0) + 1
        return [ClientInfo(name=n, host=h, pid=p, connections=c) for (n, h, p), c in sorted(rows.items())]

    def handle(self, conn: int, kind: int, request: int, body: bytes, *, now_ms: int) -> bytes | None:
        """
        One request of a connection; the answer's body, or None when it follows through ``out``.

        Raises:
            WireError: The request breaks the protocol: the caller closes the connection.
        """
        if kind == Kind.LOOKUP:
            return self.lookup(body, now_ms=now_ms)
        if kind == Kind.EXISTS:
            return self.exists(body, now_ms=now_ms)
        peer = self._conns[conn]
        if kind in _STORE_KINDS and peer.hello.role != "store":
            raise WireError(f"a {peer.hello.role} sent a store's frame, kind {kind}", fix="")
        if peer.store is not None:
            peer.store.seen_ms = now_ms
        match kind:
            case Kind.PUT_START:
                return self._put_start(conn, peer.writer, body, now_ms=now_ms)
            case Kind.MOVE_START:
                return self._move_start(conn, peer.hello, body, now_ms=now_ms)
            case Kind.PUT_END:
                return self._put_end(conn, body, now_ms=now_ms)
            case Kind.PUT_REVOKE:
                return self._put_revoke(body, now_ms=now_ms)
            case Kind.TOUCH:
                return self._touch(body, now_ms=now_ms)
            case Kind.REMOVE:
                return self._remove(conn, request, body, now_ms=now_ms)
            case Kind.STAT:
                return self._stat(body, now_ms=now_ms)
            case Kind.VIEW:
                return msgspec.msgpack.encode(self.view())
            case Kind.REPORT:
                return self._report(peer.hello, decode(body, m.Report), now_ms=now_ms)
            case Kind.MOUNT:
                return self._mount(conn, peer, decode(body, m.Mount), now_ms=now_ms)
            case Kind.SLOTS:
                return self._announce(self._store_of(peer), body, now_ms=now_ms)
            case Kind.BEAT:
                return self._beat(peer, decode(body, m.Beat), now_ms=now_ms)
            case Kind.MIGRATED:
                self._migrated(self._store_of(peer), body, now_ms=now_ms)
                return b""
            case Kind.LEAVE:
                return self._leave(self._store_of(peer), now_ms=now_ms)
            case Kind.UNMOUNT:
                self._lose(self._store_of(peer), now_ms=now_ms, reason="it was stopped")
                return b""
            case _ if kind == wire.reply(Kind.FREE):
                self._freed(self._store_of(peer), body, now_ms=now_ms)
                return None
            case _:
                raise WireError(f"a master got frame kind {kind}", fix="")

    # Reading.

    def exists(self, digests: bytes, *, now_ms: int) -> bytes:
        """One byte a key: whether it is readable. Touches nothing."""
        _check_digests(digests)
        return self.objects.exists(digests, now_ms=now_ms)

    def lookup(self, digests: bytes, *, now_ms: int) -> bytes:
        """Where each key lies, with a lease on every hit: LOOKUP_HEAD, LOCATION rows, EXTRA rows."""
        _check_digests(digests)
        if self.breaker_open:
            misses = bytes(len(digests) // DIGEST_BYTES * LOCATION.itemsize)
            return m.LOOKUP_HEAD.pack(self.stores.epoch, 0, 0, 0) + misses
        rows, further = self.objects.lookup(digests, now_ms=now_ms)
        return (
            m.LOOKUP_HEAD.pack(self.stores.epoch, LEASE_TTL_MS, len(further) // m.EXTRA.itemsize, 0)
            + rows
            + further
        )

    def _touch(self, digests: bytes, *, now_ms: int) -> bytes:
        """Renew leases and recency: for reads that take long, and for hits in an engine's own memory."""
        _check_digests(digests)
        renewed = self.objects.touch(digests, now_ms=now_ms)
        self._touches += 1
        return self._head(renewed)

    def _stat(self, digests: bytes, *, now_ms: int) -> bytes:
        _check_digests(digests)
        return self.objects.stat(digests, now_ms=now_ms)

    def _head(self, renewed: int = 0) -> bytes:
        return m.LOOKUP_HEAD.pack(self.stores.epoch, 0 if self.breaker_open else LEASE_TTL_MS, 0, renewed)

    def view(self) -> View:
        """The stores that locations may name."""
        return View(epoch=self.stores.epoch, term=self.term, stores=[store.info() for store in self.stores])

    # Writing.

    def _put_start(self, conn: int, writer: Writer, body: bytes, *, now_ms: int) -> bytes:
        replicas, flags, tenant, _, ttl_ms = _unpack(m.PUT_HEAD, body)
        rows = _rows(body, m.PUT_ROW, start=m.PUT_HEAD.size, count_max=PUTS_PER_FRAME_MAX)
        if not 1 <= replicas <= REPLICAS_MAX:
            raise WireError(f"a put with {replicas} replicas; 1 to {REPLICAS_MAX}", fix="")
        count = len(rows)
        flags &= PERMANENT_FLAGS
        if ttl_ms:
            flags |= ObjectFlag.HAS_TTL
        status = bytearray(count)
        granted: list[bytes] = []
        nothing = bytes(replicas * LOCATION_ROW.size)
        digests = np.ascontiguousarray(rows["digest"])
        slots = self.index.find(digests)
        readable = self.objects.readable(slots, now_ms=now_ms).tolist()
        sizes, depths, raw = rows["size"].tolist(), rows["depth"].tolist(), digests.tobytes()
        order = self._placement.order(writer, self._ready(), epoch=self.stores.epoch)
        random = self.settings.placement is PlacementPolicy.RANDOM
        for row, slot in enumerate(slots.tolist()):
            granted.append(nothing)
            if readable[row]:
                self.index.touched_ms[slot] = now_ms & U32
                status[row] = PutStatus.EXISTS
                continue
            # An object whose store is away stays until its successor is whole.
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self.puts.get(digest)
            if put is not None:
                put = self._without_drained(put, now_ms=now_ms)
            joins = put is not None and flags & put.flags & ObjectFlag.PARTS and put.size == sizes[row]
            if put is not None and (
                self._awake_ms(now_ms) - put.started_ms >= PUT_TTL_MS
                or not (put.writers or joins)  # a dead writer's
            ):
                self._preempt(put, now_ms=now_ms)
                put = None
            if put is None:
                if random:
                    order = self._placement.order(writer, self._ready(), epoch=self.stores.epoch)
                size, depth = sizes[row], depths[row]
                made = self._start(
                    digest, size, writer, order, replicas, flags, tenant, depth, ttl_ms, now_ms=now_ms
                )
                if not isinstance(made, Put):
                    status[row] = made
                    continue
                put = made
            elif not joins:
                status[row] = PutStatus.IN_PROGRESS
                continue
            self.puts.join(put, conn)
            rows_out = [
                LOCATION_ROW.pack(put.generation, offset, put.size, store, put.flags)
                for store, offset in put.places[:replicas]
            ]
            granted[row] = b"".join(rows_out).ljust(len(nothing), b"\0")
        head = m.PUT_REPLY_HEAD.pack(self.stores.epoch, replicas)
        return b"".join((head, status, bytes(-count % 8), *granted))

    def _start(
        self,
        digest: bytes,
        size: int,
        writer: Writer,
        order: Sequence[Candidate],
        replicas: int,
        flags: int,
        tenant: int,
        depth: int,
        ttl_ms: int,
        *,
        now_ms: int,
        presses: bool = True,
    ) -> Put | PutStatus:
        """Give a new put its memory, or say why not; one that ``presses`` has others evicted for the next try."""
        if not 0 < size <= OBJECT_BYTES_MAX or len(self.puts) >= PROCESSING_MAX:
            return PutStatus.REFUSED
        footprint = footprint_bytes(size, chunk_of(flags))
        ramp = self._ramp
        places = choose(
            order,
            self.stores.allocators,
            footprint=footprint,
            replicas=replicas,
            admits=(
                (lambda store: ramp.admits(store, writer, store_count=len(order))) if ramp.active else None
            ),
        )
        if places is None:
            if presses:
                self._press(footprint, replicas)
                self.counters.no_space += 1
            return PutStatus.NO_SPACE
        if replicas > 1:
            flags |= ObjectFlag.REPLICATED
        generation = self._next_generation()
        if ramp.active:
            ramp.note(store_id for store_id, _ in places)
        started_ms = self._awake_ms(now_ms)
        put = Put(digest, generation, size, footprint, depth, tenant, flags, ttl_ms, started_ms, places)
        self.puts.add(put)
        return put

    def _move_start(self, conn: int, hello: Hello, body: bytes, *, now_ms: int) -> bytes:
        """
        A store that is to be drained copies what it holds: puts of keys that are readable, to take their place.

        Everything but place and generation stays as it is. EXISTS: it is readable elsewhere as well. REFUSED: it
        is not there any more, or this store is not to be emptied.
        """
        rows = _rows(body, m.PUT_ROW, start=m.PUT_HEAD.size, count_max=PUTS_PER_FRAME_MAX)
        source = self.stores.named(hello.name)
        status = bytearray(len(rows))
        granted = [bytes(LOCATION_ROW.size)] * len(rows)
        if source is None or self.holds.migrating(source) is None:
            status = bytearray([PutStatus.REFUSED]) * len(rows)
            rows = rows[:0]
        digests = np.ascontiguousarray(rows["digest"])
        slots = self.index.find(digests)
        readable = self.objects.readable(slots, now_ms=now_ms).tolist()
        raw, sizes = digests.tobytes(), rows["size"].tolist()
        for row, slot in enumerate(slots.tolist()):
            assert source is not None
            generation, _, size, _, flags = self.index.location[slot].tolist()
            if not readable[row] or size != sizes[row]:
                status[row] = PutStatus.REFUSED
                continue
            held = [self.stores.get(place[0]) for place in self.objects.places(slot)]
            if source not in held or any(store is not None and store.takes_objects for store in held):
                status[row] = PutStatus.EXISTS
                continue
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self.puts.get(digest)
            if put is not None and not put.writers:
                self._preempt(put, now_ms=now_ms)
                put = None
            if put is not None:
                status[row] = PutStatus.IN_PROGRESS
                continue
            writer = Writer(source.mount.host, source.mount.numa_node)
            made = self._start(
                digest,
                size,
                writer,
                self._placement.order(writer, self._ready(), epoch=self.stores.epoch),
                1,
                flags & (PERMANENT_FLAGS | ObjectFlag.HAS_TTL),
                int(self.index.tenant[slot]),
                int(self.index.depth[slot]),
                0,
                now_ms=now_ms,
                presses=False,  # what is put anew is worth more than what is cold here
            )
            if not isinstance(made, Put):
                status[row] = made
                continue
            made.moved_from = generation
            self.puts.join(made, conn)
            store_id, offset = made.places[0]
            granted[row] = LOCATION_ROW.pack(made.generation, offset, made.size, store_id, made.flags)
        head = m.PUT_REPLY_HEAD.pack(self.stores.epoch, 1)
        return b"".join((head, status, bytes(-len(status) % 8), *granted))

    def _migrated(self, store: Store, body: bytes, *, now_ms: int) -> None:
        number, unmoved = _unpack(m.MIGRATED, body)
        self.holds.migrated(store, number=number, unmoved=unmoved, now_ms=now_ms)

    def _put_end(self, conn: int, body: bytes, *, now_ms: int) -> bytes:
        rows = _rows(body, m.END_ROW, count_max=PUTS_PER_FRAME_MAX)
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        generations, written = rows["generation"].tolist(), rows["written"].tolist()
        status = bytearray(len(rows))
        done: list[Put] = []
        for row, generation in enumerate(generations):
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self.puts.get(digest)
            if put is None or put.generation != generation:
                # Another rank was first, or the answer was lost and this is the second time.
                slot = self.index.find_one(digest)
                whole = slot and written[row] and int(self.index.location["generation"][slot]) == generation
                whole = whole and not all(self._is_drained(place[0]) for place in self.objects.places(slot))
                status[row] = PutStatus.STORED if whole else PutStatus.GONE
                continue
            self.puts.pop(put)
            kept = []
            if put.moved_from:
                # Removed or replaced meanwhile: the copy must not bring it back.
                slot = self.index.find_one(digest)
                if int(self.index.location["generation"][slot]) != put.moved_from:
                    written[row] = 0
            for replica, place in enumerate(put.places):
                if place[0] and written[row] >> replica & 1 and not self._is_drained(place[0]):
                    kept.append(place)
                elif place[0]:
                    self._release(place, put.generation, put.footprint, not_before_ms=now_ms)
            put.places = kept
            status[row] = PutStatus.STORED if kept else PutStatus.GONE
            if kept:
                done.append(put)
        if done:
            self._complete(done, now_ms=now_ms)
        return bytes(status)

    def _complete(self, puts: list[Put], *, now_ms: int) -> None:
        """Make puts readable; recency is now, but no lease is granted."""
        self.counters.puts += len(puts)
        digests = np.frombuffer(b"".join(put.digest for put in puts), np.uint64).reshape(-1, 2)
        for put in puts:
            if len(put.places) == 1:
                put.flags &= ~ObjectFlag.REPLICATED
        locations = np.frombuffer(
            b"".join(
                LOCATION_ROW.pack(put.generation, put.places[0][1], put.size, put.places[0][0], put.flags)
                for put in puts
            ),
            LOCATION,
        )
        stale = self.index.find(digests)
        recency: dict[int, int] = {}  # of puts that are moves, by their position
        if stale.any():  # hidden, expired, or announced while this put was under way: the newer one stays
            for at, (put, slot) in enumerate(zip(puts, stale.tolist(), strict=True)):
                if put.moved_from:
                    recency[at] = int(self.index.touched_ms[slot])
                    put.expires_ms = self.objects.expiry(slot)
                    self._note_moved(slot)
            self._drop(np.unique(stale[stale != 0]), now_ms=now_ms, patient=True)
        depths = np.array([put.depth for put in puts], np.uint16)
        tenants = np.array([put.tenant for put in puts], np.uint16)
        slots = self.objects.insert(digests, locations, depths, tenants, now_ms=now_ms)
        for at, touched_ms in recency.items():
            self.index.touched_ms[slots[at]] = touched_ms
        for put, slot in zip(puts, slots.tolist(), strict=True):
            for place in put.places[1:]:
                self.objects.add_place(slot, place)
            if put.ttl_ms and not put.expires_ms:
                put.expires_ms = now_ms + put.ttl_ms
            if put.expires_ms:
                self.objects.expire_at(slot, put.expires_ms)
            for store_id, _ in put.places:
                store = self.stores.get(store_id)
                if store is not None:
                    store.objects += 1
                    if store.announced is not None:
                        store.announced[slot] = True
        self._journal_complete(puts, now_ms=now_ms)

    def _note_moved(self, slot: int) -> None:
        """An object leaves stores that are to be drained."""
        for store_id, _ in self.objects.places(slot):
            store = self.stores.get(store_id)
            if store is not None:
                self.holds.moved(store, int(self.index.location["size"][slot]))

    def _journal_complete(self, puts: list[Put], *, now_ms: int) -> None:
        rows = [
            COMPLETE.pack(
                p.digest, p.generation, offset, p.size, store, p.flags, chunk_of(p.flags), p.depth, p.tenant
            )
            for p in puts
            for store, offset in p.places
        ]
        entry = np.frombuffer(b"".join(rows), COMPLETE_ROW)
        self.journal.append(JournalEntry(JournalKind.COMPLETE, entry))
        ends = [(p.generation, p.expires_ms) for p in puts if p.expires_ms]
        if ends:
            self.journal.append(JournalEntry(JournalKind.EXPIRES, np.array(ends, EXPIRES_ROW)))

    def _put_revoke(self, body: bytes, *, now_ms: int) -> bytes:
        rows = _rows(body, m.END_ROW, count_max=PUTS_PER_FRAME_MAX)
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        status = bytearray(len(rows))
        for row, generation in enumerate(rows["generation"].tolist()):
            put = self.puts.get(raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])
            if put is None or put.generation != generation:
                status[row] = PutStatus.GONE
            else:
                self._abandon(put, now_ms=now_ms)
                status[row] = PutStatus.REVOKED
        return bytes(status)

    def _abandon(self, put: Put, *, now_ms: int) -> None:
        self.puts.pop(put)
        for place in put.places:
            if place[0]:
                self._release(place, put.generation, put.footprint, not_before_ms=now_ms)

    def _preempt(self, put: Put, *, now_ms: int) -> None:
        self.counters.preempted += 1
        self._abandon(put, now_ms=now_ms)

    def _is_drained(self, store_id: StoreId) -> bool:
        store = self.stores.get(store_id)
        return store is None or store.hidden_on_purpose

    def _take_place(self, put: Put, store: Store, now_ms: int) -> None:
        """A put loses its replica on a store; one that had no other is revoked, and its writer is told GONE."""
        kept: list[tuple[StoreId, int]] = []
        for place in put.places:
            if place[0] == store.id:
                self._release(place, put.generation, put.footprint, not_before_ms=now_ms)
                place = (StoreId(0), 0)
            kept.append(place)
        put.places = kept
        if not any(place[0] for place in kept):
            self.puts.pop(put)

    def _without_drained(self, put: Put, *, now_ms: int) -> Put | None:
        """A put under way that another writer asks about, without what lies on stores that are drained."""
        for store_id, _ in put.places:
            store = self.stores.get(store_id)
            if store is not None and store.hidden_on_purpose:
                self._take_place(put, store, now_ms)
        return self.puts.get(put.digest)

    def _press(self, footprint: int, replicas: int) -> None:
        """Evict for a put that found no room, if that can help it."""
        hosts: set[str] = set()
        for store in self.stores:
            if store.state is StoreState.ANNOUNCING:
                return  # its memory is about to be ours to give
            if store.takes_objects and store.populated_bytes >= footprint:
                hosts.add(store.mount.host)
        if len(hosts) < replicas:
            return
        need = footprint * replicas
        most = max(need, int(self.stores.capacity_bytes() * (1 - self.settings.eviction_low_watermark)))
        self._pressure_bytes = min(self._pressure_bytes + need, most)

    def _ready(self) -> list[Candidate]:
        epoch, candidates = self._candidates
        if epoch != self.stores.epoch:
            candidates = [
                Candidate(store.id, store.mount.host, store.mount.numa_node, store.mount.name)
                for store in self.stores
                if store.takes_objects
            ]
            self._candidates = (self.stores.epoch, candidates)
        return candidates

    def _next_generation(self) -> Generation:
        self._sequence += 1
        return Generation(self.term << GENERATION_SEQUENCE_BITS | self._sequence)

    # Removing.

    def _remove(self, conn: int, request: int, body: bytes, *, now_ms: int) -> bytes | None:
        """Hide keys at once; the answer follows when their nodes have cleared the slots."""
        _check_digests(body)
        slots = self.index.find(_as_digests(body)).tolist()
        remove = _Remove(conn, request, bytearray(len(slots)), 0, now_ms + REMOVE_WAIT_MS)
        rows: dict[int, int] = {}  # slot → row; a key named twice is removed once
        waits: list[tuple[tuple[StoreId, Generation], int]] = []
        for row, slot in enumerate(slots):
            self._remember_removed(body[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])
            if slot == 0 or slot in rows:
                continue
            rows[slot] = row
            generation = Generation(int(self.index.location["generation"][slot]))
            for store_id, _ in self.objects.places(slot):
                store = self.stores.get(store_id)
                if store is not None and store.state is not StoreState.GONE:
                    waits.append(((store_id, generation), row))
            remove.status[row] = RemoveStatus.REMOVED
        if rows:
            self._drop(np.array(list(rows), np.int64), now_ms=now_ms)
            self.counters.removed += len(rows)
        if not waits:
            return bytes(remove.status)
        for key, row in waits:
            self._removes[key] = (remove, row)
            remove.status[row] = RemoveStatus.HIDDEN
            remove.waiting += 1
        self._removes_open.append(remove)
        return None

    def _remember_removed(self, digest: bytes) -> None:
        """A store that is away, or counts as lost, may still hold this key: it shall not bring it back."""
        put = self.puts.get(digest)  # under way, it is not what was removed
        newest = self._next_floor() if put is None else put.generation
        self._removed.pop(digest, None)
        self._removed[digest] = Generation(newest - 1)
        if len(self._removed) > REMOVED_MAX:
            del self._removed[next(iter(self._removed))]

    def _drop(self, slots: Slots, *, now_ms: int, patient: bool = False) -> None:
        """
        Take COMPLETE objects out of the index; their memory comes back once their leases have ended.

        ``patient``: until then it is not even cleared.
        """
        locations = self.index.location[slots]
        ends = now_ms + LEASE_TTL_MS - ((now_ms - self.index.touched_ms[slots].astype(np.int64)) & U32)
        footprints = footprint_bytes(locations["size"].astype(np.int64), chunks_of(locations["flags"]))
        unconfirmed = {
            store.id: store.announced[slots]
            for store in self._unconfirmed
            if store.announced is not None and not store.trusted
        }
        columns = (locations["generation"].tolist(), footprints.tolist(), ends.tolist())
        places = self._unindex(slots)
        for at, (held, generation, footprint, end) in enumerate(zip(places, *columns, strict=True)):
            for place in held:
                store = self.stores.get(place[0])
                if store is None:
                    continue
                if place[0] in unconfirmed and not unconfirmed[place[0]][at]:
                    store.doomed[generation] = end  # until its node says that it holds it
                    continue
                if store.trusted and not store.populated_bytes:
                    self._left.append((*place, footprint))  # not mounted yet: the last leader's leases count
                    continue
                store.objects -= 1
                self._release(
                    place, generation, footprint, not_before_ms=end, patient=patient and end > now_ms
                )

    def _drop_from(self, store: Store, slots: Slots, now_ms: int) -> None:
        """``_drop``, for objects that lie on one store alone and that nobody can hold a lease on."""
        locations = self.index.location[slots]
        footprints = footprint_bytes(locations["size"].astype(np.int64), chunks_of(locations["flags"]))
        self._unindex(slots)
        store.objects -= len(slots)
        self.stores.release_many(
            store,
            locations["generation"].tolist(),
            offsets=locations["offset"].tolist(),
            footprints=footprints.tolist(),
            not_before_ms=now_ms,
        )

    def _unindex(self, slots: Slots) -> list[list[Place]]:
        """Forget objects; where each of them lay."""
        gone = np.empty(len(slots), GONE_ROW)
        gone["digest"] = self.index.digests(slots)
        gone["generation"] = self.index.location["generation"][slots]
        self.journal.append(JournalEntry(JournalKind.GONE, gone))
        for store in self._unconfirmed:
            if store.announced is not None:
                store.announced[slots] = False  # whatever takes these slots next is another object
        return self.objects.forget(slots)

    def _unplace(self, store: Store, slot: int) -> None:
        """One of an object's replicas is gone; another one stays."""
        less = np.zeros(1, LESS_ROW)
        less["digest"] = self.index.digests(np.array([slot], np.int64))
        less["generation"], less["store"] = self.index.location["generation"][slot], store.id
        self.journal.append(JournalEntry(JournalKind.LESS, less))
        self.objects.drop_places(slot, store.id)

    def _release(
        self,
        place: tuple[StoreId, int],
        generation: Generation,
        footprint: int,
        *,
        not_before_ms: int,
        patient: bool = False,
    ) -> None:
        # The leader before us may have granted leases that we know nothing of.
        not_before_ms = max(not_before_ms, self._earlier_leases_end_ms)
        self.stores.release(
            place[0],
            generation=generation,
            offset=place[1],
            footprint=footprint,
            not_before_ms=not_before_ms,
            patient=patient,
        )

    def _release_replica(self, store: Store, slot: int, now_ms: int) -> None:
        """Have one replica's memory cleared, of an object that has others."""
        generation, _, size, _, flags = self.index.location[slot].tolist()
        footprint = footprint_bytes(size, chunk_of(flags))
        for place in self.objects.places(slot):
            if place[0] == store.id:
                store.objects -= 1
                self._release(place, generation, footprint, not_before_ms=now_ms)

    def _freed(self, store: Store, body: bytes, *, now_ms: int) -> None:
        for generation in _rows(body, m.FREE_ROW)["generation"].tolist():
            self.stores.cleared(store, generation, now_ms=now_ms)
            self._remove_confirmed(store.id, generation)

    def _remove_confirmed(self, store_id: StoreId, generation: Generation) -> None:
        waiting = self._removes.pop((store_id, generation), None)
        if waiting is None:
            return
        remove, row = waiting
        remove.status[row] = RemoveStatus.REMOVED
        remove.waiting -= 1
        if remove.waiting == 0:
            self._remove_reply(remove)

    def _remove_reply(self, remove: _Remove) -> None:
        self.out.append(
            (remove.conn, wire.pack(wire.reply(Kind.REMOVE), bytes(remove.status), remove.request))
        )
        remove.waiting = 0

    # Stores.

    def _store_of(self, peer: _Conn) -> Store:
        if peer.store is None:
            raise WireError(f"store {peer.hello.name} spoke before it mounted", fix="")
        return peer.store

    def restore(self, recovery: Recovery, *, now_ms: int) -> None:
        """
        Take over what a journal says, before anybody connects.

        Its stores are hidden until they come back with the same incarnation; what they then announce decides.
        """
        self.holds.restore(recovery.holds.values())
        self._earlier_leases_end_ms = now_ms + LEASE_TTL_MS
        for info in recovery.stores.values():
            store = self.restore_store(info, now_ms=now_ms)
            self._expect_announcement(store)
            self.holds.entered(store, now_ms=now_ms)
        rows = recovery.rows
        for start in range(0, len(rows), RESTORE_BATCH):
            part = rows[start : start + RESTORE_BATCH]
            entered, slots = self.objects.enter(part, now_ms=now_ms)
            for slot, generation in with_ttl(entered, slots):
                self.objects.expire_at(slot, recovery.expires.get(generation, now_ms))

    def restore_store(self, info: StoreInfo, *, now_ms: int) -> Store:
        """Enter a store that a journal or a leader named; hidden until it mounts."""
        fields = {
            name: getattr(info, name) for name in m.Mount.__struct_fields__ if name != "highest_generation"
        }
        return self.stores.add(
            m.Mount(highest_generation=0, **(fields | {"populated_bytes": 0})),
            conn=0,
            state=StoreState.SUSPECTED,
            now_ms=now_ms,
            store_id=info.id,
        )

    def promote(self, *, term: int, left: list[tuple[StoreId, int, int]], now_ms: int) -> None:
        """
        Begin to lead with a directory that followed the last leader to its end.

        What it says of each store is trusted: a store that mounts again in the same life allocates at once. Its
        slot table is read all the same, for what the last leader granted or dropped without telling.

        Args:
            term: Ours.
            left: Store, offset and footprint of memory that objects left so lately that leases may be open on it.
            now_ms: The time.
        """
        self.term, self._sequence = term, 0
        self._started_ms = self._ticked_ms = self._last_evict_ms = now_ms
        self._earlier_leases_end_ms = now_ms + LEASE_TTL_MS
        for store in self.stores:
            if store.state is StoreState.GONE:
                self.sweeper.begin(Sweep(store, Cause.LOST))
                continue
            store.seen_ms = now_ms + STORE_TTL_MS  # it has to find us first
            store.trusted = True
            self._expect_announcement(store)
            self.holds.entered(store, now_ms=now_ms)
        self._left = left

    def led(self, name: str, *, hot: bool, seconds: float, now_ms: int) -> None:
        """A line for ``kvops events``: who leads from now on."""
        self._event(
            now_ms,
            "master.elected",
            name,
            term=self.term,
            objects=len(self.index),
            hot=hot,
            takeover_s=seconds,
        )

    def _build_allocator(self, store: Store, populated_bytes: int) -> None:
        """Free is what is populated, and neither holds an object nor was left a moment ago."""
        store.populate(populated_bytes)
        offsets, sizes, flags = self.objects.lying_on(store.id, slots_used=self.index.slots_used)
        footprints = footprint_bytes(sizes.astype(np.int64), chunks_of(flags)).astype(np.uint64)
        held = store.allocator.reserve_batch(offsets, footprints)
        assert held.all(), "the directory gives no byte twice, and none that is not there"
        store.objects = len(offsets)
        for store_id, offset, footprint in self._left:
            if store_id == store.id and store.allocator.reserve(offset, footprint):
                self.stores.mature_at(self._earlier_leases_end_ms, store, offset, footprint)

    def _mount(self, conn: int, peer: _Conn, mount: m.Mount, *, now_ms: int) -> bytes:
        """Take a store node in; one that was only away keeps its id and all its objects."""
        if not (
            0 <= mount.capacity_bytes <= SEGMENT_BYTES_MAX
            and mount.capacity_bytes % ALIGN_BYTES == 0
            and mount.incarnation > 0
            and mount.highest_generation >= 0
        ):
            raise WireError(f"store {mount.name} offers {mount.capacity_bytes} B, which cannot be", fix="")
        _check_populated(mount, mount.populated_bytes)
        if mount.highest_generation >> GENERATION_SEQUENCE_BITS > self.term:
            raise Refused(
                f"store {mount.name} has seen master term {mount.highest_generation >> GENERATION_SEQUENCE_BITS},"
                f" this master is at term {self.term}",
                fix="the master must raise its term first",
            )
        known = self.stores.named(mount.name)
        if known is not None and known.mount.incarnation != mount.incarnation:
            self._lose(known, now_ms=now_ms, reason="it was restarted")
            known = None
        if known is not None and known.state is StoreState.GONE:
            known = None
        if known is None:
            known = self.stores.add(mount, conn=conn, state=StoreState.ANNOUNCING, now_ms=now_ms)
            self.journal.append(JournalEntry(JournalKind.STORE, store=known.info()))
            self._expect_announcement(known)
            self.holds.entered(known, now_ms=now_ms)
        else:
            known.mount = mount
            known.conn = conn
        known.seen_ms = now_ms
        peer.store = known
        if known.trusted and not known.populated_bytes:
            self._build_allocator(known, mount.populated_bytes)
        if known.announcing and mount.highest_generation and not known.trusted:
            # The master before may have given leases on memory of which nothing is left to announce.
            known.closed_until_ms = self._started_ms + LEASE_TTL_MS
        self.stores.set_state(known, _state_when_heard(known, now_ms))
        known.unsent = [(generation, release.offset) for generation, release in known.releasing.items()]
        self.stores.unsent |= bool(known.unsent)
        known.populate(mount.populated_bytes)
        self._event(
            now_ms,
            "store.mounted",
            mount.name,
            id=known.id,
            objects=mount.objects,
            populated_bytes=mount.populated_bytes,
        )
        # No put under way can lie on a store that still has to announce.
        floor = self._next_floor() if known.announcing and not known.trusted else self._floor()
        return wire.encode(
            m.Mounted(store_id=known.id, term=self.term, announce=known.announcing, floor=floor)
        )

    def knows(self, mount: m.Mount) -> bool:
        """Whether this store, in this life of its process, has mounted here before."""
        known = self.stores.named(mount.name)
        return (
            known is not None
            and known.state is not StoreState.GONE
            and known.mount.incarnation == mount.incarnation
            and known.populated_bytes > 0
        )

    def _expect_announcement(self, store: Store) -> None:
        store.announcing = True
        store.announced = np.zeros(self.settings.objects_max + 1, np.bool_)  # zero pages until touched
        self._unconfirmed.add(store)

    def _announce(self, store: Store, body: bytes, *, now_ms: int) -> bytes:
        """
        Rows of a node's slot table, after the master or the node started; an empty frame ends them.

        The node is right about what its memory holds. Where two stores hold one key, the newer generation stays.
        After a broken connection the announcement starts over: what was taken in before is passed over.
        """
        if not store.announcing or store.announced is None:
            raise WireError(f"store {store.mount.name} announced slots nobody asked for", fix="")
        rows = _rows(body, m.SLOT_ROW)
        if not len(rows):
            self._announced(store, now_ms=now_ms)
            return b""
        if store.trusted:
            return self._reconcile(store, rows)
        known = self.index.find(np.ascontiguousarray(rows["digest"]))
        seen = store.announced[known] & (self.index.location["generation"][known] == rows["generation"])
        if store.releasing:
            seen |= np.array([generation in store.releasing for generation in rows["generation"].tolist()])
        rows = rows[~seen]
        footprints = footprint_bytes(rows["size"].astype(np.int64), chunks_of(rows["flags"]))
        held = store.allocator.reserve_batch(rows["offset"], footprints.astype(np.uint64))
        forget = np.empty(len(rows) - np.count_nonzero(held), m.FREE_ROW)
        if len(forget):  # beyond what is populated, or twice the same memory
            forget["generation"], forget["offset"] = rows["generation"][~held], rows["offset"][~held]
            rows = rows[held]
        # After a restart nearly all are one of two kinds: what the journal had, and what nobody knows.
        digests = np.ascontiguousarray(rows["digest"])
        slots = self.index.find(digests)
        location = self.index.location
        known = slots != 0
        for name, value in (
            ("generation", rows["generation"]),
            ("offset", rows["offset"]),
            ("store", store.id),
        ):
            known &= location[name][slots] == value
        store.announced[slots[known]] = True
        store.objects += int(np.count_nonzero(known))
        fresh = slots == 0
        if self._removed or store.doomed:
            fresh &= ~self._unwanted(store, rows)
        words = np.sort(digests[:, 0])
        if (words[1:] == words[:-1]).any():  # a key twice
            fresh[:] = False
        self._adopt(store, rows if fresh.all() else rows[fresh], now_ms=now_ms)
        for row in rows[~(known | fresh)]:
            self._announce_one(store, row, now_ms=now_ms)
        return forget.tobytes()

    def _reconcile(self, store: Store, rows: NDArray[np.void]) -> bytes:
        """
        Rows of a store whose allocator followed the last leader; the slots that it is to forget.

        What the directory does not know was granted by that leader, and never acknowledged; or dropped by it, and
        the node had not heard. Its memory counts as free already.
        """
        assert store.announced is not None
        slots = self.index.find(np.ascontiguousarray(rows["digest"]))
        known = (slots != 0) & (self.index.location["generation"][slots] == rows["generation"])
        forget = []
        for row, (generation, offset) in enumerate(rows[["generation", "offset"]].tolist()):
            if known[row] and (store.id, offset) in self.objects.places(int(slots[row])):
                store.announced[slots[row]] = True
                continue
            ours = generation >> GENERATION_SEQUENCE_BITS == self.term
            if not (ours or generation in store.releasing):
                forget.append((generation, offset))
        return np.array(forget, m.FREE_ROW).tobytes()

    def _unwanted(self, store: Store, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which announced slots hold what was dropped while their store was away."""
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        return np.array(
            [
                generation in store.doomed
                or generation <= self._removed.get(raw[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], 0)
                for at, generation in enumerate(rows["generation"].tolist())
            ],
            np.bool_,
        )

    def _announce_one(self, store: Store, row: np.void, *, now_ms: int) -> None:
        """One announced slot whose key is known, removed, or named twice."""
        _, number, offset, size, _, _, _, flags = row.tolist()
        generation = Generation(number)
        digest = np.ascontiguousarray(row["digest"]).tobytes()
        slot = self.index.find_one(digest)
        known = int(self.index.location["generation"][slot]) if slot else 0
        if slot and known == generation:
            assert store.announced is not None
            if (store.id, offset) not in self.objects.places(slot):
                self.objects.add_place(slot, (store.id, offset))
                self._remember_announced(store, np.array([row], m.SLOT_ROW))
            store.announced[slot] = True
            store.objects += 1
        elif known > generation or generation in store.doomed or generation <= self._removed.get(digest, 0):
            footprint = footprint_bytes(size, chunk_of(flags))
            end = store.doomed.pop(generation, now_ms)
            self._release((store.id, offset), generation, footprint, not_before_ms=end)
        else:
            if slot:
                self._drop(np.array([slot], np.int64), now_ms=now_ms)
            self._adopt(store, np.array([row], m.SLOT_ROW), now_ms=now_ms)

    def _adopt(self, store: Store, rows: NDArray[np.void], *, now_ms: int) -> None:
        """Objects that only their store knew: keys that are absent and distinct."""
        if not len(rows):
            return
        entry = self._remember_announced(store, rows)
        digests = np.ascontiguousarray(rows["digest"])
        slots = self.objects.insert(digests, entry["location"], rows["depth"], rows["tenant"], now_ms=now_ms)
        assert store.announced is not None
        store.announced[slots] = True
        store.objects += len(rows)
        self.counters.adopted += len(rows)
        for slot, _ in with_ttl(entry, slots):
            self.objects.expire_at(slot, now_ms)  # nobody knows any more how long it was to live

    def _remember_announced(self, store: Store, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Replicas that only their store knew, as COMPLETE_ROW."""
        entry = np.empty(len(rows), COMPLETE_ROW)
        locations = entry["location"]
        for name in ("generation", "offset", "size"):
            locations[name] = rows[name]
        locations["store"] = store.id
        locations["flags"] = rows["flags"] & (PERMANENT_FLAGS | ObjectFlag.HAS_TTL)
        for name in ("digest", "chunk", "depth", "tenant"):
            entry[name] = rows[name]
        self.journal.append(JournalEntry(JournalKind.COMPLETE, entry))
        return entry

    def used_bytes(self) -> int:
        """Memory of objects that are readable or being written."""
        return self.stores.capacity_bytes() - self.stores.free_bytes() - self.stores.releasing_bytes()

    def _announced(self, store: Store, *, now_ms: int) -> None:
        """The announcement is whole: what the journal placed there and the node does not hold is swept."""
        store.announcing = False
        for generation in store.doomed:  # not there any more
            self._remove_confirmed(store.id, generation)
        store.doomed.clear()
        self.sweeper.begin(Sweep(store, Cause.UNANNOUNCED))
        self._open(store, now_ms=now_ms)

    def _open(self, store: Store, *, now_ms: int) -> None:
        """Allocate on a store as soon as nobody can hold its free memory by a lease of an earlier master."""
        if _state_when_heard(store, now_ms) is StoreState.READY:
            self.stores.set_state(store, StoreState.READY)
            self._ramp_up(store, now_ms=now_ms)
            self._event(now_ms, "store.ready", store.mount.name, id=store.id, objects=store.objects)

    def _beat(self, peer: _Conn, beat: m.Beat, *, now_ms: int) -> bytes:
        store = peer.store
        if store is None or store.state is StoreState.GONE:
            return m.BEAT_REPLY.pack(self.term, 1, self._floor())
        _check_populated(store.mount, beat.populated_bytes)
        store.seen_ms = now_ms
        clear = beat.loop_lag_ms < STORE_TTL_MS and now_ms >= store.suspect_until_ms
        if store.state is StoreState.SUSPECTED and clear:
            self.stores.set_state(store, _state_when_heard(store, now_ms))
            self._event(now_ms, "store.recovered", store.mount.name)
        elif store.state in (StoreState.READY, StoreState.ANNOUNCING) and beat.loop_lag_ms >= STORE_TTL_MS:
            self.stores.set_state(store, StoreState.SUSPECTED)
            self._event(now_ms, "store.suspected", store.mount.name, reason="its data loop stands still")
        store.populate(beat.populated_bytes)
        hold = self.holds.migrating(store)
        if hold is not None and store.state is StoreState.READY:
            body = m.MIGRATE.pack(hold.number, hold.bandwidth_bps)
            self.out.append((store.conn, wire.pack(Kind.MIGRATE, body)))
        return m.BEAT_REPLY.pack(self.term, 0, self._floor())

    def _floor(self) -> int:
        """No put below this generation is under way any more."""
        oldest = self.puts.oldest()
        return oldest.generation if oldest is not None else self._next_floor()

    def _next_floor(self) -> int:
        """No put from this generation on has been granted."""
        return self.term << GENERATION_SEQUENCE_BITS | self._sequence + 1

    def _lose(self, store: Store, *, now_ms: int, reason: str) -> None:
        """A store's memory is gone: nothing names it from now on; its metadata is swept in slices."""
        if store.state is StoreState.GONE:
            return
        self.stores.set_state(store, StoreState.GONE)
        self._event(now_ms, "store.lost", store.mount.name, id=store.id, reason=reason, objects=store.objects)
        self.journal.append(JournalEntry(JournalKind.STORE, store=store.info()))
        self._ramp.leave(store.id)
        for generation in [*store.releasing, *store.doomed]:
            self._remove_confirmed(store.id, generation)
        store.releasing.clear()
        store.doomed.clear()
        store.unsent.clear()
        store.announcing, store.announced, store.trusted = False, None, False
        self._unconfirmed.discard(store)
        for put in self.puts:
            if any(place[0] == store.id for place in put.places):
                put.places = [(StoreId(0), 0) if place[0] == store.id else place for place in put.places]
                if not any(place[0] for place in put.places):
                    self.puts.pop(put)
        self.holds.lost(store, now_ms=now_ms)

    def _leave(self, store: Store, *, now_ms: int) -> bytes:
        """A node is about to end: nothing names it from now on; for how long readers may need it, in ms."""
        if not store.leaving and store.state is not StoreState.GONE:
            store.leaving = True
            self._settle(store, now_ms=now_ms)
            self._event(now_ms, "store.leaving", store.mount.name, id=store.id, objects=store.objects)
        return m.LEAVE_REPLY.pack(max(0, self._leases_end_ms(now_ms) - now_ms))

    def _settle(self, store: Store, *, now_ms: int) -> None:
        """Give a store the state that follows from its hold, its connection and what readers say of it."""
        if store.state is StoreState.GONE:
            return
        state = _state_when_heard(store, now_ms)
        away = store.conn == 0 or now_ms - store.seen_ms >= STORE_SILENT_MS or now_ms < store.suspect_until_ms
        if away and state is not StoreState.DRAINING:
            state = StoreState.SUSPECTED
        was = store.state
        self.stores.set_state(store, state)
        if was is StoreState.DRAINING and state is StoreState.READY:
            self._ramp_up(store, now_ms=now_ms)

    def _ramp_up(self, store: Store, *, now_ms: int) -> None:
        """Hold back an empty store that joins a pool in use; where all is new, there is nothing to protect."""
        others = (other for other in self.stores if other is not store and other.takes_objects)
        if not store.objects and any(other.objects for other in others):
            self._ramp.join(store.id, now_ms=now_ms)

    def _leases_end_ms(self, now_ms: int) -> int:
        """When the last lease ends that may have been given until now; in a pool that nobody reads, at once."""
        if self._leases_seen != self.index.hits_total + self._touches:
            return now_ms + LEASE_TTL_MS
        return max(now_ms, self._leased_ms + LEASE_TTL_MS, self._earlier_leases_end_ms)

    def _report(self, hello: Hello, report: m.Report, *, now_ms: int) -> bytes:
        """A client could not read from a store; the group's breaker counts the hosts that say so."""
        store = self.stores.get(report.store_id)
        if store is not None and store.state in SERVING:
            store.reports = {host: at for host, at in store.reports.items() if now_ms - at < REPORT_WINDOW_MS}
            store.reports[hello.host] = now_ms
            self._event(now_ms, "store.reported", store.mount.name, reason=report.reason, host=hello.host)
            if len(store.reports) >= REPORT_HOSTS_MIN:
                store.suspect_until_ms = now_ms + SUSPECT_MS
                self.stores.set_state(store, StoreState.SUSPECTED)
                self._event(
                    now_ms, "store.suspected", store.mount.name, reason="two hosts cannot read from it"
                )
        if report.stores_down * 2 >= report.stores > 0:
            hosts = len({peer.hello.host for peer in self._conns.values() if peer.hello.role == "client"})
            if self.breaker.report(hello.host, host_count=hosts, now_ms=now_ms):
                self._event(now_ms, "breaker.opened", self.settings.group, hosts=hosts)
        return self._head()

    # Background work, in slices.

    def next_frames(self) -> list[tuple[int, bytes]]:
        """Frames for other connections since the last call."""
        frames, self.out = self.out, []
        if not self.stores.unsent:
            return frames
        self.stores.unsent = False
        for store in self.stores:
            if store.unsent and store.conn:
                rows, store.unsent = store.unsent, []
                for start in range(0, len(rows), KEYS_PER_FRAME_MAX):
                    body = (
                        m.FREE_HEAD.pack(self._floor())
                        + np.array(rows[start : start + KEYS_PER_FRAME_MAX], m.FREE_ROW).tobytes()
                    )
                    frames.append((store.conn, wire.pack(Kind.FREE, body)))
        return frames

    def tick(self, *, now_ms: int) -> None:
        """
        Deadlines: silent stores, dead writers, removes that waited long enough, the group's breaker.

        A pause of our own (a stopped process, a stalled machine) is not held against anybody.
        """
        pause = now_ms - self._ticked_ms - TICK_MS
        self._ticked_ms = now_ms
        if pause > TICK_MS:
            self._paused_ms += pause
            self._event(now_ms, "master.paused", self.settings.group, pause_ms=pause)
        awake_ms = self._awake_ms(now_ms)
        self._ramp.expire(now_ms=now_ms)
        leases = self.index.hits_total + self._touches
        if leases != self._leases_seen:
            self._leases_seen, self._leased_ms = leases, now_ms
        for store in self.stores:
            if pause > TICK_MS:
                store.seen_ms = min(now_ms, store.seen_ms + pause)  # some have spoken since it ended
            if store.state is StoreState.ANNOUNCING and not store.announcing:
                self._open(store, now_ms=now_ms)
            silent = now_ms - store.seen_ms
            if store.state is StoreState.GONE or silent < STORE_SILENT_MS:
                continue
            if store.conn == 0 or silent >= 2 * STORE_TTL_MS:
                self._lose(store, now_ms=now_ms, reason=f"silent for {silent} ms")
            elif store.state in SERVING:
                self.stores.set_state(store, StoreState.SUSPECTED)
                self._event(now_ms, "store.suspected", store.mount.name, reason=f"silent for {silent} ms")
        while (put := self.puts.oldest()) is not None and awake_ms - put.started_ms >= PUT_TTL_MS:
            self._preempt(put, now_ms=now_ms)
        while self._orphans and awake_ms - self._orphans[0][0] >= ORPHAN_MS:
            put = self._orphans.popleft()[1]
            if not put.writers and self.puts.get(put.digest) is put:
                self._preempt(put, now_ms=now_ms)
        while self._removes_open and (
            not self._removes_open[0].waiting or self._removes_open[0].deadline_ms <= now_ms
        ):
            remove = self._removes_open.popleft()
            if remove.waiting:
                self._removes = {key: value for key, value in self._removes.items() if value[0] is not remove}
                self._remove_reply(remove)
        self._leases.clamp_ages(now_ms32=now_ms & U32, slots_used=self.index.slots_used, budget=CLAMP_SLOTS)
        if self.breaker.try_probe(now_ms=now_ms):
            # The best we can tell from here: with stores to read from, let the clients try.
            serving = any(store.state is StoreState.READY for store in self.stores)
            self.breaker.record_probe(serving, now_ms=now_ms)
            if serving:
                self._event(now_ms, "breaker.closed", self.settings.group)

    def _awake_ms(self, now_ms: int) -> int:
        """The clock without our own pauses, the one under way included: what writers' deadlines go by."""
        return now_ms - self._paused_ms - max(0, now_ms - self._ticked_ms - 2 * TICK_MS)

    @property
    def has_output(self) -> bool:
        """Whether ``next_frames`` has any."""
        return bool(self.out) or self.stores.unsent

    def raise_term(self, term: int) -> None:
        """A newer term, made durable by the caller: generations from now on are above all earlier ones."""
        assert term > self.term
        self.term, self._sequence = term, 0

    @property
    def has_work(self) -> bool:
        """Whether there is background work to do, soon or at once."""
        return self.sweeper.busy or self._evicting or self._pressure_bytes > 0 or self.index.growing

    def work_due(self, now_ms: int) -> bool:
        """Whether ``work`` should be called now, after an answer, rather than at the next tick."""
        if self.index.growing or self.sweeper.due(now_ms):
            return True
        if self._pressure_bytes:
            return now_ms > self._last_evict_ms
        return self._evicting and now_ms - self._last_evict_ms >= EVICT_INTERVAL_MS

    def work(self, *, now_ms: int) -> None:
        """One slice of background work, at most about 0.3 ms."""
        self.stores.mature(now_ms=now_ms, count_max=EVICT_SLICE)
        self._expire(now_ms=now_ms)
        self._evict(now_ms=now_ms)
        self.sweeper.step(now_ms=now_ms)
        if self.index.growing:
            self.index.maintain(SPLIT_SLICE)

    def _expire(self, *, now_ms: int) -> None:
        due = self.objects.expired(now_ms=now_ms, count_max=EVICT_SLICE)
        if due:
            self._drop(np.array(due, np.int64), now_ms=now_ms)

    def _evict(self, *, now_ms: int) -> None:
        """Keep a little of the pool free: start above the high watermark, stop below the low one."""
        capacity = self.stores.capacity_bytes()
        used = self.used_bytes()
        high = used > capacity * self.settings.eviction_high_watermark
        if not (high or self._pressure_bytes or self._evicting):
            return
        self._evicting = used > capacity * self.settings.eviction_low_watermark
        if not (self._evicting or self._pressure_bytes):
            return
        interval = 1 if high or self._pressure_bytes else EVICT_INTERVAL_MS
        if now_ms - self._last_evict_ms < interval or now_ms < self._earlier_leases_end_ms:
            return
        self._last_evict_ms = now_ms
        excess = used - int(capacity * self.settings.eviction_low_watermark)
        mean = max(1, used // max(1, len(self.index)))
        count = -(-max(excess, self._pressure_bytes) // mean)  # no more than it takes: objects may be large
        victims = self._evictor.step(now_ms32=now_ms & U32, count_max=min(count, EVICT_SLICE))
        if self._evictor.exhausted:
            self._pressure_bytes = 0
        if not len(victims):
            return
        sizes = int(self.index.location["size"][victims].astype(np.int64).sum())
        self._pressure_bytes = max(0, self._pressure_bytes - sizes)
        self._drop(victims, now_ms=now_ms)
        self.counters.evicted += len(victims)

    def _swept(self, sweep: Sweep, now_ms: int) -> None:
        """A sweep has ended."""
        store = sweep.store
        if sweep.cause is Cause.UNANNOUNCED:
            store.announced, store.trusted = None, False
            self._unconfirmed.discard(store)
        elif sweep.cause is Cause.LOST:
            self.stores.forget(store)
            self._event(now_ms, "store.forgotten", store.mount.name, id=store.id)
        self.holds.swept(sweep, now_ms=now_ms)

    def check(self) -> None:
        """Assert what must hold between index, puts, stores and their allocators; for tests: walks everything."""
        self.objects.check()
        held: dict[int, list[tuple[int, int]]] = {store.id: [] for store in self.stores}
        objects = dict.fromkeys(held, 0)
        for slot in np.flatnonzero(self.index.location["store"][: self.index.slots_used]).tolist():
            size, flags = self.index.location[["size", "flags"]][slot].tolist()
            for store_id, offset in self.objects.places(slot):
                store = self.stores.get(store_id)
                if store is not None and (
                    store.announced is None
                    or (store.trusted and store.populated_bytes)
                    or store.announced[slot]
                ):
                    held[store_id].append((offset, footprint_bytes(size, chunk_of(flags))))
                    objects[store_id] += 1
        for put in self.puts:
            for store_id, offset in put.places:
                if store_id:
                    held[store_id].append((offset, put.footprint))
        self.stores.check(held, objects)

    def _event(self, now_ms: int, event: str, subject: str, **detail: str | int | float | bool) -> None:
        self.events.append(CoreEvent(now_ms, event, subject, detail))


def _state_when_heard(store: Store, now_ms: int) -> StoreState:
    """The state of a store that has just spoken to us."""
    if store.hidden_on_purpose:
        return StoreState.DRAINING
    closed = (store.announcing and not store.trusted) or now_ms < store.closed_until_ms
    return StoreState.ANNOUNCING if closed else StoreState.READY


_STORE_KINDS: Final = frozenset(
    {Kind.MOUNT, Kind.SLOTS, Kind.BEAT, Kind.LEAVE, Kind.MIGRATED, Kind.UNMOUNT, wire.reply(Kind.FREE)}
)


def _check_populated(mount: m.Mount, populated_bytes: int) -> None:
    if not 0 <= populated_bytes <= mount.capacity_bytes or populated_bytes % ALIGN_BYTES:
        raise WireError(
            f"store {mount.name} says that {populated_bytes} B of {mount.capacity_bytes} are there", fix=""
        )


def _check_digests(body: bytes) -> None:
    if len(body) % DIGEST_BYTES or len(body) > KEYS_PER_FRAME_MAX * DIGEST_BYTES:
        raise WireError(
            f"a request of {len(body)} B is no batch of up to {KEYS_PER_FRAME_MAX} digests",
            fix="send smaller batches",
        )


def _as_digests(body: bytes) -> Digests:
    return np.frombuffer(body, np.uint64).reshape(-1, 2)


def _unpack(layout: struct.Struct, body: bytes) -> tuple[int, ...]:
    try:
        return layout.unpack_from(body)
    except struct.error as error:
        raise WireError("a request is shorter than its head", fix="") from error


def _rows(
    body: bytes, dtype: np.dtype[np.void], *, start: int = 0, count_max: int = KEYS_PER_FRAME_MAX
) -> NDArray[np.void]:
    """
    The packed rows of a body.

    Raises:
        WireError: Not a whole number of rows, or too many.
    """
    size = len(body) - start
    if size < 0 or size % dtype.itemsize or size // dtype.itemsize > count_max:
        raise WireError(
            f"a body of {len(body)} B holds no whole rows of {dtype.itemsize} B, or more than {count_max}",
            fix="",
        )
    return np.frombuffer(body, dtype, offset=start)
