"""Writes: from registered memory, by Unix socket, by tcp, to the object being readable, beside bare sockets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from kvops.bench import raw
from kvops.bench.model import Effort, Tell
from kvops.bench.pool import BenchPool, pool_of
from kvops.bench.read import must_be_ok, tell_ratio
from kvops.limits import KIB, MIB
from kvops.store.client import Pool

DEADLINE_MS: Final = 20_000
WAYS: Final = {"registered": ["shm", "tcp"], "unix": ["shm", "tcp"], "tcp": ["tcp"]}
"""
How bytes get to a store, and what a writer is allowed for it: on its own host the store copies registered memory, and
what is not registered goes by the Unix socket.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...] = (64 * KIB, MIB, 4 * MIB)
    batches: tuple[int, ...] = (1, 16, 64)
    segment_bytes: int = 1024 * MIB
    moved_bytes: int = 256 * MIB  # in one run

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        if effort.quick:
            return cls(sizes=(MIB,), batches=(16,), segment_bytes=256 * MIB, moved_bytes=64 * MIB)
        return cls()


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    with pool_of(1, segment_size_bytes=plan.segment_bytes) as pool:
        peer = raw.RawPeer(pool, memory_bytes=plan.moved_bytes)
        for size in plan.sizes:
            _measure(plan, effort.runs, size, pool, peer, tell)
        peer.close()


def _measure(plan: Plan, runs: int, size: int, pool: BenchPool, peer: raw.RawPeer, tell: Tell) -> None:
    for way, transports in WAYS.items():
        with pool.connect(deadline_ms=DEADLINE_MS, transports=transports) as writer:
            for batch in plan.batches:
                registered = way == "registered"
                sources = (
                    raw.cut(writer.allocate(batch * size), size) if registered else raw.buffers(batch, size)
                )
                case = _Case(writer, peer, "tcp" if way == "tcp" else "unix", sources)
                calls = max(1, plan.moved_bytes // (batch * size))
                tell_ratio(
                    "write", way, size, batch, calls, runs, case.write, case.control, tell, case.forget
                )


class _Case:
    """Batches of one size, each under new keys."""

    def __init__(self, writer: Pool, peer: raw.RawPeer, kind: str, sources: list[memoryview]) -> None:
        self._writer = writer
        self._peer = peer
        self._kind = kind
        self._sources = sources
        self._written: list[str] = []

    def write(self) -> None:
        """One batch."""
        keys = [f"write/{next(_NUMBERS)}" for _ in self._sources]
        self._written += keys
        must_be_ok(self._writer.batch_put_from(keys, self._sources))

    def control(self) -> None:
        """The same bytes over a bare socket."""
        self._peer.write(self._kind, self._sources)

    def forget(self) -> None:
        """Make room again."""
        while self._written:
            self._writer.remove(self._written.pop())


_NUMBERS: Final = itertools.count()
