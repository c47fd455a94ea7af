"""What the master's logic leaves for the process around it: frames, entries of the journal, events, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvops.store.journal import Kind
from kvops.store.model import Generation, Hold, StoreInfo


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """What must be remembered: rows of COMPLETE_ROW, GONE_ROW or EXPIRES_ROW, a store, or holds."""

    kind: Kind
    rows: NDArray[np.void] | None = None
    store: StoreInfo | None = None
    holds: tuple[Hold, ...] = ()

    @property
    def readable_from(self) -> Generation | None:
        """The lowest generation that this makes readable; None when it makes none."""
        if self.kind is not Kind.COMPLETE or self.rows is None or not len(self.rows):
            return None
        return Generation(int(self.rows["location"]["generation"].min()))

    def encode(self) -> tuple[Kind, int, bytes]:
        """Kind, count of rows and body, as the journal and the standbys get it."""
        if self.rows is not None:
            return self.kind, len(self.rows), self.rows.tobytes()
        if self.holds:
            return self.kind, len(self.holds), msgspec.msgpack.encode(self.holds)
        return self.kind, 1, msgspec.msgpack.encode(self.store)


@dataclass(frozen=True, slots=True)
class CoreEvent:
    """A change worth a line in ``kvops events``."""

    time_ms: int  # on the core's clock
    event: str
    subject: str
    detail: dict[str, str | int | float | bool]


@dataclass(slots=True, kw_only=True)
class Counters:
    """What happened since the master started."""

    puts: int = 0
    evicted: int = 0
    removed: int = 0
    preempted: int = 0
    no_space: int = 0


class Outbox:
    """Everything that the parts of the master's logic have to say to the outside, in order."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.journal: list[JournalEntry] = []
        self.events: list[CoreEvent] = []
        self.counters = Counters()

    def send(self, conn: int, frame: bytes) -> None:
        """Leave a frame for a connection."""
        self.frames.append((conn, frame))

    def take_frames(self) -> list[tuple[int, bytes]]:
        """The frames since the last call."""
        frames, self.frames = self.frames, []
        return frames

    def remember(self, kind: Kind, rows: NDArray[np.void]) -> None:
        """Leave rows for the journal."""
        self.journal.append(JournalEntry(kind, rows))

    def remember_store(self, store: StoreInfo) -> None:
        """Leave a store's mount, or its loss, for the journal."""
        self.journal.append(JournalEntry(Kind.STORE, store=store))

    def remember_holds(self, holds: Sequence[Hold]) -> None:
        """Leave holds for the journal, as one entry."""
        self.journal.append(JournalEntry(Kind.HOLDS, holds=tuple(holds)))

    def take_journal(self) -> list[JournalEntry]:
        """What must be remembered of all that was done since the last call."""
        entries, self.journal = self.journal, []
        return entries

    def event(self, now_ms: int, event: str, subject: str, **detail: str | int | float | bool) -> None:
        """Note a change."""
        self.events.append(CoreEvent(now_ms, event, subject, detail))

    def take_events(self) -> list[CoreEvent]:
        """The changes since the last call."""
        events, self.events = self.events, []
        return events
