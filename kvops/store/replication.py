"""
The leader's half of replication, without I/O: who has which operation, and which answers may leave.

Every operation has a sequence. It is *committed* when every standby that may be in the in-sync set has it; answers
that promise something wait for that. A standby joins the set when it has caught up: its acknowledgements
are waited for from then on, before etcd knows of it. It leaves the set first in etcd: only then is nobody left
who could campaign without what is acknowledged after it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvops.errors import WireError
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.messages import PutStatus
from kvops.store.model import Generation

LAG_MS_MAX: Final = 500  # a standby that acknowledges nothing of what it was sent for so long is taken out

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
    """One standby's connection."""

    name: str
    conn: int
    since_ms: int  # when its acknowledgement last moved, or there was nothing to acknowledge
    acked: int = 0
    caught_up: bool = False


class Replication:
    """
    What standbys have acknowledged. One for a leadership.

    Args:
        sequence: Of the last operation before this leadership; nothing up to it waits for anybody.
        awake: The time less our own pauses: a standby that stood still with us, or whose acknowledgement we have not
            read meanwhile, does not lag.
    """

    def __init__(self, *, sequence: int = 0, awake: Callable[[int], int] = lambda now_ms: now_ms) -> None:
        self.sequence = sequence
        self._awake = awake
        self._committed = sequence
        self._standbys: dict[str, Standby] = {}
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
        """Who should be in the set."""
        return frozenset(name for name, standby in self._standbys.items() if standby.caught_up)

    def standbys(self) -> list[Standby]:
        """Those that are connected."""
        return list(self._standbys.values())

    def joined(self, conn: int, name: str, *, now_ms: int) -> int | None:
        """A standby begins to follow; the connection that it had before, if any, which is of no use any more."""
        before = self._standbys.get(name)
        self._standbys[name] = Standby(name, conn, self._awake(now_ms))
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
        if not self.pending:
            since_ms = self._awake(now_ms)
            for standby in self._standbys.values():
                standby.since_ms = since_ms
        self.sequence += 1
        if readable_from is not None:
            while self._readable and self._readable[-1][1] >= readable_from:
                self._readable.pop()  # committed before this one, and no lower: it never decides
            self._readable.append((self.sequence, readable_from))
        self._commit()
        return self.sequence

    def acked(self, conn: int, sequence: int, *, caught_up: bool, now_ms: int) -> None:
        """A standby has everything up to there."""
        for standby in self._standbys.values():
            if standby.conn == conn:
                if sequence > standby.acked or caught_up > standby.caught_up:
                    standby.since_ms = self._awake(now_ms)
                standby.acked = max(standby.acked, min(sequence, self.sequence))
                standby.caught_up |= caught_up
        self._commit()

    def laggards(self, *, now_ms: int) -> list[int]:
        """Connections of members that owe an acknowledgement for too long: to be closed."""
        since_ms = self._awake(now_ms) - LAG_MS_MAX
        return [
            standby.conn
            for standby in self._standbys.values()
            if standby.caught_up and standby.acked < self.sequence and standby.since_ms <= since_ms
        ]

    def _commit(self) -> None:
        lowest = self.sequence
        # Waited for from the moment it has caught up: etcd may list it before we hear so.
        for standby in self._standbys.values():
            if standby.caught_up or standby.name in self._waited:
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
