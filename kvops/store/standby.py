"""
The standby's half of replication, without I/O: the leader's operations applied to a directory of its own.

A standby holds every object, store and hold that the leader has acknowledged, but hands out nothing. What it cannot
know is what was granted and not completed: that memory counts as free, and a node takes it from the older writer
when a newer one comes. What it must remember beside the directory is memory that objects have left a moment
ago: the leader may have granted leases on them that have not ended.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvops.errors import WireError
from kvops.limits import LEASE_MARGIN_MS, LEASE_TTL_MS
from kvops.store.journal import ROWS, Kind
from kvops.store.master_core import MasterCore
from kvops.store.model import Hold, StoreId, StoreInfo, StoreState, chunk_of, chunks_of
from kvops.store.objects import with_ttl
from kvops.store.outbox import JournalEntry
from kvops.store.replication import STATE_END
from kvops.transfer.layout import footprint_bytes

RECENT_MS: Final = LEASE_TTL_MS + LEASE_MARGIN_MS


class Standby:
    """
    Applies a leader's operations to ``core``, which nobody else uses meanwhile.

    Args:
        core: A fresh one.
        clock_offset_ms: Our clock less the leader's: times that objects expire at are on its clock.
    """

    def __init__(self, core: MasterCore, *, clock_offset_ms: int = 0) -> None:
        self.core = core
        self.sequence = 0  # up to which everything is applied
        self.caught_up = False
        """The whole state has been taken over: from now on this standby can lead."""
        self._clock_offset_ms = clock_offset_ms
        self._left: deque[tuple[int, StoreId, int, int]] = deque()  # when, store, offset, footprint
        self._expiring: dict[int, int] = {}  # generation → slot, of objects whose EXPIRES row is to come
        self._expires: dict[int, int] = {}  # generation → when, of objects that are to come

    def apply(self, sequence: int, kind: int, body: bytes, *, now_ms: int) -> JournalEntry | None:
        """
        One operation.

        Returns:
            What to write into this master's own journal, if anything.

        Raises:
            WireError: It cannot be read: whoever sent it is of another version, or not well.
        """
        self.sequence = max(self.sequence, sequence)
        if kind == STATE_END:
            self.caught_up = True
            return None
        try:
            entry = _decode(kind, body)
        except (ValueError, msgspec.MsgspecError) as error:
            raise WireError(
                f"operation {sequence} of the leader (kind {kind}) cannot be read: {error}",
                fix="upgrade the older one: neighbouring versions work together",
            ) from None
        if entry.rows is None:
            if entry.store is not None:
                self._store(entry.store, now_ms=now_ms)
            self.core.holds.restore(entry.holds)
        elif kind == Kind.COMPLETE:
            self._complete(entry.rows, now_ms=now_ms)
        elif kind == Kind.GONE:
            self._gone(entry.rows, now_ms=now_ms)
        elif kind == Kind.LESS:
            self._less(entry.rows, now_ms=now_ms)
        else:
            self._expire(entry.rows)
        return entry

    def promote(self, *, term: int, now_ms: int) -> None:
        """Let the directory lead: memory that was left a moment ago is not handed out before its leases end."""
        assert self.caught_up
        self._forget_left(now_ms)
        self.core.promote(
            term=term,
            left=[(store, offset, footprint) for _, store, offset, footprint in self._left],
            now_ms=now_ms,
        )

    def _store(self, info: StoreInfo, *, now_ms: int) -> None:
        stores = self.core.stores
        known = stores.get(info.id)
        if known is not None and known.mount.incarnation != info.incarnation:
            # The id was given again: the sweep of the mount before is over, as the leader saw it.
            stores.forget(known)
            known = None
        if known is None:
            known = self.core.restore_store(info, now_ms=now_ms)
        if info.state is StoreState.GONE:
            stores.set_state(known, StoreState.GONE)

    def _complete(self, rows: NDArray[np.void], *, now_ms: int) -> None:
        objects = self.core.objects
        slots = objects.find(np.ascontiguousarray(rows["digest"]).tobytes())
        older = (slots != 0) & (objects.index.location["generation"][slots] < rows["location"]["generation"])
        if older.any():
            self._forget(np.unique(slots[older]), now_ms=now_ms)
        part, taken = objects.enter(rows, now_ms=now_ms)
        for slot, generation in with_ttl(part, taken):
            when_ms = self._expires.pop(generation, None)
            if when_ms is None:
                self._expiring[generation] = slot
            else:
                objects.expire_at(slot, when_ms)

    def _expire(self, rows: NDArray[np.void]) -> None:
        for generation, when in rows.tolist():
            when_ms = when + self._clock_offset_ms
            slot = self._expiring.pop(generation, None)
            if slot is None:
                self._expires[generation] = when_ms
            else:
                self.core.objects.expire_at(slot, when_ms)

    def _gone(self, rows: NDArray[np.void], *, now_ms: int) -> None:
        index = self.core.index
        slots = index.find(np.ascontiguousarray(rows["digest"]))
        same = (slots != 0) & (index.location["generation"][slots] == rows["generation"])
        for generation in rows["generation"].tolist():
            self._expiring.pop(generation, None)
            self._expires.pop(generation, None)
        if same.any():
            self._forget(np.unique(slots[same]), now_ms=now_ms)

    def _less(self, rows: NDArray[np.void], *, now_ms: int) -> None:
        objects = self.core.objects
        slots = objects.index.find(np.ascontiguousarray(rows["digest"]))
        for slot, generation, store in zip(
            slots.tolist(), rows["generation"].tolist(), rows["store"].tolist(), strict=True
        ):
            if not slot or int(objects.index.location["generation"][slot]) != generation:
                continue
            size, flags = objects.index.location[["size", "flags"]][slot].tolist()
            footprint = footprint_bytes(size, chunk_of(flags))
            self._left += [
                (now_ms, on, offset, footprint) for on, offset in objects.places(slot) if on == store
            ]
            objects.drop_places(slot, StoreId(store))

    def _forget(self, slots: NDArray[np.int64], *, now_ms: int) -> None:
        locations = self.core.index.location[slots]
        footprints = footprint_bytes(
            locations["size"].astype(np.int64), chunks_of(locations["flags"])
        ).tolist()
        for places, footprint in zip(self.core.objects.forget(slots), footprints, strict=True):
            self._left += [(now_ms, store, offset, footprint) for store, offset in places]
        self._forget_left(now_ms)

    def _forget_left(self, now_ms: int) -> None:
        while self._left and now_ms - self._left[0][0] > RECENT_MS:
            self._left.popleft()


def _decode(kind: int, body: bytes) -> JournalEntry:
    if kind in ROWS:
        return JournalEntry(Kind(kind), rows=np.frombuffer(body, ROWS[kind]))
    if kind == Kind.STORE:
        return JournalEntry(Kind.STORE, store=msgspec.msgpack.decode(body, type=StoreInfo))
    if kind == Kind.HOLDS:
        return JournalEntry(Kind.HOLDS, holds=msgspec.msgpack.decode(body, type=tuple[Hold, ...]))
    raise ValueError("its kind is unknown")
