"""
Copies what a store holds to other stores while it goes on serving: the store's own side of ``drain --migrate``.

Why the store itself: the bytes are in its memory already, and so are key texts and digests, which no client knows
of other namespaces. It is a client like any other: it asks the master for a new place for each object
(``MOVE_START``), writes there by the data protocol, and tells the master (``PUT_END``), which from that moment on
names the new place instead of the old one. The old copy stays until the leases on it have ended. So at every
moment one of the two is readable, and whoever dies in the middle leaves the old one; a repeat copies what is left.

The hottest objects go first; the pages of a prefix, which are touched together, follow each other in their order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvops.errors import KvopsError
from kvops.limits import MIB, PUTS_PER_FRAME_MAX
from kvops.log import log
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.client import Pool
from kvops.store.client_core import PutPlan
from kvops.store.connect import connect
from kvops.store.model import Outcome, PutOptions, Reason
from kvops.store.node_core import Source
from kvops.transfer.layout import verify_chunks
from kvops.transfer.model import SliceState, WriteSlice

BATCH_BYTES: Final = 32 * MIB  # written between two words with the master
BATCH_S: Final = 0.1  # … and no more than this long at the limit
DEADLINE_MS: Final = 10_000  # of a batch
TOLD_S: Final = 3.0  # the master repeats its order four times a second; without it, it no longer stands
PASSES_MAX: Final = 3  # over what failed, and over puts that ended after the cordon
FULL_BATCHES_MAX: Final = 8  # in a row without room for anything: nothing is expected of the rest


class Owner(Protocol):
    """The node, as its mover sees it; called on the mover's thread."""

    def announce(self, cursor: int) -> tuple[bytes, int]:
        """SLOT_ROW rows from a cursor on, and the next cursor; no rows at the end."""

    def sources(self, rows: NDArray[np.void]) -> list[Source | None]:
        """What lies in these slots; None where that is gone."""

    def migrated(self, number: int, unmoved: int) -> None:
        """All that could be copied for a hold has been."""


class MovePlan(PutPlan):
    """A put whose objects lie in this store's memory already; ``holds`` says whether they still do."""

    start_kind = Kind.MOVE_START

    def __init__(self, sources: Sequence[Source], holds: Callable[[Sequence[Source]], list[bool]]) -> None:
        super().__init__(
            b"",
            [""] * len(sources),
            [source.key for source in sources],
            [source.payload for source in sources],
            b"".join(source.digest for source in sources),
            PutOptions(),
            [source.depth for source in sources],
        )
        self._sources = sources
        self._holds = holds

    def _slice(self, index: int, row: tuple[int, int, int, int, int]) -> WriteSlice:
        source = self._sources[index]
        generation, offset, size, store, flags = row
        return WriteSlice(
            store=store,
            digest=source.digest,
            key_digest=source.key_digest,
            key=source.key,
            generation=generation,
            offset=offset,
            size=size,
            chunk=source.chunk,
            depth=source.depth,
            tenant=source.tenant,
            flags=flags,
            start=0,
            data=source.payload,
            digests=source.trailer,
        )

    def end_body(self) -> bytes:
        """Without objects that were freed while they were copied: their memory may have been somebody else's."""
        held = self._holds(self._sources)
        for grant in self._grants:
            if not held[grant.index]:
                for piece in grant.slices:
                    piece.state = SliceState.STALE
        return super().end_body()


class Mover:
    """Moves a store's objects while the master says so. ``told`` and ``stop`` may be called on any thread."""

    def __init__(
        self, masters: Sequence[str], *, secret_file: Path, group: str, name: str, host: str, owner: Owner
    ) -> None:
        self._masters = [str(master) for master in masters]
        self._secret_file, self._group = secret_file, group
        self._name, self._host, self._owner = name, host, owner
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._number = 0
        self._bandwidth_bps = 0
        self._told = 0.0
        self._finished: tuple[int, int] | None = None  # hold and unmoved objects
        self._stop = threading.Event()

    def told(self, number: int, bandwidth_bps: int) -> None:
        """The master wants this store emptied for a hold; said again and again."""
        with self._lock:
            self._number, self._bandwidth_bps, self._told = number, bandwidth_bps, time.monotonic()
            finished = self._finished if self._finished and self._finished[0] == number else None
            if finished is None and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, name="mover", daemon=True)
                self._thread.start()
        if finished is not None:
            self._owner.migrated(*finished)  # it has not heard that

    def stop(self) -> None:
        """End soon."""
        self._stop.set()

    @property
    def _wanted(self) -> bool:
        return not self._stop.is_set() and time.monotonic() - self._told < TOLD_S

    def _run(self) -> None:
        number = self._number
        log.info("migration.began", hold=number, bandwidth_bps=self._bandwidth_bps)
        try:
            pool = connect(
                self._masters,
                secret_file=self._secret_file,
                group=self._group,
                name=self._name,
                host=self._host,
                transports=("tcp",),
                deadline_ms=DEADLINE_MS,
            )
            with pool:
                unmoved = self._move_all(pool)
        except (KvopsError, OSError) as error:
            log.warning("migration.broken", hold=number, error=str(error))
            return  # the next order begins anew, with what is left
        if unmoved is None or number != self._number:
            log.info("migration.ended", hold=number)
            return
        log.info("migration.finished", hold=number, unmoved=unmoved)
        with self._lock:
            self._finished = (number, unmoved)
        self._owner.migrated(number, unmoved)

    def _move_all(self, pool: Pool) -> int | None:
        """Copy all that is there; how many objects were not, or None when the order was taken back."""
        pace = _Pace(lambda: self._bandwidth_bps, self._stop)
        for _ in range(PASSES_MAX):
            rows = self._hottest_first(pool)
            refused: dict[Reason, int] = {}
            full = at = 0
            while at < len(rows):
                if not self._wanted:
                    return None
                batch = self._cut(rows, at)
                at += len(batch)
                outcomes = self._move(pool, batch)
                for outcome in outcomes:
                    if not outcome.ok:
                        refused[outcome.reason] = refused.get(outcome.reason, 0) + 1
                stored = [outcome.size_bytes for outcome in outcomes if outcome.reason is Reason.STORED]
                nothing = outcomes and all(outcome.reason is Reason.NO_SPACE for outcome in outcomes)
                full = full + 1 if nothing else 0
                if full == FULL_BATCHES_MAX:
                    refused[Reason.NO_SPACE] = refused.get(Reason.NO_SPACE, 0) + len(rows) - at
                    break
                pace.note(sum(stored))
            unmoved = sum(count for reason, count in refused.items() if reason is not Reason.REFUSED)
            if not unmoved or full == FULL_BATCHES_MAX:
                break
        return unmoved

    def _hottest_first(self, pool: Pool) -> NDArray[np.void]:
        """SLOT_ROW rows of what is readable here, by time since the last touch, then by depth."""
        parts: list[bytes] = []
        cursor = 0
        while cursor >= 0 and self._wanted:
            rows, cursor = self._owner.announce(cursor)
            parts.append(rows)
        slots = np.frombuffer(b"".join(parts), m.SLOT_ROW)
        known = pool.stat_rows(np.ascontiguousarray(slots["digest"]).tobytes())
        here = known["location"]["generation"] == slots["generation"]
        order = np.lexsort((slots["depth"][here], known["age_ms"][here]))
        hottest: NDArray[np.void] = slots[here][order]
        return hottest

    def _cut(self, rows: NDArray[np.void], at: int) -> NDArray[np.void]:
        """The next batch: bounded in objects and in bytes, and at a limit in time."""
        most = BATCH_BYTES
        if self._bandwidth_bps:
            most = min(most, int(self._bandwidth_bps / 8 * BATCH_S))
        part = rows[at : at + PUTS_PER_FRAME_MAX]
        fits = int(np.searchsorted(np.cumsum(part["size"], dtype=np.int64), most, side="right"))
        return part[: max(1, fits)]

    def _move(self, pool: Pool, rows: NDArray[np.void]) -> list[Outcome]:
        found = self._owner.sources(rows)
        whole: list[Source] = []
        for source in found:
            if source is None:
                continue
            if verify_chunks(source.payload, source.trailer, chunk=source.chunk) >= 0:
                log.error("migration.corrupt", generation=source.generation, offset=source.offset)
                continue  # no reader would take it either
            whole.append(source)
        if not whole:
            return []
        return pool.carry_out(MovePlan(whole, self._still_held), deadline_ms=DEADLINE_MS)

    def _still_held(self, sources: Sequence[Source]) -> list[bool]:
        rows = np.zeros(len(sources), m.SLOT_ROW)
        rows["generation"] = [source.generation for source in sources]
        rows["offset"] = [source.offset for source in sources]
        return [source is not None for source in self._owner.sources(rows)]


class _Pace:
    """Keeps a stream of batches below a limit that may change."""

    def __init__(self, limit_bps: Callable[[], int], stop: threading.Event) -> None:
        self._limit_bps, self._stop = limit_bps, stop
        self._due = time.monotonic()

    def note(self, size_bytes: int) -> None:
        """So many bytes were moved: wait until more may be."""
        limit_bps = self._limit_bps()
        if not limit_bps:
            return
        now = time.monotonic()
        # What was slower than the limit is not made up for, but for a moment.
        self._due = max(self._due, now - BATCH_S) + size_bytes * 8 / limit_bps
        while self._due > time.monotonic() and not self._stop.is_set():
            self._stop.wait(min(0.5, self._due - time.monotonic()))
