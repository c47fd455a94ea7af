"""
The readable objects: the index, and what only a few of them have beside it, further replicas and an expiry.

A replica of an object lies at a *place*, a store and an offset; the first one stands in the index, the others
here. All replicas of an object have one generation. While no object is replicated or expires, a lookup is the
index's alone.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.limits import LEASE_TTL_MS
from kvops.store import messages as m
from kvops.store.index import ObjectIndex
from kvops.store.lease import MS32_MASK, ages_ms
from kvops.store.model import LOCATION, Digests, Locations, ObjectFlag, Slots, StoreId

SPECIAL: Final = ObjectFlag.HAS_TTL | ObjectFlag.REPLICATED
"""Flags of objects of which the index does not know everything."""

Place = tuple[StoreId, int]
"""Store and offset of one replica."""


class Objects:
    """
    Every COMPLETE object by key digest.

    Args:
        objects_max: How many there can be.
    """

    def __init__(self, *, objects_max: int) -> None:
        self.index = ObjectIndex(objects_max=objects_max)
        self._hidden = self.index.hidden
        self._further: dict[int, list[Place]] = {}  # by slot: places beyond the first
        self._expires: dict[int, int] = {}  # by slot, in ms
        self._ending: dict[int, dict[int, None]] = {}  # second → slots that have expired by then
        self._seconds: list[int] = []  # heap of these

    def __len__(self) -> int:
        return len(self.index)

    # Looking.

    def exists(self, digests: bytes, *, now_ms: int) -> bytes:
        """One byte a key: whether it is readable. Touches nothing."""
        if not (self._expires or self._further):
            return self.index.exists(digests)
        return self.readable(self.find(digests), now_ms=now_ms).astype(np.uint8).tobytes()

    def lookup(self, digests: bytes, *, now_ms: int) -> tuple[bytes, bytes]:
        """Where each key lies, with a lease on every hit: LOCATION rows, and EXTRA rows of further replicas."""
        rows = self.index.lookup(digests, now_ms32=now_ms & MS32_MASK)
        if self._expires or self._further:
            return self._lookup_special(digests, rows, now_ms=now_ms)
        return rows, b""

    def _lookup_special(self, digests: bytes, rows: bytes, *, now_ms: int) -> tuple[bytes, bytes]:
        """Another replica for one on a hidden store, a miss for an expired object."""
        locations = np.frombuffer(rows, LOCATION).copy()
        extras: list[tuple[int, int, tuple[int, int, int, int, int]]] = []
        slots = self.find(digests)
        for row in np.flatnonzero(self.index.location["flags"][slots] & SPECIAL).tolist():
            slot = int(slots[row])
            places = self.readable_places(slot, now_ms=now_ms)
            if not places:
                locations[row] = 0
                continue
            self.index.touched_ms[slot] = now_ms & MS32_MASK
            self.index.hits_total += not int(locations["store"][row])
            generation, _, size, _, flags = self.index.location[slot].tolist()
            locations[row] = (generation, places[0][1], size, places[0][0], flags)
            extras += [(row, 0, (generation, offset, size, store, flags)) for store, offset in places[1:]]
        return locations.tobytes(), np.array(extras, m.EXTRA).tobytes()

    def touch(self, digests: bytes, *, now_ms: int) -> int:
        """
        Renew leases and recency of what may be read; memory that a drain waits for is left to its end.

        Returns:
            Of how many keys.
        """
        slots = self.find(digests)
        readable = self.readable(slots, now_ms=now_ms)
        self.index.touched_ms[slots[readable]] = now_ms & MS32_MASK
        return int(np.count_nonzero(readable))

    def stat(self, digests: bytes, *, now_ms: int) -> bytes:
        """STAT_ROW rows: all that is known of each key. Touches nothing."""
        slots = self.find(digests)
        rows = np.zeros(len(slots), m.STAT_ROW)
        special = (self.index.location["flags"][slots] & SPECIAL) != 0
        plain = np.flatnonzero(self.readable(slots, now_ms=now_ms) & ~special)
        at = slots[plain]
        rows["location"][plain] = self.index.location[at]
        rows["age_ms"][plain] = ages_ms(self.index.touched_ms[at], now_ms & MS32_MASK)
        rows["depth"][plain], rows["tenant"][plain] = self.index.depth[at], self.index.tenant[at]
        rows["replicas"][plain] = 1
        for number in np.flatnonzero(special).tolist():
            row, slot = rows[number], int(slots[number])
            places = self.readable_places(slot, now_ms=now_ms)
            if not places:
                continue
            row["location"] = self.index.location[slot]
            row["location"]["store"], row["location"]["offset"] = places[0]
            row["age_ms"] = (now_ms - int(self.index.touched_ms[slot])) & MS32_MASK
            row["depth"] = self.index.depth[slot]
            row["tenant"] = self.index.tenant[slot]
            row["ttl_left_ms"] = min(max(self._expires.get(slot, now_ms) - now_ms, 0), MS32_MASK)
            row["replicas"] = len(places)
        return rows.tobytes()

    def find(self, digests: bytes) -> Slots:
        """Slots of the keys, readable or not; 0 where absent."""
        return self.index.find(np.frombuffer(digests, np.uint64).reshape(-1, 2))

    def places(self, slot: int) -> list[Place]:
        """Where every replica of an object lies."""
        row = self.index.location[slot]
        return [(StoreId(int(row["store"])), int(row["offset"])), *self._further.get(slot, ())]

    def readable_places(self, slot: int, *, now_ms: int) -> list[Place]:
        """Those on stores that are not hidden; none once it has expired."""
        if slot == 0 or self._expires.get(slot, now_ms + 1) <= now_ms:
            return []
        return [place for place in self.places(slot) if not self._hidden[place[0]]]

    def readable(self, slots: Slots, *, now_ms: int) -> NDArray[np.bool_]:
        """Which of these slots (0: none) hold an object that may be read."""
        readable: NDArray[np.bool_] = ~self._hidden[self.index.location["store"][slots]] & (slots != 0)
        if self._further or self._expires:
            special = self.index.location["flags"][slots] & SPECIAL
            for at in np.flatnonzero(special).tolist():
                readable[at] = bool(self.readable_places(int(slots[at]), now_ms=now_ms))
        return readable

    def further_places(self, slots: Slots) -> list[tuple[int, StoreId, int]]:
        """Slot, store and offset of every replica beyond the first."""
        if not self._further:
            return []
        return [(slot, *place) for slot in slots.tolist() for place in self._further.get(slot, ())]

    def lying_on(
        self, store: StoreId, *, slots_used: int
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint16]]:
        """Offset, size and flags of every replica on a store. Walks everything: some ms for a million objects."""
        slots = np.flatnonzero(self.index.location["store"][:slots_used] == store)
        further = [(slot, at) for slot, places in self._further.items() for on, at in places if on == store]
        every = np.concatenate([slots, np.array([slot for slot, _ in further], np.int64)])
        offsets = np.concatenate(
            [self.index.location["offset"][slots], np.array([at for _, at in further], np.uint64)]
        )
        return offsets, self.index.location["size"][every], self.index.location["flags"][every]

    def on_store(self, store: StoreId, start: int, count: int) -> tuple[Slots, int]:
        """
        Those of ``count`` slots from ``start`` on that may have a replica there, and where to go on.

        An object that is not ``replicated`` lies there for certain; of the others ``places`` says.
        """
        stop = min(start + count, self.index.slots_used)
        column = self.index.location[start:stop]
        may: NDArray[np.bool_] = column["store"] == store
        if self._further:
            may |= (column["flags"] & ObjectFlag.REPLICATED) != 0
        return np.flatnonzero(may) + start, stop

    def replicated(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these objects may have further replicas."""
        if not self._further:
            return np.zeros(len(slots), np.bool_)
        flags: NDArray[np.uint16] = self.index.location["flags"][slots]
        replicated: NDArray[np.bool_] = (flags & ObjectFlag.REPLICATED) != 0
        return replicated

    # Changing.

    def insert(
        self,
        digests: Digests,
        locations: Locations,
        depths: NDArray[np.uint16],
        tenants: NDArray[np.uint16],
        *,
        now_ms: int,
    ) -> Slots:
        """Make objects readable: keys that are absent and distinct. Recency is now, but no lease is granted."""
        touched_ms = (now_ms - LEASE_TTL_MS) & MS32_MASK
        return self.index.insert(digests, locations, depths, tenants, touched_ms=touched_ms)

    def enter(self, rows: NDArray[np.void], *, now_ms: int) -> tuple[NDArray[np.void], Slots]:
        """
        Make objects readable that a journal or a leader names.

        Args:
            rows: COMPLETE_ROW, one for every replica; those of one key may be known, or come together.
            now_ms: Recency.

        Returns:
            The rows that were objects of their own, and their slots. The others were further replicas of what stands
            here now; those of another generation are passed over.
        """
        digests = np.ascontiguousarray(rows["digest"])
        fresh = self.index.find(digests) == 0
        if len(rows) > 1:
            first = np.zeros(len(rows), np.bool_)
            first[np.unique(digests, axis=0, return_index=True)[1]] = True
            fresh &= first
        part = rows[fresh]
        slots = self.insert(
            np.ascontiguousarray(part["digest"]),
            part["location"],
            part["depth"],
            part["tenant"],
            now_ms=now_ms,
        )
        for row in rows[~fresh]:
            slot = self.index.find_one(np.ascontiguousarray(row["digest"]).tobytes())
            if self.index.location["generation"][slot] == row["location"]["generation"]:
                place = (StoreId(int(row["location"]["store"])), int(row["location"]["offset"]))
                self.add_place(slot, place)
        return part, slots

    def add_place(self, slot: int, place: Place) -> None:
        """Another replica of an object, or one that is known."""
        if place not in self.places(slot):
            self._further.setdefault(slot, []).append(place)
            self.index.location["flags"][slot] |= ObjectFlag.REPLICATED

    def drop_places(self, slot: int, store: StoreId) -> bool:
        """A store's replica is gone; False when it was the last one, and the object has to be forgotten."""
        left = [place for place in self.places(slot) if place[0] != store]
        if not left:
            return False
        self.index.location["store"][slot], self.index.location["offset"][slot] = left[0]
        if left[1:]:
            self._further[slot] = left[1:]
        else:
            self._further.pop(slot, None)
            self.index.location["flags"][slot] &= ~np.uint16(ObjectFlag.REPLICATED)
        return True

    def expire_at(self, slot: int, when_ms: int) -> None:
        """Let an object (with the flag HAS_TTL) be readable until then."""
        self._expires[slot] = when_ms
        second = -(-when_ms // 1_000)
        if second not in self._ending:
            self._ending[second] = {}
            heapq.heappush(self._seconds, second)
        self._ending[second][slot] = None

    def expiry(self, slot: int) -> int:
        """When an object's time is over, in ms; 0: never."""
        return self._expires.get(slot, 0)

    def expiries(self, slots: Slots) -> list[tuple[int, int]]:
        """Generation of each of these objects that expires, and when."""
        if not self._expires:
            return []
        generations = self.index.location["generation"][slots].tolist()
        return [
            (generation, self._expires[slot])
            for slot, generation in zip(slots.tolist(), generations, strict=True)
            if slot in self._expires
        ]

    def expired(self, *, now_ms: int, count_max: int) -> list[int]:
        """Slots of objects whose time is over, each once; up to a second after they can be read no more."""
        due: list[int] = []
        while self._seconds and self._seconds[0] * 1_000 <= now_ms and len(due) < count_max:
            slots = self._ending[self._seconds[0]]
            while slots and len(due) < count_max:
                due.append(slots.popitem()[0])
            if not slots:
                del self._ending[heapq.heappop(self._seconds)]
        return due

    def forget(self, slots: Slots) -> list[list[Place]]:
        """Drop objects; where the replicas of each lay."""
        locations = self.index.location[slots]
        places = [
            [place] for place in zip(locations["store"].tolist(), locations["offset"].tolist(), strict=True)
        ]
        for at in np.flatnonzero(locations["flags"] & SPECIAL).tolist():
            slot = int(slots[at])
            places[at] += self._further.pop(slot, [])
            when_ms = self._expires.pop(slot, None)
            if when_ms is not None:
                # Or what is evicted long before its time would be remembered until then.
                self._ending.get(-(-when_ms // 1_000), {}).pop(slot, None)
        self.index.remove(slots)
        return places

    def check(self) -> None:
        """Assert that nothing is remembered of objects that are gone; for tests."""
        self.index.check()
        ending = {slot: second for second, slots in self._ending.items() for slot in slots}
        assert ending == {slot: -(-when_ms // 1_000) for slot, when_ms in self._expires.items()}
        assert sorted(self._seconds) == sorted(self._ending)
        for slot in (*self._expires, *self._further):
            assert self.index.location["store"][slot], "beside the index stands only what is in it"


def with_ttl(rows: NDArray[np.void], slots: Slots) -> list[tuple[int, int]]:
    """Slot and generation of those of these objects, given as COMPLETE_ROW, that have a TTL."""
    some = np.flatnonzero(rows["location"]["flags"] & ObjectFlag.HAS_TTL)
    return list(zip(slots[some].tolist(), rows["location"]["generation"][some].tolist(), strict=True))
