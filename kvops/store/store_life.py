"""How stores come, stay in touch, and go: mounts, beats, silence, and the loss of their memory."""

from __future__ import annotations

from typing import Final

from kvops.errors import Refused, WireError
from kvops.limits import ALIGN_BYTES, LEASE_TTL_MS, STORE_SILENT_MS, STORE_TTL_MS
from kvops.net import wire
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.allocator import SEGMENT_BYTES_MAX
from kvops.store.announcements import Announcements
from kvops.store.drain import Holds
from kvops.store.generations import Generations
from kvops.store.horizon import LeaseHorizon
from kvops.store.model import GENERATION_SEQUENCE_BITS, StoreInfo, StoreState
from kvops.store.outbox import Outbox
from kvops.store.placer import Placer
from kvops.store.pool import Pool
from kvops.store.put_watch import PutWatch
from kvops.store.removes import Removes
from kvops.store.store_states import StoreStates, state_when_heard
from kvops.store.stores import SERVING, Store
from kvops.store.sweep import Cause, Sweep, Sweeper

_MOUNT_FIELDS: Final = tuple(name for name in m.Mount.__struct_fields__ if name != "highest_generation")


class StoreLife:
    """Stores from their mount until nothing in the index names them."""

    def __init__(
        self,
        pool: Pool,
        *,
        states: StoreStates,
        announcements: Announcements,
        holds: Holds,
        sweeper: Sweeper,
        placer: Placer,
        removes: Removes,
        watch: PutWatch,
        generations: Generations,
        horizon: LeaseHorizon,
        outbox: Outbox,
    ) -> None:
        self._pool, self._stores = pool, pool.stores
        self._states, self._announcements = states, announcements
        self._holds, self._sweeper, self._placer = holds, sweeper, placer
        self._removes, self._watch, self._generations = removes, watch, generations
        self._horizon, self._outbox = horizon, outbox

    # They come.

    def restore(self, info: StoreInfo, *, now_ms: int) -> Store:
        """Enter a store that a journal or a leader named; hidden until it mounts."""
        fields = {name: getattr(info, name) for name in _MOUNT_FIELDS}
        return self._stores.add(
            m.Mount(highest_generation=0, **(fields | {"populated_bytes": 0})),
            conn=0,
            state=StoreState.SUSPECTED,
            now_ms=now_ms,
            store_id=info.id,
        )

    def expect(self, store: Store, *, now_ms: int) -> None:
        """A restored store is to mount, and to announce what it holds; it is held as its name or host is."""
        self._pool.await_announcement(store)
        self._holds.entered(store, now_ms=now_ms)

    def mount(self, conn: int, mount: m.Mount, *, now_ms: int) -> tuple[Store, bytes]:
        """Take a store node in, with the answer to it; one that was only away keeps its id and all its objects."""
        if not (
            0 <= mount.capacity_bytes <= SEGMENT_BYTES_MAX
            and mount.capacity_bytes % ALIGN_BYTES == 0
            and mount.incarnation > 0
            and mount.highest_generation >= 0
        ):
            raise WireError(f"store {mount.name} offers {mount.capacity_bytes} B, which cannot be", fix="")
        _check_populated(mount, mount.populated_bytes)
        term = self._generations.term
        if mount.highest_generation >> GENERATION_SEQUENCE_BITS > term:
            raise Refused(
                f"store {mount.name} has seen master term {mount.highest_generation >> GENERATION_SEQUENCE_BITS},"
                f" this master is at term {term}",
                fix="the master must raise its term first",
            )
        known = self._stores.named(mount.name)
        if known is not None and known.mount.incarnation != mount.incarnation:
            self.lose(known, now_ms=now_ms, reason="it was restarted")
            known = None
        if known is not None and known.state is StoreState.GONE:
            known = None
        if known is None:
            known = self._stores.add(mount, conn=conn, state=StoreState.ANNOUNCING, now_ms=now_ms)
            self._outbox.remember_store(known.info())
            self.expect(known, now_ms=now_ms)
        else:
            known.mount = mount
            known.conn = conn
        known.seen_ms = now_ms
        if known.trusted and not known.populated_bytes:
            self._pool.build_allocator(known, mount.populated_bytes)
        if known.announcing and mount.highest_generation and not known.trusted:
            # The master before may have given leases on memory of which nothing is left to announce.
            known.closed_until_ms = self._horizon.started_ms + LEASE_TTL_MS
        self._stores.set_state(known, state_when_heard(known, now_ms))
        known.unsent = [(generation, release.offset) for generation, release in known.releasing.items()]
        self._stores.unsent |= bool(known.unsent)
        known.populate(mount.populated_bytes)
        self._outbox.event(
            now_ms,
            "store.mounted",
            mount.name,
            id=known.id,
            objects=mount.objects,
            populated_bytes=mount.populated_bytes,
        )
        # No put under way can lie on a store that still has to announce.
        fresh = known.announcing and not known.trusted
        floor = self._generations.ceiling() if fresh else self._watch.floor()
        return known, wire.encode(
            m.Mounted(store_id=known.id, term=term, announce=known.announcing, floor=floor)
        )

    def knows(self, mount: m.Mount) -> bool:
        """Whether this store, in this life of its process, has mounted here before."""
        known = self._stores.named(mount.name)
        return (
            known is not None
            and known.state is not StoreState.GONE
            and known.mount.incarnation == mount.incarnation
            and known.populated_bytes > 0
        )

    def announce(self, store: Store, body: bytes, *, now_ms: int) -> bytes:
        """Rows of its slot table; at their end, what the journal placed there and the node lacks is swept."""
        forget = self._announcements.take(store, body, now_ms=now_ms)
        if forget is not None:
            return forget
        self._sweeper.begin(Sweep(store, Cause.UNANNOUNCED))
        self._states.open(store, now_ms=now_ms)
        return b""

    # They stay in touch.

    def beat(self, store: Store | None, beat: m.Beat, *, now_ms: int) -> bytes:
        """A store lives; its memory may have grown, and the objects there may be wanted elsewhere."""
        term = self._generations.term
        if store is None or store.state is StoreState.GONE:
            return m.BEAT_REPLY.pack(term, 1, self._watch.floor())
        _check_populated(store.mount, beat.populated_bytes)
        store.seen_ms = now_ms
        clear = beat.loop_lag_ms < STORE_TTL_MS and now_ms >= store.suspect_until_ms
        if store.state is StoreState.SUSPECTED and clear:
            self._stores.set_state(store, state_when_heard(store, now_ms))
            self._outbox.event(now_ms, "store.recovered", store.mount.name)
        elif store.state in SERVING and beat.loop_lag_ms >= STORE_TTL_MS:
            self._states.suspect(store, reason="its data loop stands still", now_ms=now_ms)
        store.populate(beat.populated_bytes)
        hold = self._holds.migrating(store)
        if hold is not None and store.state is StoreState.READY:
            body = m.MIGRATE.pack(hold.number, hold.bandwidth_bps)
            self._outbox.send(store.conn, wire.pack(Kind.MIGRATE, body))
        return m.BEAT_REPLY.pack(term, 0, self._watch.floor())

    def disconnected(self, store: Store, *, now_ms: int) -> None:
        """The connection that it mounted by has ended: it is hidden at once."""
        store.conn = 0
        store.seen_ms = now_ms
        if store.state in SERVING:
            self._states.suspect(store, reason="its connection closed", now_ms=now_ms)

    def tick(self, *, paused_ms: int, now_ms: int) -> None:
        """Silence is a store's death in the end; ``paused_ms`` in which we were deaf are not held against it."""
        for store in self._stores:
            if paused_ms:
                store.seen_ms = min(now_ms, store.seen_ms + paused_ms)  # some have spoken since it ended
            if store.state is StoreState.ANNOUNCING and not store.announcing:
                self._states.open(store, now_ms=now_ms)
            silent = now_ms - store.seen_ms
            if store.state is StoreState.GONE or silent < STORE_SILENT_MS:
                continue
            if store.conn == 0 or silent >= 2 * STORE_TTL_MS:
                self.lose(store, now_ms=now_ms, reason=f"silent for {silent} ms")
            elif store.state in SERVING:
                self._states.suspect(store, reason=f"silent for {silent} ms", now_ms=now_ms)

    # They go.

    def leave(self, store: Store, *, now_ms: int) -> bytes:
        """A node is about to end: nothing names it from now on; for how long readers may need it, in ms."""
        if not store.leaving and store.state is not StoreState.GONE:
            store.leaving = True
            self._states.settle(store, now_ms=now_ms)
            self._outbox.event(now_ms, "store.leaving", store.mount.name, id=store.id, objects=store.objects)
        return m.LEAVE_REPLY.pack(max(0, self._horizon.end_ms(now_ms) - now_ms))

    def lose(self, store: Store, *, now_ms: int, reason: str) -> None:
        """A store's memory is gone: nothing names it from now on; its metadata is swept in slices."""
        if store.state is StoreState.GONE:
            return
        self._stores.set_state(store, StoreState.GONE)
        self._outbox.event(
            now_ms, "store.lost", store.mount.name, id=store.id, reason=reason, objects=store.objects
        )
        self._outbox.remember_store(store.info())
        self._placer.lost(store.id)
        for generation in [*store.releasing, *store.doomed]:
            self._removes.cleared(store.id, generation)
        store.releasing.clear()
        store.doomed.clear()
        store.unsent.clear()
        store.announcing = False
        self._pool.confirmed(store)
        self._watch.store_lost(store)
        self._holds.lost(store, now_ms=now_ms)

    def swept(self, sweep: Sweep, *, now_ms: int) -> None:
        """A sweep has ended."""
        store = sweep.store
        if sweep.cause is Cause.UNANNOUNCED:
            self._pool.confirmed(store)
        elif sweep.cause is Cause.LOST:
            self._stores.forget(store)
            self._outbox.event(now_ms, "store.forgotten", store.mount.name, id=store.id)
        self._holds.swept(sweep, now_ms=now_ms)


def _check_populated(mount: m.Mount, populated_bytes: int) -> None:
    if not 0 <= populated_bytes <= mount.capacity_bytes or populated_bytes % ALIGN_BYTES:
        raise WireError(
            f"store {mount.name} says that {populated_bytes} B of {mount.capacity_bytes} are there", fix=""
        )
