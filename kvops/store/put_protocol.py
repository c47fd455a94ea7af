"""
How objects come into the pool: a put is granted memory, its writer writes there, and then it is readable.

A put of a key that is readable is refused; one that another writer has under way is waited for, or joined where
both write parts of it. A store that is to be drained puts what it holds a second time, to take its own place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvops.errors import WireError
from kvops.limits import DIGEST_BYTES, OBJECT_BYTES_MAX, PROCESSING_MAX, PUTS_PER_FRAME_MAX, REPLICAS_MAX
from kvops.store import messages as m
from kvops.store.awake import AwakeClock
from kvops.store.bodies import rows_of, unpack_head
from kvops.store.drain import Holds
from kvops.store.generations import Generations
from kvops.store.journal import COMPLETE, COMPLETE_ROW, EXPIRES_ROW
from kvops.store.journal import Kind as JournalKind
from kvops.store.lease import MS32_MASK
from kvops.store.messages import PutStatus
from kvops.store.model import LOCATION, LOCATION_ROW, PERMANENT_FLAGS, ObjectFlag, StoreId, chunk_of
from kvops.store.outbox import Outbox
from kvops.store.placement import Candidate, Writer
from kvops.store.placer import Placer
from kvops.store.pool import Pool
from kvops.store.put_watch import PutWatch
from kvops.store.puts import Put, PutTable
from kvops.store.reclaim import Reclaim
from kvops.transfer.layout import footprint_bytes


class PutProtocol:
    """Answers PUT_START, MOVE_START, PUT_END and PUT_REVOKE."""

    def __init__(
        self,
        pool: Pool,
        puts: PutTable,
        *,
        watch: PutWatch,
        placer: Placer,
        reclaim: Reclaim,
        holds: Holds,
        generations: Generations,
        awake: AwakeClock,
        outbox: Outbox,
    ) -> None:
        self._pool, self._objects, self._index, self._stores = pool, pool.objects, pool.index, pool.stores
        self._puts, self._watch = puts, watch
        self._placer, self._reclaim, self._holds = placer, reclaim, holds
        self._generations, self._awake, self._outbox = generations, awake, outbox

    # They start.

    def start(self, conn: int, writer: Writer, body: bytes, *, now_ms: int) -> bytes:
        """Memory for keys that are not readable: a status a row, and a location for every replica."""
        replicas, flags, tenant, _, ttl_ms = unpack_head(m.PUT_HEAD, body)
        rows = rows_of(body, m.PUT_ROW, start=m.PUT_HEAD.size, count_max=PUTS_PER_FRAME_MAX)
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
        slots = self._index.find(digests)
        readable = self._objects.readable(slots, now_ms=now_ms).tolist()
        sizes, depths, raw = rows["size"].tolist(), rows["depth"].tolist(), digests.tobytes()
        order = self._placer.order(writer)
        for row, slot in enumerate(slots.tolist()):
            granted.append(nothing)
            if readable[row]:
                self._index.touched_ms[slot] = now_ms & MS32_MASK
                status[row] = PutStatus.EXISTS
                continue
            # An object whose store is away stays until its successor is whole.
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self._puts.get(digest)
            if put is not None:
                put = self._watch.without_drained(put, now_ms=now_ms)
            joins = put is not None and flags & put.flags & ObjectFlag.PARTS and put.size == sizes[row]
            if put is not None and (
                self._watch.overdue(put, now_ms=now_ms) or not (put.writers or joins)  # a dead writer's
            ):
                self._watch.preempt(put, now_ms=now_ms)
                put = None
            if put is None:
                if self._placer.random:
                    order = self._placer.order(writer)
                size, depth = sizes[row], depths[row]
                made = self._grant(
                    digest, size, writer, order, replicas, flags, tenant, depth, ttl_ms, now_ms=now_ms
                )
                if not isinstance(made, Put):
                    status[row] = made
                    continue
                put = made
            elif not joins:
                status[row] = PutStatus.IN_PROGRESS
                continue
            self._puts.join(put, conn)
            rows_out = [
                LOCATION_ROW.pack(put.generation, offset, put.size, store, put.flags)
                for store, offset in put.places[:replicas]
            ]
            granted[row] = b"".join(rows_out).ljust(len(nothing), b"\0")
        head = m.PUT_REPLY_HEAD.pack(self._stores.epoch, replicas)
        return b"".join((head, status, bytes(-count % 8), *granted))

    def _grant(
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
        if not 0 < size <= OBJECT_BYTES_MAX or len(self._puts) >= PROCESSING_MAX:
            return PutStatus.REFUSED
        footprint = footprint_bytes(size, chunk_of(flags))
        places = self._placer.place(order, writer, footprint=footprint, replicas=replicas)
        if places is None:
            if presses:
                self._reclaim.press(footprint, replicas)
                self._outbox.counters.no_space += 1
            return PutStatus.NO_SPACE
        if replicas > 1:
            flags |= ObjectFlag.REPLICATED
        generation = self._generations.next()
        started_ms = self._awake.read(now_ms)
        put = Put(digest, generation, size, footprint, depth, tenant, flags, ttl_ms, started_ms, places)
        self._puts.add(put)
        return put

    def move(self, conn: int, name: str, body: bytes, *, now_ms: int) -> bytes:
        """
        A store that is to be drained copies what it holds: puts of keys that are readable, to take their place.

        Everything but place and generation stays as it is. EXISTS: it is readable elsewhere as well. REFUSED: it
        is not there any more, or this store is not to be emptied.
        """
        rows = rows_of(body, m.PUT_ROW, start=m.PUT_HEAD.size, count_max=PUTS_PER_FRAME_MAX)
        source = self._stores.named(name)
        status = bytearray(len(rows))
        granted = [bytes(LOCATION_ROW.size)] * len(rows)
        if source is None or self._holds.migrating(source) is None:
            status = bytearray([PutStatus.REFUSED]) * len(rows)
            rows = rows[:0]
        digests = np.ascontiguousarray(rows["digest"])
        slots = self._index.find(digests)
        readable = self._objects.readable(slots, now_ms=now_ms).tolist()
        raw, sizes = digests.tobytes(), rows["size"].tolist()
        for row, slot in enumerate(slots.tolist()):
            assert source is not None
            generation, _, size, _, flags = self._index.location[slot].tolist()
            if not readable[row] or size != sizes[row]:
                status[row] = PutStatus.REFUSED
                continue
            held = [self._stores.get(place[0]) for place in self._objects.places(slot)]
            if source not in held or any(store is not None and store.takes_objects for store in held):
                status[row] = PutStatus.EXISTS
                continue
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self._puts.get(digest)
            if put is not None and not put.writers:
                self._watch.preempt(put, now_ms=now_ms)
                put = None
            if put is not None:
                status[row] = PutStatus.IN_PROGRESS
                continue
            writer = Writer(source.mount.host, source.mount.numa_node)
            made = self._grant(
                digest,
                size,
                writer,
                self._placer.order(writer),
                1,
                flags & (PERMANENT_FLAGS | ObjectFlag.HAS_TTL),
                int(self._index.tenant[slot]),
                int(self._index.depth[slot]),
                0,
                now_ms=now_ms,
                presses=False,  # what is put anew is worth more than what is cold here
            )
            if not isinstance(made, Put):
                status[row] = made
                continue
            made.moved_from = generation
            self._puts.join(made, conn)
            store_id, offset = made.places[0]
            granted[row] = LOCATION_ROW.pack(made.generation, offset, made.size, store_id, made.flags)
        head = m.PUT_REPLY_HEAD.pack(self._stores.epoch, 1)
        return b"".join((head, status, bytes(-len(status) % 8), *granted))

    # They end.

    def end(self, body: bytes, *, now_ms: int) -> bytes:
        """Puts whose writers are done become readable, with the replicas that were written."""
        rows = rows_of(body, m.END_ROW, count_max=PUTS_PER_FRAME_MAX)
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        generations, written = rows["generation"].tolist(), rows["written"].tolist()
        status = bytearray(len(rows))
        done: list[Put] = []
        for row, generation in enumerate(generations):
            digest = raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]
            put = self._puts.get(digest)
            if put is None or put.generation != generation:
                # Another rank was first, or the answer was lost and this is the second time.
                slot = self._index.find_one(digest)
                whole = slot and written[row] and int(self._index.location["generation"][slot]) == generation
                whole = whole and not all(self._is_drained(place[0]) for place in self._objects.places(slot))
                status[row] = PutStatus.STORED if whole else PutStatus.GONE
                continue
            self._puts.pop(put)
            kept = []
            if put.moved_from:
                # Removed or replaced meanwhile: the copy must not bring it back.
                slot = self._index.find_one(digest)
                if int(self._index.location["generation"][slot]) != put.moved_from:
                    written[row] = 0
            for replica, place in enumerate(put.places):
                if place[0] and written[row] >> replica & 1 and not self._is_drained(place[0]):
                    kept.append(place)
                elif place[0]:
                    self._pool.release(place, put.generation, put.footprint, not_before_ms=now_ms)
            put.places = kept
            status[row] = PutStatus.STORED if kept else PutStatus.GONE
            if kept:
                done.append(put)
        if done:
            self._complete(done, now_ms=now_ms)
        return bytes(status)

    def _complete(self, puts: list[Put], *, now_ms: int) -> None:
        """Make puts readable; recency is now, but no lease is granted."""
        self._outbox.counters.puts += len(puts)
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
        stale = self._index.find(digests)
        recency: dict[int, int] = {}  # of puts that are moves, by their position
        if stale.any():  # hidden, expired, or announced while this put was under way: the newer one stays
            for at, (put, slot) in enumerate(zip(puts, stale.tolist(), strict=True)):
                if put.moved_from:
                    recency[at] = int(self._index.touched_ms[slot])
                    put.expires_ms = self._objects.expiry(slot)
                    self._note_moved(slot)
            self._pool.drop(np.unique(stale[stale != 0]), now_ms=now_ms, patient=True)
        depths = np.array([put.depth for put in puts], np.uint16)
        tenants = np.array([put.tenant for put in puts], np.uint16)
        slots = self._objects.insert(digests, locations, depths, tenants, now_ms=now_ms)
        for at, touched_ms in recency.items():
            self._index.touched_ms[slots[at]] = touched_ms
        for put, slot in zip(puts, slots.tolist(), strict=True):
            for place in put.places[1:]:
                self._objects.add_place(slot, place)
            if put.ttl_ms and not put.expires_ms:
                put.expires_ms = now_ms + put.ttl_ms
            if put.expires_ms:
                self._objects.expire_at(slot, put.expires_ms)
            for store_id, _ in put.places:
                store = self._stores.get(store_id)
                if store is not None:
                    store.objects += 1
                    if store.announced is not None:
                        store.announced[slot] = True
        self._journal_complete(puts, now_ms=now_ms)

    def _note_moved(self, slot: int) -> None:
        """An object leaves stores that are to be drained."""
        for store_id, _ in self._objects.places(slot):
            store = self._stores.get(store_id)
            if store is not None:
                self._holds.moved(store, int(self._index.location["size"][slot]))

    def _journal_complete(self, puts: list[Put], *, now_ms: int) -> None:
        rows = [
            COMPLETE.pack(
                p.digest, p.generation, offset, p.size, store, p.flags, chunk_of(p.flags), p.depth, p.tenant
            )
            for p in puts
            for store, offset in p.places
        ]
        entry = np.frombuffer(b"".join(rows), COMPLETE_ROW)
        self._outbox.remember(JournalKind.COMPLETE, entry)
        ends = [(p.generation, p.expires_ms) for p in puts if p.expires_ms]
        if ends:
            self._outbox.remember(JournalKind.EXPIRES, np.array(ends, EXPIRES_ROW))

    def revoke(self, body: bytes, *, now_ms: int) -> bytes:
        """Writers give puts up."""
        rows = rows_of(body, m.END_ROW, count_max=PUTS_PER_FRAME_MAX)
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        status = bytearray(len(rows))
        for row, generation in enumerate(rows["generation"].tolist()):
            put = self._puts.get(raw[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])
            if put is None or put.generation != generation:
                status[row] = PutStatus.GONE
            else:
                self._watch.abandon(put, now_ms=now_ms)
                status[row] = PutStatus.REVOKED
        return bytes(status)

    def _is_drained(self, store_id: StoreId) -> bool:
        store = self._stores.get(store_id)
        return store is None or store.hidden_on_purpose
