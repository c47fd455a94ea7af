"""
The leader's half of replication, without I/O: who has which operation, and which answers may leave.

Every operation has a sequence. It is *committed* when every standby that may be in the in-sync set has it; answers
that promise something wait for that. A standby that keeps up is waited for; once it has everything that is
committed it belongs into the set, and is still waited for while etcd hears of it. One that lags leaves the set first
in etcd: only then is nobody left who could campaign without what is acknowledged after it. Its connection stays, so
that it need not take over the whole state again for having been late.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvops.errors import WireError
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.messages import PutStatus
from kvops.store.model import Generation

LAG_MS_MAX: Final = (
    100  # a standby that lacks an operation for so long is out: half of a client's usual deadline
)
LAST_LAG_MS_MAX: Final = 300  # … the last one: without it nobody could lead next, so it is given more time
SILENT_MS_MAX: Final = 3_000  # one that owes an acknowledgement and sends none for so long is hung up on
LOOK_MS_MAX: Final = 50  # between two looks at the clock: if it was longer, it was we who stood still
OUT_MS_FIRST: Final = 500  # a standby that lagged is not waited for again before; doubles when it lags again
OUT_MS_MAX: Final = 8_000
STEADY_MS: Final = 30_000  # after so long without lagging it begins anew

ENTRY: Final = struct.Struct("<QHHII")
"""Sequence, journal kind, reserved, count of rows, bytes of the body, which follows as the journal has it."""

ACK: Final = struct.Struct("<QI")
"""Sequence up to which all is applied, 1 once the whole state has been taken over."""

PROMISES: Final = frozenset({Kind.LOOKUP, Kind.PUT_START, Kind.PUT_END})
"""Answers that a new leader may have to keep; that of a REMOVE comes through the core's outbox."""

VERSIONS: Final = "upgrade the older one: neighbouring versions work together"

STATE_END: Final = 0xFFFF
"""In place of a journal kind: the state that a standby takes over at first is whole."""


def unpack_ack(body: bytes) -> tuple[int, bool]:
    """
    Sequence, and whether the whole state has been taken over.

    Raises:
        WireError: It is no acknowledgement.
    """
    if len(body) != ACK.size:
        raise WireError(f"an acknowledgement of {len(body)} B, not {ACK.size}", fix=VERSIONS)
    sequence, caught_up = ACK.unpack(body)
    return sequence, bool(caught_up)


def unpack_entries(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """
    Sequence, kind and body of each operation.

    Raises:
        WireError: One is cut short.
    """
    at = 0
    while at < len(body):
        if len(body) - at < ENTRY.size:
            raise WireError(f"an operation is cut short: {len(body) - at} B are left", fix=VERSIONS)
        sequence, kind, _, _, size = ENTRY.unpack_from(body, at)
        at += ENTRY.size
        if len(body) - at < size:
            raise WireError(f"operation {sequence} is cut short: {len(body) - at} of {size} B", fix=VERSIONS)
        yield sequence, kind, body[at : at + size]
        at += size


@dataclass(slots=True)
class Standby:
    """One standby's connection. Times are on the leader's clock of its own looks."""

    name: str
    conn: int
    moved_ms: int  # when its acknowledgement last moved, or it owed none
    acked: int = 0
    caught_up: bool = False
    in_sync: bool = False
    """It is waited for."""
    mark: int = 0  # the operation by which it is judged …
    marked_ms: int = 0  # … and since when that one is under way

    def owes(self, sequence: int, *, ms: int) -> None:
        """There is one more operation."""
        if self.acked >= self.mark:
            self.mark, self.marked_ms = sequence, ms
            self.moved_ms = ms

    def lag_ms(self, ms: int) -> int:
        """How long it has lacked something; as long as an operation takes while it keeps up."""
        return ms - self.marked_ms if self.acked < self.mark else 0


@dataclass(slots=True)
class _Out:
    """That a standby was taken out for lagging."""

    until_ms: int
    for_ms: int


class Replication:
    """
    What standbys have acknowledged. One for a leadership.

    Lag is measured in the leader's own time between looks: a standby that stood still with us, or whose
    acknowledgement we have not read meanwhile, does not lag.

    Args:
        sequence: Of the last operation before this leadership; nothing up to it waits for anybody.
    """

    def __init__(self, *, sequence: int = 0) -> None:
        self.sequence = sequence
        self._committed = sequence
        self._standbys: dict[str, Standby] = {}
        self._out: dict[str, _Out] = {}  # by name: a new connection is no excuse
        self._looked_ms: int | None = None
        self._ms = 0  # our own time
        self._waited: frozenset[str] = frozenset()  # may be in the set, as etcd has it
        self._held: deque[tuple[int, int, bytes]] = deque()
        self._readable: deque[tuple[int, Generation]] = deque()  # uncommitted; generations ascend

    @property
    def committed(self) -> int:
        """Up to which sequence every member has everything."""
        return self._committed

    @property
    def pending(self) -> bool:
        """Whether some operation is not committed."""
        return self._committed < self.sequence

    @property
    def wanted(self) -> frozenset[str]:
        """Who should be in the set: is waited for, and lacks nothing of what others were told is safe."""
        return frozenset(
            name
            for name, standby in self._standbys.items()
            if standby.in_sync and standby.acked >= self._committed
        )

    def standbys(self) -> list[Standby]:
        """Those that are connected."""
        return list(self._standbys.values())

    def joined(self, conn: int, name: str, *, now_ms: int) -> int | None:
        """A standby begins to follow; the connection that it had before, if any, which is of no use any more."""
        before = self._standbys.get(name)
        self._standbys[name] = Standby(name, conn, self._look(now_ms))
        return before.conn if before is not None else None

    def left(self, conn: int) -> None:
        """A connection ended; if a standby's, it stays waited for until etcd has it out of the set."""
        for name, standby in list(self._standbys.items()):
            if standby.conn == conn:
                del self._standbys[name]
        self._commit()

    def members(self, names: frozenset[str]) -> None:
        """Who may be in the set, as far as etcd's answers tell."""
        self._waited = names
        self._commit()

    def append(self, *, now_ms: int, readable_from: Generation | None = None) -> int:
        """One more operation; its sequence. ``readable_from``: the lowest generation that it makes readable."""
        ms = self._look(now_ms)
        self.sequence += 1
        for standby in self._standbys.values():
            standby.owes(self.sequence, ms=ms)
        if readable_from is not None:
            while self._readable and self._readable[-1][1] >= readable_from:
                self._readable.pop()  # committed before this one, and no lower: it never decides
            self._readable.append((self.sequence, readable_from))
        self._commit()
        return self.sequence

    def acked(self, conn: int, sequence: int, *, caught_up: bool, now_ms: int) -> None:
        """A standby has everything up to there."""
        ms = self._look(now_ms)
        for standby in self._standbys.values():
            if standby.conn == conn:
                self._acked(standby, min(sequence, self.sequence), caught_up=caught_up, ms=ms)
        self._commit()

    def _acked(self, standby: Standby, sequence: int, *, caught_up: bool, ms: int) -> None:
        took_ms = ms - standby.marked_ms
        if sequence > standby.acked or caught_up > standby.caught_up:
            standby.moved_ms = ms
        before, standby.acked = standby.acked, max(standby.acked, sequence)
        if caught_up and not standby.caught_up:
            # What came while it took over the state says nothing about how it follows.
            standby.caught_up, took_ms = True, 0
            standby.mark = standby.acked
        elif standby.acked < standby.mark:
            return
        elif before >= standby.mark:
            took_ms = 0
        if standby.acked < self.sequence:
            standby.mark, standby.marked_ms = self.sequence, ms
        if took_ms <= self._limit_ms(standby) // 2:
            self._let_in(standby, ms)

    def _let_in(self, standby: Standby, ms: int) -> None:
        out = self._out.get(standby.name)
        if standby.caught_up and (out is None or ms >= out.until_ms):
            standby.in_sync = True

    def _limit_ms(self, standby: Standby) -> int:
        """How far this one may lag: further where no other would be left."""
        others = any(one.in_sync and one is not standby for one in self._standbys.values())
        return LAG_MS_MAX if others else LAST_LAG_MS_MAX

    def review(self, *, now_ms: int) -> list[int]:
        """
        Now and then: take out who lags, let in again who does not; what ``wanted`` and ``committed`` say may change.

        Returns:
            Connections to be hung up: nobody may be at their other end.
        """
        ms = self._look(now_ms)
        for standby in sorted(self._standbys.values(), key=lambda one: -one.lag_ms(ms)):
            if standby.in_sync and standby.lag_ms(ms) >= self._limit_ms(standby):
                standby.in_sync = False
                out = self._out.get(standby.name)
                fresh = out is None or ms >= out.until_ms + STEADY_MS
                for_ms = OUT_MS_FIRST if out is None or fresh else min(2 * out.for_ms, OUT_MS_MAX)
                self._out[standby.name] = _Out(ms + for_ms, for_ms)
            elif standby.acked >= standby.mark and not standby.in_sync:
                self._let_in(standby, ms)
        self._commit()
        return [
            one.conn
            for one in self._standbys.values()
            if one.caught_up and one.acked < one.mark and ms - one.moved_ms >= SILENT_MS_MAX
        ]

    def _look(self, now_ms: int) -> int:
        """Our own time: what passed since the last look, less what we cannot have been awake for."""
        if self._looked_ms is not None:
            self._ms += min(max(0, now_ms - self._looked_ms), LOOK_MS_MAX)
        self._looked_ms = now_ms
        return self._ms

    def _commit(self) -> None:
        lowest = self.sequence
        # Waited for before it is wanted: etcd may list it before we hear so.
        for standby in self._standbys.values():
            if standby.in_sync or standby.name in self._waited:
                lowest = min(lowest, standby.acked)
        if not self._waited <= self._standbys.keys():
            lowest = 0
        self._committed = max(self._committed, lowest)

    # Answers that wait.

    def must_wait(self, kind: int, answer: bytes) -> bool:
        """
        Whether an answer of a kind in ``PROMISES`` promises what some member may lack.

        A lookup promises that the memory it names is nobody else's while its lease runs: the next leader has to
        know the object.
        """
        if not self.pending:
            return False
        if kind == Kind.PUT_START:
            return PutStatus.EXISTS in answer[m.PUT_REPLY_HEAD.size :]
        if kind != Kind.LOOKUP:
            return True
        while self._readable and self._readable[0][0] <= self._committed:
            self._readable.popleft()
        return bool(self._readable) and m.newest_named(answer) >= self._readable[0][1]

    def hold(self, conn: int, data: bytes) -> None:
        """Keep an answer until what came before it is committed."""
        self._held.append((self.sequence, conn, data))

    @property
    def held(self) -> int:
        """How many answers wait."""
        return len(self._held)

    def release(self) -> list[tuple[int, bytes]]:
        """Answers that may leave now."""
        free: list[tuple[int, bytes]] = []
        while self._held and self._held[0][0] <= self._committed:
            _, conn, data = self._held.popleft()
            free.append((conn, data))
        return free
