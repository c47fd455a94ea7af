"""
Pool clients with bugs: factories that a chaos client calls by name instead of ``kvops.connect``.

Each changes one thing, in the client's own process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from kvops.chaos import safeguards
from kvops.errors import Unreachable
from kvops.inference.engine import connect_pool
from kvops.inference.tier import Fetched, HostTier
from kvops.net.link import Address, establish
from kvops.store.channel import Idle, MasterChannel
from kvops.store.model import Outcome, Reason
from kvops.transfer import shm, stream
from kvops.transfer.engine import Leased
from kvops.transfer.layout import ObjectHeader

PATIENCE_MS = 5_000
STORM = 32


class Proxy:
    """A pool that behaves, for those below to misbehave in one way."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)


def correct(**options: object) -> Any:
    """Nothing is wrong with it."""
    return connect_pool(**options)


class _NoDeadline(Proxy):
    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        return list(self.pool.batch_get_into(keys, buffers, deadline_ms=PATIENCE_MS))


def no_deadline(**options: object) -> Any:
    """Reads take as long as they take."""
    return _NoDeadline(connect_pool(**options))


def no_breaker(**options: object) -> Any:
    """It goes on asking a store that does not answer."""
    return safeguards.connect_without(without=["breaker"], **options)


class _Storm(Proxy):
    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        calls = 0
        outcomes: list[Outcome] = []
        while calls < STORM and not (outcomes and all(one.ok for one in outcomes)):
            outcomes = list(self.pool.batch_get_into(keys, buffers, deadline_ms=deadline_ms))
            calls += 1
        return outcomes


def no_retry_budget(**options: object) -> Any:
    """What fails is tried again at once, thirty times."""
    return _Storm(connect_pool(**options))


class _Liar(Proxy):
    def batch_put_from(self, keys: Sequence[str], buffers: Sequence[Any], **more: Any) -> list[Outcome]:
        outcomes = self.pool.batch_put_from(keys, buffers, **more)
        return [
            Outcome(False, Reason.NO_SPACE) if one.reason is Reason.STORED and number % 2 else one
            for number, one in enumerate(outcomes)
        ]


def lying_put(**options: object) -> Any:
    """It says "refused" of puts that took effect."""
    return _Liar(connect_pool(**options))


def _unverified() -> None:
    def header(header: Any, **expected: Any) -> ObjectHeader:
        return ObjectHeader(
            expected["incarnation"],
            expected["generation"],
            expected["key_digest"],
            expected["size"],
            65_536,
            0,
        )

    def copy(target: memoryview, source: memoryview, trailer: Any, **where: Any) -> int:
        target[:] = source
        return -1

    for module in (shm, stream):
        module.verify_header = header
        module.verify_trailer = lambda header, trailer: True
    shm.copy_verified = copy
    stream.verify_chunks = lambda data, trailer, **where: -1


def no_checksum(**options: object) -> Any:
    """It takes whatever bytes come."""
    _unverified()
    return connect_pool(**options)


def no_fencing(**options: object) -> Any:
    """It does not compare generations: memory that was given to somebody else looks like its own."""
    _unverified()
    return connect_pool(**options)


def no_lease_check(**options: object) -> Any:
    """It reads for as long as it likes, and asks for no more time."""
    Leased.left = lambda self, now: self.deadline - now
    return _NoDeadline(connect_pool(**options))


def old_leader(**options: object) -> Any:
    """It asks the master that it found first, whenever that one answers, and takes its word in any term."""
    connect = MasterChannel._connect
    first: dict[MasterChannel, Address] = {}

    def gullible(self: Any, deadline: float) -> Any:
        self.term = 0
        if self in first:
            link = self._open(first[self])
            try:
                establish(link, deadline=min(deadline, time.monotonic() + 0.05))
            except Unreachable:
                link.close()
            else:
                return link
        link = connect(self, deadline)
        first.setdefault(self, link.address)
        return link

    MasterChannel._connect = gullible
    Idle.take = lambda self: None
    return connect_pool(**options)


class _WideBreaker(Proxy):
    def health(self) -> dict[str, Any]:
        health: dict[str, Any] = self.pool.health()
        if any(one["breaker"] != "closed" for one in health["stores"]):
            health["group"] = {"breaker": "open"}
        return health


def wide_breaker(**options: object) -> Any:
    """One store's breaker opens the group's."""
    return _WideBreaker(connect_pool(**options))


class _Metastable(Proxy):
    slow = False

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        outcomes = list(self.pool.batch_get_into(keys, buffers, deadline_ms=deadline_ms))
        if any(one.reason is Reason.BREAKER_OPEN for one in outcomes):
            self.slow = True
        if self.slow:
            threading.Event().wait(0.5)  # beyond a request's budget, within what the engine can bear
        return outcomes


def metastable(**options: object) -> Any:
    """Once a breaker was open it is slow for ever."""
    return _Metastable(connect_pool(**options))


def hole(**options: object) -> Any:
    """The tier reports one block more than it has whenever one did not come."""
    prefetch = HostTier.prefetch

    def boasting(self: Any, keys: Sequence[str], *, gpu_free_in_ms: float = 0.0) -> Fetched:
        fetched = prefetch(self, keys, gpu_free_in_ms=gpu_free_in_ms)
        if fetched.stopped_by is not None and fetched.pages < len(keys):
            fetched.l3_pages += 1
        return fetched

    HostTier.prefetch = boasting
    return connect_pool(**options)
