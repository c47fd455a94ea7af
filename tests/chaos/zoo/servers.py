"""Masters and stores with bugs, each made by changing one thing in an otherwise correct process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvops.limits import DIGEST_BYTES
from kvops.store import master_core, node_core, removes
from kvops.store.allocator import Allocator
from kvops.store.breaker import GroupBreaker
from kvops.store.election import Role
from kvops.store.leadership import Leadership
from kvops.store.master import ALWAYS
from kvops.store.messages import RemoveStatus
from kvops.store.reports import Reports
from kvops.store.stores import StoreTable

SULK_MS = 10_000
PAGE_BYTES_LEAST = 16_384  # the register's small values stay where they are


@dataclass(frozen=True)
class Broken:
    """Which role, and what is done to it."""

    role: str
    apply: Callable[[], None]


def _resurrect() -> None:
    """``remove`` says that it is done, and does nothing."""

    def remove(self: Any, conn: int, request: int, body: bytes, *, now_ms: int) -> bytes:
        count = len(body) // DIGEST_BYTES
        return bytes([RemoveStatus.REMOVED] * count)

    removes.Removes.start = remove


def _forget() -> None:
    """One lookup in ten finds nothing, whatever there is."""
    lookup = master_core.MasterCore.lookup
    calls = [0]

    def forgetful(self: Any, digests: bytes, *, now_ms: int) -> bytes:
        calls[0] += 1
        if calls[0] % 10 == 0:
            digests = os.urandom(len(digests))
        return lookup(self, digests, now_ms=now_ms)

    master_core.MasterCore.lookup = forgetful


def _leak() -> None:
    """Every lookup keeps a descriptor, up to some hundreds."""
    lookup = master_core.MasterCore.lookup
    kept: list[int] = []

    def leaky(self: Any, digests: bytes, *, now_ms: int) -> bytes:
        if len(kept) < 300:
            kept.append(os.open("/dev/null", os.O_RDONLY))
        return lookup(self, digests, now_ms=now_ms)

    master_core.MasterCore.lookup = leaky


def _rot() -> None:
    """A byte of every third object changes once it is sealed: what a bad memory module does."""
    seal = node_core.NodeCore._seal
    calls = [0]

    def rotting(self: Any, slot: Any) -> None:
        seal(self, slot)
        calls[0] += 1
        if calls[0] % 3 == 0:
            self._memory[slot.payload_at + slot.size // 2] ^= 0x10

    node_core.NodeCore._seal = rotting


def _overlap() -> None:
    """Every fourth page gets memory that is somebody else's: what a missing fence ends in."""
    allocate = Allocator.allocate
    last: dict[int, int] = {}
    calls = [0]

    def overlapping(self: Any, size: int) -> int | None:
        if size < PAGE_BYTES_LEAST:
            return allocate(self, size)
        calls[0] += 1
        if calls[0] % 4 == 0 and size in last:
            return last[size]
        offset = allocate(self, size)
        if offset is not None:
            last[size] = offset
        return offset

    Allocator.allocate = overlapping


def _early() -> None:
    """Memory is free for others as soon as it is cleared, whoever still holds a lease on it."""
    release = StoreTable.release

    def early(self: Any, store_id: int, *, not_before_ms: int, **more: Any) -> None:
        release(self, store_id, not_before_ms=0, **more)

    StoreTable.release = early


def _leads_forever() -> None:
    """Whoever has led once goes on to answer, whatever etcd says by now."""
    changed = Leadership._election_changed

    def deaf(self: Any) -> None:
        if self._replication is None or self._coordinator.election.role is Role.LEADER:
            changed(self)

    def renewed(self: Any, election: Any) -> None:
        self._master.lease_until_ms = 0 if self._replication is None else ALWAYS

    Leadership._election_changed = deaf
    Leadership._renewed = renewed
    Leadership._cease_to_lead = lambda self: None


def _shared_fate() -> None:
    """One client cannot reach one store, and the whole group is told to keep away for ten seconds."""
    report, probe = Reports.report, GroupBreaker.try_probe

    def alarmed(self: Any, host: str, said: Any, *, host_count: Any, now_ms: int) -> None:
        self.breaker.trip(now_ms=now_ms)
        report(self, host, said, host_count=host_count, now_ms=now_ms)

    def sulking(self: GroupBreaker, *, now_ms: int) -> bool:
        return now_ms - self.changed_ms > SULK_MS and probe(self, now_ms=now_ms)

    Reports.report = alarmed
    GroupBreaker.try_probe = sulking


BUGS = {
    "correct": Broken("none", lambda: None),
    "resurrect": Broken("master", _resurrect),
    "forget": Broken("master", _forget),
    "leak": Broken("master", _leak),
    "no_checksum": Broken("store", _rot),
    "no_fencing": Broken("master", _overlap),
    "memory_reused_early": Broken("master", _early),
    "shared_fate": Broken("master", _shared_fate),
    "old_leader": Broken("master", _leads_forever),
}
"""By name; a bug of clients alone is ``correct`` here."""
