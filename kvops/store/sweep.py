"""
Walks over the index, in slices, that forget what lay on one store: lost, drained, or come back with less.

A drain's walk begins when readers' leases have ended and puts under way there are revoked; a second walk then
counts what still lies there, and were it not 0, the sweep would begin again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.store.outbox import Counters
from kvops.store.pool import Pool
from kvops.store.put_watch import PutWatch
from kvops.store.puts import Put, PutTable
from kvops.store.stores import Store

SWEEP_OBJECTS: Final = 128  # a slice; each is dropped by itself, about 3 µs
SWEEP_SLOTS: Final = 4_096  # … looked at
COUNT_SLOTS: Final = 16_384
REVOKE_PUTS: Final = 64
BUSY_INTERVAL_MS: Final = 15  # between slices while requests come: well under 1 % of them meet one


class Stage(Enum):
    """How far a sweep has come."""

    LEASES = "leases"
    SWEEP = "sweep"
    COUNT = "count"
    DONE = "done"


class Cause(Enum):
    """Why a store is swept."""

    LOST = "lost"  # its memory is gone
    UNANNOUNCED = "unannounced"  # the journal knew objects that its node does not hold
    DRAIN = "drain"


@dataclass(slots=True, eq=False)
class Sweep:
    """One walk over the index for one store."""

    store: Store
    cause: Cause
    not_before_ms: int = 0
    stage: Stage = Stage.SWEEP
    at: int = 1  # the next slot
    found: int = 0  # by the count so far
    swept: int = 0
    left: int = -1  # by the last whole count
    objects_at_call: int = 0
    bytes_at_call: int = 0
    puts: list[Put] | None = None  # to look through for those to revoke; None: not listed yet

    @property
    def gives_back(self) -> bool:
        """Whether the memory of what is swept comes back to the store's allocator, which has it as taken."""
        return self.cause is Cause.DRAIN or (self.cause is Cause.UNANNOUNCED and self.store.trusted)


class Sweeper:
    """
    Sweeps under way, a slice at a time.

    Args:
        pool: Objects and stores.
        puts: Puts under way.
        watch: Revokes those that lie where a drain sweeps.
        counters: Of the puts that there have been: sweeps go slowly while clients ask for more.
    """

    def __init__(self, pool: Pool, puts: PutTable, watch: PutWatch, counters: Counters) -> None:
        self.swept_total = 0
        self._pool, self._objects = pool, pool.objects
        self._puts, self._watch, self._counters = puts, watch, counters
        self._active: deque[Sweep] = deque()
        self._waiting: list[Sweep] = []  # for leases, or for an announcement
        self._last_ms = -BUSY_INTERVAL_MS
        self._asked = -1

    def begin(self, sweep: Sweep) -> None:
        """Enter a sweep; one that the same store had for another cause ends, unless it is an announcement's."""
        if sweep.cause is not Cause.UNANNOUNCED:
            self.cancel(sweep.store, keep_announcement=sweep.cause is Cause.DRAIN)
        if sweep.cause is Cause.DRAIN:
            sweep.stage = Stage.LEASES
            self._waiting.append(sweep)
        else:
            self._active.append(sweep)

    def cancel(self, store: Store, *, keep_announcement: bool = True) -> None:
        """End a store's sweeps where they are."""

        def kept(sweep: Sweep) -> bool:
            announcement = keep_announcement and sweep.cause is Cause.UNANNOUNCED
            return sweep.store is not store or announcement

        self._active = deque(filter(kept, self._active))
        self._waiting = list(filter(kept, self._waiting))

    @property
    def busy(self) -> bool:
        """Whether any sweep has slices to do now."""
        return bool(self._active) or any(sweep.puts != [] for sweep in self._waiting)

    def due(self, now_ms: int) -> bool:
        """Whether a slice should be done now."""
        if not (self._active or self._waiting):
            return False
        if not (self.busy or any(self._may_sweep(sweep, now_ms) for sweep in self._waiting)):
            return False
        return self._requests() == self._asked or now_ms - self._last_ms >= BUSY_INTERVAL_MS

    def _requests(self) -> int:
        """How many clients' requests there have been."""
        return self._pool.index.lookups_total + self._counters.puts

    @staticmethod
    def _may_sweep(sweep: Sweep, now_ms: int) -> bool:
        store = sweep.store
        return now_ms >= sweep.not_before_ms and not store.announcing and store.announced is None

    def step(self, *, now_ms: int) -> Sweep | None:
        """One slice, if it is time for one; the sweep that it ended."""
        if not self.due(now_ms):
            return None
        self._last_ms, self._asked = now_ms, self._requests()
        for sweep in [one for one in self._waiting if one.puts != []]:
            self._revoke_some(sweep, now_ms)
            return None
        ripe = [one for one in self._waiting if self._may_sweep(one, now_ms)]
        for sweep in ripe:
            sweep.stage = Stage.SWEEP
            sweep.objects_at_call = sweep.objects_at_call or sweep.store.objects  # after a master's restart
            self._waiting.remove(sweep)
            self._active.append(sweep)
        if not self._active:
            return None
        sweep = self._active.popleft()
        over = self._sweep_some(sweep, now_ms) if sweep.stage is Stage.SWEEP else self._count_some(sweep)
        if not over:
            self._active.append(sweep)
            return None
        sweep.stage = Stage.DONE
        return sweep

    def _revoke_some(self, sweep: Sweep, now_ms: int) -> None:
        if sweep.puts is None:
            sweep.puts = list(self._puts)
        for put in sweep.puts[-REVOKE_PUTS:]:
            if self._puts.get(put.digest) is put:
                self._watch.take_place(put, sweep.store, now_ms=now_ms)
        del sweep.puts[-REVOKE_PUTS:]

    def _sweep_some(self, sweep: Sweep, now_ms: int) -> bool:
        """Forget some of a store's objects; whether the whole sweep is over."""
        store = sweep.store
        slots, stop = self._objects.on_store(store.id, sweep.at, SWEEP_SLOTS)
        if sweep.cause is Cause.UNANNOUNCED and store.announced is not None:
            slots = slots[~store.announced[slots]]
        if len(slots) > SWEEP_OBJECTS:
            slots = slots[:SWEEP_OBJECTS]
            stop = int(slots[-1]) + 1
        last: NDArray[np.bool_] = ~self._objects.replicated(slots)  # of each, nothing lies elsewhere
        for at in np.flatnonzero(~last).tolist():
            slot = int(slots[at])
            places = self._objects.places(slot)
            if not any(place[0] == store.id for place in places):
                slots[at] = 0
            elif all(place[0] == store.id for place in places):
                last[at] = True
            else:
                if sweep.gives_back:
                    self._pool.release_replica(store, slot, now_ms=now_ms)
                self._pool.unplace(store, slot)
        dead = slots[last & (slots != 0)]
        if len(dead):
            if sweep.gives_back:
                self._pool.drop_lone(store, dead, now_ms=now_ms)
            else:
                self._pool.unindex(dead)  # no memory comes back: it is lost, or given anew
            self.swept_total += len(dead)
        sweep.swept += int(np.count_nonzero(slots))
        sweep.at = stop
        if stop < self._objects.index.slots_used:
            return False
        if sweep.cause is Cause.UNANNOUNCED:
            return True
        sweep.stage, sweep.at, sweep.found = Stage.COUNT, 1, 0
        return False

    def _count_some(self, sweep: Sweep) -> bool:
        """Count what still lies on the store; whether it was counted to the end and nothing does."""
        slots, stop = self._objects.on_store(sweep.store.id, sweep.at, COUNT_SLOTS)
        replicated = self._objects.replicated(slots)
        sweep.found += len(slots) - int(np.count_nonzero(replicated))
        for slot in slots[replicated].tolist():
            sweep.found += any(place[0] == sweep.store.id for place in self._objects.places(slot))
        sweep.at = stop
        if stop < self._objects.index.slots_used:
            return False
        sweep.left = sweep.found
        if sweep.left:
            sweep.stage, sweep.at = Stage.SWEEP, 1
            return False
        return True
