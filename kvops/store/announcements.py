"""
What stores announce that their memory holds, after the master or their node started, taken into the index.

The node is right about what its memory holds. Where two stores hold one key, the newer generation stays. What a
remove meant, or what was dropped while the store was away, is not taken in: its memory is cleared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvops.errors import WireError
from kvops.limits import DIGEST_BYTES
from kvops.store import messages as m
from kvops.store.bodies import rows_of
from kvops.store.generations import Generations
from kvops.store.journal import COMPLETE_ROW
from kvops.store.journal import Kind as JournalKind
from kvops.store.model import (
    GENERATION_SEQUENCE_BITS,
    PERMANENT_FLAGS,
    Generation,
    ObjectFlag,
    chunk_of,
    chunks_of,
)
from kvops.store.objects import with_ttl
from kvops.store.outbox import Outbox
from kvops.store.pool import Pool
from kvops.store.removes import Removes
from kvops.store.stores import Store
from kvops.transfer.layout import footprint_bytes


class Announcements:
    """Takes slot tables in, frame by frame."""

    def __init__(self, pool: Pool, removes: Removes, generations: Generations, outbox: Outbox) -> None:
        self._pool, self._objects, self._index = pool, pool.objects, pool.index
        self._removes, self._generations, self._outbox = removes, generations, outbox

    def take(self, store: Store, body: bytes, *, now_ms: int) -> bytes | None:
        """
        Rows of a node's slot table; the slots that it is to forget, or None when the table is at its end.

        After a broken connection the announcement starts over: what was taken in before is passed over.
        """
        if not store.announcing or store.announced is None:
            raise WireError(f"store {store.mount.name} announced slots nobody asked for", fix="")
        rows = rows_of(body, m.SLOT_ROW)
        if not len(rows):
            self._end(store)
            return None
        return self._reconcile(store, rows) if store.trusted else self._take(store, rows, now_ms=now_ms)

    def _end(self, store: Store) -> None:
        store.announcing = False
        for generation in store.doomed:  # not there any more
            self._removes.cleared(store.id, generation)
        store.doomed.clear()

    def _take(self, store: Store, rows: NDArray[np.void], *, now_ms: int) -> bytes:
        assert store.announced is not None
        known = self._index.find(np.ascontiguousarray(rows["digest"]))
        seen = store.announced[known] & (self._index.location["generation"][known] == rows["generation"])
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
        slots = self._index.find(digests)
        location = self._index.location
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
        if self._removes.any_remembered or store.doomed:
            fresh &= ~self._unwanted(store, rows)
        words = np.sort(digests[:, 0])
        if (words[1:] == words[:-1]).any():  # a key twice
            fresh[:] = False
        self._adopt(store, rows if fresh.all() else rows[fresh], now_ms=now_ms)
        for row in rows[~(known | fresh)]:
            self._take_one(store, row, now_ms=now_ms)
        return forget.tobytes()

    def _reconcile(self, store: Store, rows: NDArray[np.void]) -> bytes:
        """
        Rows of a store whose allocator followed the last leader; the slots that it is to forget.

        What the directory does not know was granted by that leader, and never acknowledged; or dropped by it, and
        the node had not heard. Its memory counts as free already.
        """
        assert store.announced is not None
        slots = self._index.find(np.ascontiguousarray(rows["digest"]))
        known = (slots != 0) & (self._index.location["generation"][slots] == rows["generation"])
        forget = []
        for row, (generation, offset) in enumerate(rows[["generation", "offset"]].tolist()):
            if known[row] and (store.id, offset) in self._objects.places(int(slots[row])):
                store.announced[slots[row]] = True
                continue
            ours = generation >> GENERATION_SEQUENCE_BITS == self._generations.term
            if not (ours or generation in store.releasing):
                forget.append((generation, offset))
        return np.array(forget, m.FREE_ROW).tobytes()

    def _unwanted(self, store: Store, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which announced slots hold what was dropped while their store was away."""
        raw = np.ascontiguousarray(rows["digest"]).tobytes()
        return np.array(
            [
                generation in store.doomed
                or self._removes.meant(raw[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES], generation)
                for at, generation in enumerate(rows["generation"].tolist())
            ],
            np.bool_,
        )

    def _take_one(self, store: Store, row: np.void, *, now_ms: int) -> None:
        """One announced slot whose key is known, removed, or named twice."""
        _, number, offset, size, _, _, _, flags = row.tolist()
        generation = Generation(number)
        digest = np.ascontiguousarray(row["digest"]).tobytes()
        slot = self._index.find_one(digest)
        known = int(self._index.location["generation"][slot]) if slot else 0
        if slot and known == generation:
            assert store.announced is not None
            if (store.id, offset) not in self._objects.places(slot):
                self._objects.add_place(slot, (store.id, offset))
                self._remember(store, np.array([row], m.SLOT_ROW))
            store.announced[slot] = True
            store.objects += 1
        elif known > generation or generation in store.doomed or self._removes.meant(digest, generation):
            footprint = footprint_bytes(size, chunk_of(flags))
            end = store.doomed.pop(generation, now_ms)
            self._pool.release((store.id, offset), generation, footprint, not_before_ms=end)
        else:
            if slot:
                self._pool.drop(np.array([slot], np.int64), now_ms=now_ms)
            self._adopt(store, np.array([row], m.SLOT_ROW), now_ms=now_ms)

    def _adopt(self, store: Store, rows: NDArray[np.void], *, now_ms: int) -> None:
        """Objects that only their store knew: keys that are absent and distinct."""
        if not len(rows):
            return
        entry = self._remember(store, rows)
        digests = np.ascontiguousarray(rows["digest"])
        slots = self._objects.insert(digests, entry["location"], rows["depth"], rows["tenant"], now_ms=now_ms)
        assert store.announced is not None
        store.announced[slots] = True
        store.objects += len(rows)
        for slot, _ in with_ttl(entry, slots):
            self._objects.expire_at(slot, now_ms)  # nobody knows any more how long it was to live

    def _remember(self, store: Store, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Replicas that only their store knew, as COMPLETE_ROW."""
        entry = np.empty(len(rows), COMPLETE_ROW)
        locations = entry["location"]
        for name in ("generation", "offset", "size"):
            locations[name] = rows[name]
        locations["store"] = store.id
        locations["flags"] = rows["flags"] & (PERMANENT_FLAGS | ObjectFlag.HAS_TTL)
        for name in ("digest", "chunk", "depth", "tenant"):
            entry[name] = rows[name]
        self._outbox.remember(JournalKind.COMPLETE, entry)
        return entry
