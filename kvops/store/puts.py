"""Puts under way at the master: memory is allocated, nothing is readable yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvops.store.model import Generation, StoreId


@dataclass(slots=True, eq=False)
class Put:
    """One object in PROCESSING."""

    digest: bytes
    generation: Generation
    size: int
    footprint: int
    depth: int
    tenant: int
    flags: int
    ttl_ms: int
    started_ms: int  # on the clock that stands still in the master's own pauses
    places: list[tuple[StoreId, int]]  # store and offset of each replica; store 0 once it is lost
    moved_from: int = 0  # generation of the readable copy that this one is to replace
    expires_ms: int = 0  # once it is readable; 0: never
    writers: tuple[int, ...] = ()  # connections that write it


class PutTable:
    """Puts by key digest, and in the order of their start."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Put] = {}
        self._by_writer: dict[int, dict[Put, None]] = {}  # in order: a set would follow memory addresses
        self._started: deque[Put] = deque()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[Put]:
        return iter(list(self._by_digest.values()))

    def get(self, digest: bytes) -> Put | None:
        """The put of that key, if one is under way."""
        return self._by_digest.get(digest)

    def add(self, put: Put) -> None:
        """Enter a granted put."""
        assert put.digest not in self._by_digest, "a key has at most one put under way"
        self._by_digest[put.digest] = put
        self._started.append(put)

    def join(self, put: Put, writer: int) -> None:
        """A connection writes the object, or its rank's parts of it."""
        put.writers += (writer,)
        held = self._by_writer.get(writer)
        if held is None:
            self._by_writer[writer] = {put: None}
        else:
            held[put] = None

    def pop(self, put: Put) -> None:
        """The put ended, one way or the other."""
        del self._by_digest[put.digest]
        for writer in put.writers:
            held = self._by_writer.get(writer)
            if held is not None:
                held.pop(put, None)
                if not held:
                    del self._by_writer[writer]

    def leave(self, writer: int) -> list[Put]:
        """A connection ended; the puts that have no writer left."""
        puts = self._by_writer.pop(writer, {})
        for put in puts:
            put.writers = tuple(other for other in put.writers if other != writer)
        return [put for put in puts if not put.writers]

    def _alive(self, put: Put) -> bool:
        return self._by_digest.get(put.digest) is put

    def oldest(self) -> Put | None:
        """The put that started first."""
        while self._started and not self._alive(self._started[0]):
            self._started.popleft()
        return self._started[0] if self._started else None
