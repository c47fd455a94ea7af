"""The whole state of a master in slices between requests: into its journal, or to a standby."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvops.store.journal import COMPLETE_ROW, EXPIRES_ROW, Kind, Rows
from kvops.store.journal_writer import JournalWriter
from kvops.store.master_core import MasterCore
from kvops.store.model import Slots, chunks_of
from kvops.store.outbox import JournalEntry

SLICE: Final = 2_048  # slots; about 0.1 ms


class StateWalk:
    """Every store, then every object, in slices; objects that come after their slot was passed are not among them."""

    def __init__(self, core: MasterCore) -> None:
        self._core = core
        self._next = 1

    def stores(self) -> list[JournalEntry]:
        """What is not an object; to be asked for first."""
        entries = [JournalEntry(Kind.STORE, store=store.info()) for store in self._core.stores]
        holds = self._core.holds.rows()
        return [*entries, JournalEntry(Kind.HOLDS, holds=tuple(holds))] if holds else entries

    def step(self) -> list[JournalEntry] | None:
        """The next slice, until None."""
        index = self._core.index
        if self._next >= index.slots_used:
            return None
        slots = np.arange(self._next, min(self._next + SLICE, index.slots_used), dtype=np.int64)
        slots = slots[index.location["store"][slots] != 0]
        self._next += SLICE
        rows = object_rows(self._core, slots)
        ends = np.array(self._core.objects.expiries(slots), EXPIRES_ROW)
        entries = []
        if len(ends):
            entries.append(JournalEntry(Kind.EXPIRES, rows=ends))
        if len(rows):
            entries.append(JournalEntry(Kind.COMPLETE, rows=rows))
        return entries


class Snapshot:
    """One walk into the journal; what changes meanwhile is in the journal's tail, and wins by its generation."""

    def __init__(self, journal: JournalWriter, core: MasterCore) -> None:
        self._journal = journal
        self._walk = StateWalk(core)
        self._waiting: deque[tuple[Kind, int, bytes]] = deque()  # of the slice that the queue had no room for
        journal.begin_snapshot()
        for entry in self._walk.stores():
            journal.append(*entry.encode())  # in the tail: a snapshot's queue may be full, the tail's is not

    def step(self) -> bool:
        """One slice; whether the snapshot is over."""
        if not self._waiting:
            entries = self._walk.step()
            if entries is None:
                self._journal.commit_snapshot()
                return True
            self._waiting += [entry.encode() for entry in entries]
        while self._waiting:
            if not self._journal.append_snapshot(*self._waiting[0]):
                return False  # the disk is behind: the rest of the slice again later
            self._waiting.popleft()
        return False


def object_rows(core: MasterCore, slots: Slots) -> Rows:
    """COMPLETE_ROW for every replica of the objects in these slots."""
    index = core.index
    places = core.objects.further_places(slots)
    rows = np.empty(len(slots) + len(places), COMPLETE_ROW)
    every = np.concatenate([slots, np.array([slot for slot, _, _ in places], np.int64)])
    rows["digest"] = index.digests(every)
    rows["location"] = index.location[every]
    rows["chunk"] = chunks_of(rows["location"]["flags"])
    rows["depth"] = index.depth[every]
    rows["tenant"] = index.tenant[every]
    for row, (_, store, offset) in zip(rows[len(slots) :], places, strict=True):
        row["location"]["store"], row["location"]["offset"] = store, offset
    return rows
