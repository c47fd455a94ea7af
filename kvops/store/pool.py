"""
The pool's readable objects and the stores that they lie on, with the ways in which both come apart again.

Whatever takes an object out of the index does it here: the journal hears of it, and its memory goes back to its
stores once their nodes have cleared it and its leases have ended.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvops.limits import LEASE_TTL_MS
from kvops.store.horizon import LeaseHorizon
from kvops.store.journal import GONE_ROW, LESS_ROW
from kvops.store.journal import Kind as JournalKind
from kvops.store.lease import MS32_MASK
from kvops.store.model import Generation, Slots, StoreId, chunk_of, chunks_of
from kvops.store.objects import Objects, Place
from kvops.store.outbox import Outbox
from kvops.store.puts import Put
from kvops.store.stores import Store, StoreTable
from kvops.transfer.layout import footprint_bytes


class Pool:
    """
    Objects, stores, and what the index says of stores that have not confirmed it yet.

    Args:
        objects: Everything that is readable.
        outbox: Where the journal's entries go.
        horizon: Until when a leader before us may have leased memory.
    """

    def __init__(self, objects: Objects, outbox: Outbox, horizon: LeaseHorizon) -> None:
        self.objects = objects
        self.index = objects.index
        self.stores = StoreTable(self.index.set_hidden)
        self._outbox, self._horizon = outbox, horizon
        self._unconfirmed: set[Store] = set()  # those of which the index may say more than they hold
        self._left: list[
            tuple[StoreId, int, int]
        ] = []  # memory that the last leader's readers may have leased

    # Objects leave.

    def drop(self, slots: Slots, *, now_ms: int, patient: bool = False) -> None:
        """
        Take COMPLETE objects out of the index; their memory comes back once their leases have ended.

        ``patient``: until then it is not even cleared.
        """
        locations = self.index.location[slots]
        ends = now_ms + LEASE_TTL_MS - ((now_ms - self.index.touched_ms[slots].astype(np.int64)) & MS32_MASK)
        footprints = footprint_bytes(locations["size"].astype(np.int64), chunks_of(locations["flags"]))
        unconfirmed = {
            store.id: store.announced[slots]
            for store in self._unconfirmed
            if store.announced is not None and not store.trusted
        }
        columns = (locations["generation"].tolist(), footprints.tolist(), ends.tolist())
        places = self.unindex(slots)
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
                self.release(
                    place, generation, footprint, not_before_ms=end, patient=patient and end > now_ms
                )

    def drop_lone(self, store: Store, slots: Slots, *, now_ms: int) -> None:
        """``drop``, for objects that lie on one store alone and that nobody can hold a lease on."""
        locations = self.index.location[slots]
        footprints = footprint_bytes(locations["size"].astype(np.int64), chunks_of(locations["flags"]))
        self.unindex(slots)
        store.objects -= len(slots)
        self.stores.release_many(
            store,
            locations["generation"].tolist(),
            offsets=locations["offset"].tolist(),
            footprints=footprints.tolist(),
            not_before_ms=now_ms,
        )

    def unindex(self, slots: Slots) -> list[list[Place]]:
        """Forget objects; where each of them lay. No memory comes back by this."""
        gone = np.empty(len(slots), GONE_ROW)
        gone["digest"] = self.index.digests(slots)
        gone["generation"] = self.index.location["generation"][slots]
        self._outbox.remember(JournalKind.GONE, gone)
        for store in self._unconfirmed:
            if store.announced is not None:
                store.announced[slots] = False  # whatever takes these slots next is another object
        return self.objects.forget(slots)

    def unplace(self, store: Store, slot: int) -> None:
        """Forget one of an object's replicas, of which another one stays. No memory comes back by this."""
        less = np.zeros(1, LESS_ROW)
        less["digest"] = self.index.digests(np.array([slot], np.int64))
        less["generation"], less["store"] = self.index.location["generation"][slot], store.id
        self._outbox.remember(JournalKind.LESS, less)
        self.objects.drop_places(slot, store.id)

    # Memory comes back.

    def release(
        self,
        place: Place,
        generation: Generation,
        footprint: int,
        *,
        not_before_ms: int,
        patient: bool = False,
    ) -> None:
        """Have one replica's memory cleared; free no earlier than ``not_before_ms``."""
        # The leader before us may have granted leases that we know nothing of.
        not_before_ms = max(not_before_ms, self._horizon.earlier_end_ms)
        self.stores.release(
            place[0],
            generation=generation,
            offset=place[1],
            footprint=footprint,
            not_before_ms=not_before_ms,
            patient=patient,
        )

    def release_replica(self, store: Store, slot: int, *, now_ms: int) -> None:
        """Have one replica's memory cleared, of an object that has others."""
        generation, _, size, _, flags = self.index.location[slot].tolist()
        footprint = footprint_bytes(size, chunk_of(flags))
        for place in self.objects.places(slot):
            if place[0] == store.id:
                store.objects -= 1
                self.release(place, generation, footprint, not_before_ms=now_ms)

    def used_bytes(self) -> int:
        """Memory of objects that are readable or being written."""
        return self.stores.capacity_bytes() - self.stores.free_bytes() - self.stores.releasing_bytes()

    # Stores that have not told yet what they hold.

    def await_announcement(self, store: Store) -> None:
        """What the index says of this store counts for little until its node has said it too."""
        store.announcing = True
        store.announced = np.zeros(self.index.objects_max + 1, np.bool_)  # zero pages until touched
        self._unconfirmed.add(store)

    def confirmed(self, store: Store) -> None:
        """The index says of this store what it holds, or nothing any more."""
        store.announced, store.trusted = None, False
        self._unconfirmed.discard(store)

    def take_over(self, left: list[tuple[StoreId, int, int]]) -> None:
        """Store, offset and footprint of memory that objects left so lately that leases may be open on it."""
        self._left = left

    def build_allocator(self, store: Store, populated_bytes: int) -> None:
        """Of a trusted store: free is what is populated, and neither holds an object nor was left a moment ago."""
        store.populate(populated_bytes)
        offsets, sizes, flags = self.objects.lying_on(store.id, slots_used=self.index.slots_used)
        footprints = footprint_bytes(sizes.astype(np.int64), chunks_of(flags)).astype(np.uint64)
        held = store.allocator.reserve_batch(offsets, footprints)
        assert held.all(), "the directory gives no byte twice, and none that is not there"
        store.objects = len(offsets)
        for store_id, offset, footprint in self._left:
            if store_id == store.id and store.allocator.reserve(offset, footprint):
                self.stores.mature_at(self._horizon.earlier_end_ms, store, offset, footprint)

    def check(self, puts: Iterable[Put]) -> None:
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
        for put in puts:
            for store_id, offset in put.places:
                if store_id:
                    held[store_id].append((offset, put.footprint))
        self.stores.check(held, objects)
