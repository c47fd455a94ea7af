"""
Ends puts under way that will not be whole: revoked, too old, left by their writers, or losing their memory.

Their memory is cleared by its node before anybody else is given it: a writer that was only slow finds no slot.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvops.limits import PUT_TTL_MS
from kvops.store.awake import AwakeClock
from kvops.store.generations import Generations
from kvops.store.model import StoreId
from kvops.store.outbox import Outbox
from kvops.store.pool import Pool
from kvops.store.puts import Put, PutTable
from kvops.store.stores import Store

ORPHAN_MS: Final = 5_000  # a put outlives the connection of its last writer, which may come back by another


class PutWatch:
    """Puts under way, by their deadlines and the life of their writers and stores."""

    def __init__(
        self, puts: PutTable, pool: Pool, generations: Generations, awake: AwakeClock, outbox: Outbox
    ) -> None:
        self._puts, self._pool = puts, pool
        self._generations, self._awake, self._outbox = generations, awake, outbox
        self._orphans: deque[tuple[int, Put]] = deque()  # since when a put has had no writer's connection

    def floor(self) -> int:
        """No put below this generation is under way any more."""
        oldest = self._puts.oldest()
        return oldest.generation if oldest is not None else self._generations.ceiling()

    def overdue(self, put: Put, *, now_ms: int) -> bool:
        """Whether a put has taken longer than any writer may."""
        return self._awake.read(now_ms) - put.started_ms >= PUT_TTL_MS

    def abandon(self, put: Put, *, now_ms: int) -> None:
        """End a put without an object."""
        self._puts.pop(put)
        for place in put.places:
            if place[0]:
                self._pool.release(place, put.generation, put.footprint, not_before_ms=now_ms)

    def preempt(self, put: Put, *, now_ms: int) -> None:
        """``abandon``, without its writer's will."""
        self._outbox.counters.preempted += 1
        self.abandon(put, now_ms=now_ms)

    def writer_left(self, conn: int, *, now_ms: int) -> None:
        """A connection ended: puts that have no other soon are anybody's."""
        self._orphans += [(self._awake.read(now_ms), put) for put in self._puts.leave(conn)]

    def tick(self, *, now_ms: int) -> None:
        """Deadlines."""
        awake_ms = self._awake.read(now_ms)
        while (put := self._puts.oldest()) is not None and self.overdue(put, now_ms=now_ms):
            self.preempt(put, now_ms=now_ms)
        while self._orphans and awake_ms - self._orphans[0][0] >= ORPHAN_MS:
            put = self._orphans.popleft()[1]
            if not put.writers and self._puts.get(put.digest) is put:
                self.preempt(put, now_ms=now_ms)

    # Stores that puts lie on.

    def take_place(self, put: Put, store: Store, *, now_ms: int) -> None:
        """A put loses its replica on a store; one that had no other is revoked, and its writer is told GONE."""
        kept: list[tuple[StoreId, int]] = []
        for place in put.places:
            if place[0] == store.id:
                self._pool.release(place, put.generation, put.footprint, not_before_ms=now_ms)
                place = (StoreId(0), 0)
            kept.append(place)
        put.places = kept
        if not any(place[0] for place in kept):
            self._puts.pop(put)

    def store_lost(self, store: Store) -> None:
        """Puts lose what they had there; no memory comes back."""
        for put in self._puts:
            if any(place[0] == store.id for place in put.places):
                put.places = [(StoreId(0), 0) if place[0] == store.id else place for place in put.places]
                if not any(place[0] for place in put.places):
                    self._puts.pop(put)

    def without_drained(self, put: Put, *, now_ms: int) -> Put | None:
        """A put that another writer asks about, without what lies on stores that are drained."""
        for store_id, _ in put.places:
            store = self._pool.stores.get(store_id)
            if store is not None and store.hidden_on_purpose:
                self.take_place(put, store, now_ms=now_ms)
        return self._puts.get(put.digest)
