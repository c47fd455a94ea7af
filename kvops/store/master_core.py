"""
The master's logic, without I/O: requests and the time go in, replies and frames for others come out.

One event loop owns it; nothing here locks, waits or reads a clock. What must be sent to a connection other than
the caller's, or later than now, and what must be remembered, is left in its ``outbox``.

An object's life::

    put_start  →  PROCESSING (puts)  →  put_end  →  COMPLETE (index)  →  evicted, removed or replaced
                       │                                                    │
                       └── revoked, pre-empted, store lost ──→  releasing (stores)  →  free (allocator)

Its parts, each of which knows only those that stand before it::

    outbox  generations  awake  horizon       what leaves; numbers; our own pauses; the last lease's end
    pool                                      objects and stores, and how both come apart
    placer  reclaim                           memory for new objects; memory of old ones
    put_watch  removes                        puts that will not be whole; removes that wait for nodes
    store_states  reports                     what a store's state follows from; what readers say of it
    sweep  drain                              forgetting a store's objects, in slices; operators' holds
    announcements  store_life                 what stores say they hold; how they come and go
    put_protocol                              how objects come
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from kvops.errors import WireError
from kvops.limits import DIGEST_BYTES, KEYS_PER_FRAME_MAX, LEASE_TTL_MS, STORE_TTL_MS
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store.announcements import Announcements
from kvops.store.awake import AwakeClock
from kvops.store.bodies import check_digests, rows_of, unpack_head
from kvops.store.drain import Holds
from kvops.store.generations import Generations
from kvops.store.horizon import LeaseHorizon
from kvops.store.journal import Recovery
from kvops.store.lease import MS32_MASK, AgeClamp
from kvops.store.model import LOCATION, ClientInfo, PlacementPolicy, StoreId, StoreInfo, StoreState, View
from kvops.store.objects import Objects, with_ttl
from kvops.store.outbox import Outbox
from kvops.store.placement import RAMP_MS, Writer
from kvops.store.placer import Placer
from kvops.store.pool import Pool
from kvops.store.put_protocol import PutProtocol
from kvops.store.put_watch import PutWatch
from kvops.store.puts import PutTable
from kvops.store.reclaim import EVICT_SLICE, Reclaim
from kvops.store.removes import Removes
from kvops.store.reports import Reports
from kvops.store.store_life import StoreLife
from kvops.store.store_states import StoreStates
from kvops.store.stores import Store
from kvops.store.sweep import Cause, Sweep, Sweeper

CLAMP_SLOTS: Final = 512  # a tick; a round over 16 M slots takes an hour, and one is due within 24 days
RESTORE_BATCH: Final = 65_536
SPLIT_SLICE: Final = 64  # buckets, after a response
STORE_KINDS: Final = frozenset(
    {Kind.MOUNT, Kind.SLOTS, Kind.BEAT, Kind.LEAVE, Kind.MIGRATED, Kind.UNMOUNT, wire.reply(Kind.FREE)}
)
"""Frames that only stores may send."""


@dataclass(slots=True)
class _Conn:
    """A connection that proved the secret."""

    hello: Hello
    writer: Writer
    store: Store | None = None


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
        self.outbox = outbox = Outbox()
        self.generations = generations = Generations(term)
        self.objects = Objects(objects_max=settings.objects_max)
        self.index = self.objects.index
        self.puts = PutTable()
        self.awake = awake = AwakeClock(now_ms=now_ms)
        self._horizon = horizon = LeaseHorizon(self.index, now_ms=now_ms)
        self._ages = AgeClamp(self.index.touched_ms)
        self._pool = pool = Pool(self.objects, outbox, horizon)
        self.stores = pool.stores
        self.placer = placer = Placer(
            self.stores, settings.placement, ramp_ms=settings.ramp_ms, seed=settings.seed
        )
        self._reclaim = Reclaim(
            pool,
            horizon,
            outbox,
            high_watermark=settings.eviction_high_watermark,
            low_watermark=settings.eviction_low_watermark,
            seed=settings.seed,
            now_ms=now_ms,
        )
        self._watch = watch = PutWatch(self.puts, pool, generations, awake, outbox)
        self._removes = removes = Removes(pool, self.puts, generations, outbox)
        states = StoreStates(self.stores, placer, outbox)
        self._reports = Reports(settings.group, self.stores, states, outbox, seed=settings.seed)
        self.sweeper = Sweeper(pool, self.puts, watch, outbox.counters)
        self.holds = Holds(self.stores, self.sweeper, states, horizon, outbox)
        self._store_life = StoreLife(
            pool,
            states=states,
            announcements=Announcements(pool, removes, generations, outbox),
            holds=self.holds,
            sweeper=self.sweeper,
            placer=placer,
            removes=removes,
            watch=watch,
            generations=generations,
            horizon=horizon,
            outbox=outbox,
        )
        self._put_protocol = PutProtocol(
            pool,
            self.puts,
            watch=watch,
            placer=placer,
            reclaim=self._reclaim,
            holds=self.holds,
            generations=generations,
            awake=awake,
            outbox=outbox,
        )
        self._conns: dict[int, _Conn] = {}

    @property
    def term(self) -> int:
        """Of all generations that are given from now on."""
        return self.generations.term

    def raise_term(self, term: int) -> None:
        """A newer term, made durable by the caller: generations from now on are above all earlier ones."""
        assert term > self.term
        self.generations.begin(term)

    # Connections.

    def connected(self, conn: int, hello: Hello) -> None:
        """A peer has proved the secret."""
        self._conns[conn] = _Conn(hello, Writer(hello.host, hello.numa_node))

    def disconnected(self, conn: int, *, now_ms: int) -> None:
        """A peer's connection ended: its store is hidden at once, its unfinished puts are anybody's."""
        peer = self._conns.pop(conn, None)
        if peer is None:
            return
        self._watch.writer_left(conn, now_ms=now_ms)
        if peer.store is not None and peer.store.conn == conn:
            self._store_life.disconnected(peer.store, now_ms=now_ms)

    @property
    def breaker_open(self) -> bool:
        """Whether the group's breaker keeps everybody away."""
        return self._reports.breaker_open

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
        One request of a connection; the answer's body, or None when it follows through ``outbox``.

        Raises:
            WireError: The request breaks the protocol: the caller closes the connection.
        """
        if kind == Kind.LOOKUP:
            return self.lookup(body, now_ms=now_ms)
        if kind == Kind.EXISTS:
            return self.exists(body, now_ms=now_ms)
        peer = self._conns[conn]
        if peer.store is not None:
            peer.store.seen_ms = now_ms
        if kind in STORE_KINDS:
            return self._handle_store(conn, peer, kind, body, now_ms=now_ms)
        match kind:
            case Kind.PUT_START:
                return self._put_protocol.start(conn, peer.writer, body, now_ms=now_ms)
            case Kind.MOVE_START:
                return self._put_protocol.move(conn, peer.hello.name, body, now_ms=now_ms)
            case Kind.PUT_END:
                return self._put_protocol.end(body, now_ms=now_ms)
            case Kind.PUT_REVOKE:
                return self._put_protocol.revoke(body, now_ms=now_ms)
            case Kind.TOUCH:
                return self._touch(body, now_ms=now_ms)
            case Kind.REMOVE:
                return self._removes.start(conn, request, body, now_ms=now_ms)
            case Kind.STAT:
                return self._stat(body, now_ms=now_ms)
            case Kind.VIEW:
                return msgspec.msgpack.encode(self.view())
            case Kind.REPORT:
                report = decode(body, m.Report)
                self._reports.report(peer.hello.host, report, host_count=self._client_hosts, now_ms=now_ms)
                return self._head()
            case _:
                raise WireError(f"a master got frame kind {kind}", fix="")

    def _handle_store(self, conn: int, peer: _Conn, kind: int, body: bytes, *, now_ms: int) -> bytes | None:
        if peer.hello.role != "store":
            raise WireError(f"a {peer.hello.role} sent a store's frame, kind {kind}", fix="")
        if kind == Kind.MOUNT:
            peer.store, answer = self._store_life.mount(conn, decode(body, m.Mount), now_ms=now_ms)
            return answer
        if kind == Kind.BEAT:
            return self._store_life.beat(peer.store, decode(body, m.Beat), now_ms=now_ms)
        store = peer.store
        if store is None:
            raise WireError(f"store {peer.hello.name} spoke before it mounted", fix="")
        match kind:
            case Kind.SLOTS:
                return self._store_life.announce(store, body, now_ms=now_ms)
            case Kind.MIGRATED:
                number, unmoved = unpack_head(m.MIGRATED, body)
                self.holds.migrated(store, number=number, unmoved=unmoved, now_ms=now_ms)
                return b""
            case Kind.LEAVE:
                return self._store_life.leave(store, now_ms=now_ms)
            case Kind.UNMOUNT:
                self._store_life.lose(store, now_ms=now_ms, reason="it was stopped")
                return b""
            case _:
                assert kind == wire.reply(Kind.FREE)
                for generation in rows_of(body, m.FREE_ROW)["generation"].tolist():
                    self.stores.cleared(store, generation, now_ms=now_ms)
                    self._removes.cleared(store.id, generation)
                return None

    def _client_hosts(self) -> int:
        return len({peer.hello.host for peer in self._conns.values() if peer.hello.role == "client"})

    # Reading.

    def exists(self, digests: bytes, *, now_ms: int) -> bytes:
        """One byte a key: whether it is readable. Touches nothing."""
        check_digests(digests)
        return self.objects.exists(digests, now_ms=now_ms)

    def lookup(self, digests: bytes, *, now_ms: int) -> bytes:
        """Where each key lies, with a lease on every hit: LOOKUP_HEAD, LOCATION rows, EXTRA rows."""
        check_digests(digests)
        if self._reports.breaker_open:
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
        check_digests(digests)
        renewed = self.objects.touch(digests, now_ms=now_ms)
        self._horizon.renewed()
        return self._head() + renewed

    def _stat(self, digests: bytes, *, now_ms: int) -> bytes:
        check_digests(digests)
        return self.objects.stat(digests, now_ms=now_ms)

    def _head(self) -> bytes:
        return m.LOOKUP_HEAD.pack(self.stores.epoch, 0 if self.breaker_open else LEASE_TTL_MS, 0, 0)

    def view(self) -> View:
        """The stores that locations may name."""
        return View(epoch=self.stores.epoch, term=self.term, stores=[store.info() for store in self.stores])

    # A directory that others made.

    def restore(self, recovery: Recovery, *, now_ms: int) -> None:
        """
        Take over what a journal says, before anybody connects.

        Its stores are hidden until they come back with the same incarnation; what they then announce decides.
        """
        self.holds.restore(recovery.holds.values())
        self._horizon.take_over(now_ms)
        for info in recovery.stores.values():
            self._store_life.expect(self.restore_store(info, now_ms=now_ms), now_ms=now_ms)
        rows = recovery.rows
        for start in range(0, len(rows), RESTORE_BATCH):
            part = rows[start : start + RESTORE_BATCH]
            entered, slots = self.objects.enter(part, now_ms=now_ms)
            for slot, generation in with_ttl(entered, slots):
                self.objects.expire_at(slot, recovery.expires.get(generation, now_ms))

    def restore_store(self, info: StoreInfo, *, now_ms: int) -> Store:
        """Enter a store that a journal or a leader named; hidden until it mounts."""
        return self._store_life.restore(info, now_ms=now_ms)

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
        self.generations.begin(term)
        self.awake.restart(now_ms)
        self._horizon.restart(now_ms)
        self._reclaim.restart(now_ms)
        for store in self.stores:
            if store.state is StoreState.GONE:
                self.sweeper.begin(Sweep(store, Cause.LOST))
                continue
            store.seen_ms = now_ms + STORE_TTL_MS  # it has to find us first
            store.trusted = True
            self._store_life.expect(store, now_ms=now_ms)
        self._pool.take_over(left)

    def led(self, name: str, *, hot: bool, seconds: float, now_ms: int) -> None:
        """A line for ``kvops events``: who leads from now on."""
        objects = len(self.index)
        self.outbox.event(
            now_ms, "master.elected", name, term=self.term, objects=objects, hot=hot, takeover_s=seconds
        )

    def knows(self, mount: m.Mount) -> bool:
        """Whether this store, in this life of its process, has mounted here before."""
        return self._store_life.knows(mount)

    # Background work, in slices.

    @property
    def has_output(self) -> bool:
        """Whether ``next_frames`` has any."""
        return bool(self.outbox.frames) or self.stores.unsent

    def next_frames(self) -> list[tuple[int, bytes]]:
        """Frames for other connections since the last call."""
        frames = self.outbox.take_frames()
        if not self.stores.unsent:
            return frames
        self.stores.unsent = False
        for store in self.stores:
            if store.unsent and store.conn:
                rows, store.unsent = store.unsent, []
                head = m.FREE_HEAD.pack(self._watch.floor())
                for start in range(0, len(rows), KEYS_PER_FRAME_MAX):
                    part = np.array(rows[start : start + KEYS_PER_FRAME_MAX], m.FREE_ROW)
                    frames.append((store.conn, wire.pack(Kind.FREE, head + part.tobytes())))
        return frames

    def tick(self, *, now_ms: int) -> None:
        """
        Deadlines: silent stores, dead writers, removes that waited long enough, the group's breaker.

        A pause of our own (a stopped process, a stalled machine) is not held against anybody.
        """
        paused_ms = self.awake.tick(now_ms)
        if paused_ms:
            self.outbox.event(now_ms, "master.paused", self.settings.group, pause_ms=paused_ms)
        self.placer.tick(now_ms=now_ms)
        self._horizon.tick(now_ms)
        self._store_life.tick(paused_ms=paused_ms, now_ms=now_ms)
        self._watch.tick(now_ms=now_ms)
        self._removes.tick(now_ms=now_ms)
        self._ages.step(now_ms32=now_ms & MS32_MASK, slots_used=self.index.slots_used, budget=CLAMP_SLOTS)
        self._reports.tick(now_ms=now_ms)

    @property
    def has_work(self) -> bool:
        """Whether there is background work to do, soon or at once."""
        return self.sweeper.busy or self._reclaim.busy or self.index.growing

    def work_due(self, now_ms: int) -> bool:
        """Whether ``work`` should be called now, after an answer, rather than at the next tick."""
        return self.index.growing or self.sweeper.due(now_ms) or self._reclaim.due(now_ms)

    def work(self, *, now_ms: int) -> None:
        """One slice of background work, at most about 0.3 ms."""
        self.stores.mature(now_ms=now_ms, count_max=EVICT_SLICE)
        self._reclaim.step(now_ms=now_ms)
        ended = self.sweeper.step(now_ms=now_ms)
        if ended is not None:
            self._store_life.swept(ended, now_ms=now_ms)
        if self.index.growing:
            self.index.maintain(SPLIT_SLICE)

    def used_bytes(self) -> int:
        """Memory of objects that are readable or being written."""
        return self._pool.used_bytes()

    def check(self) -> None:
        """Assert what must hold between index, puts, stores and their allocators; for tests: walks everything."""
        self._pool.check(self.puts)
