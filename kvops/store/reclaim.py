"""
Memory that objects give up: those whose time is over, and the least recently used once the pool is nearly full.

Eviction starts above the high watermark and stops below the low one. A put that found no room has it evict for
its own size, whatever the watermarks say: they are of the whole pool, and a store may be full before it is.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvops.store.eviction import Evictor
from kvops.store.horizon import LeaseHorizon
from kvops.store.lease import MS32_MASK
from kvops.store.model import StoreState
from kvops.store.outbox import Outbox
from kvops.store.pool import Pool

EVICT_INTERVAL_MS: Final = 10
EVICT_SLICE: Final = 64  # objects; about 0.1 ms, and at most some 100 slices a second (field measurements)


class Reclaim:
    """
    Expiry and eviction, a slice at a time.

    Args:
        pool: Objects and stores.
        horizon: Nothing is evicted while a former leader's leases may be open.
        outbox: Counts what is evicted.
        high_watermark: Ratio of the pool in use above which eviction starts.
        low_watermark: Ratio below which it stops.
        seed: Of the samples that eviction takes.
        now_ms: The time.
    """

    def __init__(
        self,
        pool: Pool,
        horizon: LeaseHorizon,
        outbox: Outbox,
        *,
        high_watermark: float,
        low_watermark: float,
        seed: int,
        now_ms: int,
    ) -> None:
        self._pool, self._horizon, self._outbox = pool, horizon, outbox
        self._high, self._low = high_watermark, low_watermark
        self._evictor = Evictor(pool.index, seed=seed)
        self._pressure_bytes = 0  # a put found no room for this much: evict, whatever the watermark says
        self._evicting = False
        self._last_ms = now_ms

    @property
    def busy(self) -> bool:
        """Whether there is something to evict, soon or at once."""
        return self._evicting or self._pressure_bytes > 0

    def due(self, now_ms: int) -> bool:
        """Whether a slice should be evicted now, rather than at the next tick."""
        if self._pressure_bytes:
            return now_ms > self._last_ms
        return self._evicting and now_ms - self._last_ms >= EVICT_INTERVAL_MS

    def restart(self, now_ms: int) -> None:
        """We begin to lead now."""
        self._last_ms = now_ms

    def press(self, footprint: int, replicas: int) -> None:
        """Evict for a put that found no room, if that can help it."""
        stores = self._pool.stores
        hosts: set[str] = set()
        for store in stores:
            if store.state is StoreState.ANNOUNCING:
                return  # its memory is about to be ours to give
            if store.takes_objects and store.populated_bytes >= footprint:
                hosts.add(store.mount.host)
        if len(hosts) < replicas:
            return
        need = footprint * replicas
        most = max(need, int(stores.capacity_bytes() * (1 - self._low)))
        self._pressure_bytes = min(self._pressure_bytes + need, most)

    def step(self, *, now_ms: int) -> None:
        """One slice of what has expired, and one of what is evicted."""
        due = self._pool.objects.expired(now_ms=now_ms, count_max=EVICT_SLICE)
        if due:
            self._pool.drop(np.array(due, np.int64), now_ms=now_ms)
        self._evict(now_ms=now_ms)

    def _evict(self, *, now_ms: int) -> None:
        pool = self._pool
        capacity = pool.stores.capacity_bytes()
        used = pool.used_bytes()
        high = used > capacity * self._high
        if not (high or self._pressure_bytes or self._evicting):
            return
        self._evicting = used > capacity * self._low
        if not (self._evicting or self._pressure_bytes):
            return
        interval = 1 if high or self._pressure_bytes else EVICT_INTERVAL_MS
        if now_ms - self._last_ms < interval or now_ms < self._horizon.earlier_end_ms:
            return
        self._last_ms = now_ms
        excess = used - int(capacity * self._low)
        mean = max(1, used // max(1, len(pool.index)))
        count = -(-max(excess, self._pressure_bytes) // mean)  # no more than it takes: objects may be large
        victims = self._evictor.step(now_ms32=now_ms & MS32_MASK, count_max=min(count, EVICT_SLICE))
        if self._evictor.exhausted:
            self._pressure_bytes = 0
        if not len(victims):
            return
        sizes = int(pool.index.location["size"][victims].astype(np.int64).sum())
        self._pressure_bytes = max(0, self._pressure_bytes - sizes)
        pool.drop(victims, now_ms=now_ms)
        self._outbox.counters.evicted += len(victims)
