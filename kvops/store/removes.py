"""
Removes: keys are hidden at once, and the caller is answered when their nodes have cleared the memory.

What was removed is remembered for a while, so that a store that was away does not bring it back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvops.limits import DIGEST_BYTES
from kvops.net import wire
from kvops.net.wire import Kind
from kvops.store.bodies import check_digests
from kvops.store.generations import Generations
from kvops.store.messages import RemoveStatus
from kvops.store.model import Generation, StoreId, StoreState
from kvops.store.outbox import Outbox
from kvops.store.pool import Pool
from kvops.store.puts import PutTable

REMOVED_MAX: Final = 65_536  # removed keys remembered, so that a store that was lost does not bring them back
REMOVE_WAIT_MS: Final = 200  # a remove replies HIDDEN when a node has not cleared its slot by then


@dataclass(slots=True)
class _Remove:
    """A remove that waits for nodes to clear slots."""

    conn: int
    request: int
    status: bytearray
    waiting: int
    deadline_ms: int


class Removes:
    """Removes that wait for nodes, and the keys that were removed lately."""

    def __init__(self, pool: Pool, puts: PutTable, generations: Generations, outbox: Outbox) -> None:
        self._pool, self._puts = pool, puts
        self._generations, self._outbox = generations, outbox
        self._waiting: dict[tuple[StoreId, Generation], tuple[_Remove, int]] = {}
        self._open: deque[_Remove] = deque()
        self._removed: dict[bytes, Generation] = {}  # key digest → the newest generation that a remove meant

    def start(self, conn: int, request: int, body: bytes, *, now_ms: int) -> bytes | None:
        """Hide keys at once; the answer follows when their nodes have cleared the slots."""
        check_digests(body)
        pool = self._pool
        slots = pool.objects.find(body).tolist()
        remove = _Remove(conn, request, bytearray(len(slots)), 0, now_ms + REMOVE_WAIT_MS)
        rows: dict[int, int] = {}  # slot → row; a key named twice is removed once
        waits: list[tuple[tuple[StoreId, Generation], int]] = []
        for row, slot in enumerate(slots):
            self._remember(body[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES])
            if slot == 0 or slot in rows:
                continue
            rows[slot] = row
            generation = Generation(int(pool.index.location["generation"][slot]))
            for store_id, _ in pool.objects.places(slot):
                store = pool.stores.get(store_id)
                if store is not None and store.state is not StoreState.GONE:
                    waits.append(((store_id, generation), row))
            remove.status[row] = RemoveStatus.REMOVED
        if rows:
            pool.drop(np.array(list(rows), np.int64), now_ms=now_ms)
            self._outbox.counters.removed += len(rows)
        if not waits:
            return bytes(remove.status)
        for key, row in waits:
            self._waiting[key] = (remove, row)
            remove.status[row] = RemoveStatus.HIDDEN
            remove.waiting += 1
        self._open.append(remove)
        return None

    def _remember(self, digest: bytes) -> None:
        """A store that is away, or counts as lost, may still hold this key: it shall not bring it back."""
        put = self._puts.get(digest)  # under way, it is not what was removed
        newest = self._generations.ceiling() if put is None else put.generation
        self._removed.pop(digest, None)
        self._removed[digest] = Generation(newest - 1)
        if len(self._removed) > REMOVED_MAX:
            del self._removed[next(iter(self._removed))]

    @property
    def any_remembered(self) -> bool:
        """Whether ``meant`` can be true of anything."""
        return bool(self._removed)

    def meant(self, digest: bytes, generation: int) -> bool:
        """Whether a remove was lately asked for that meant this object."""
        return generation <= self._removed.get(digest, 0)

    def cleared(self, store_id: StoreId, generation: Generation) -> None:
        """A node has cleared a slot, or never will: nothing can be read there any more."""
        waiting = self._waiting.pop((store_id, generation), None)
        if waiting is None:
            return
        remove, row = waiting
        remove.status[row] = RemoveStatus.REMOVED
        remove.waiting -= 1
        if remove.waiting == 0:
            self._reply(remove)

    def tick(self, *, now_ms: int) -> None:
        """Answer those that have waited long enough."""
        while self._open and (not self._open[0].waiting or self._open[0].deadline_ms <= now_ms):
            remove = self._open.popleft()
            if remove.waiting:
                self._waiting = {key: value for key, value in self._waiting.items() if value[0] is not remove}
                self._reply(remove)

    def _reply(self, remove: _Remove) -> None:
        frame = wire.pack(wire.reply(Kind.REMOVE), bytes(remove.status), remove.request)
        self._outbox.send(remove.conn, frame)
        remove.waiting = 0
