"""What a leader sends to its standbys: the state as it is, then every operation, in one order on each connection."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from kvops.limits import MIB
from kvops.net import wire
from kvops.net.wire import Kind
from kvops.store.master_core import MasterCore
from kvops.store.outbox import JournalEntry
from kvops.store.replication import ENTRY, STATE_END
from kvops.store.snapshot import StateWalk

UNSENT_BYTES_MAX: Final = 64 * MIB  # a standby that is further behind begins anew
STATE_UNSENT_BYTES: Final = MIB  # of the state, ahead of what the connection takes
FRAME_BYTES_MAX: Final = 4 * MIB


class Outlet(Protocol):
    """A standby's connection; ``asyncio.Transport`` is one."""

    def write(self, data: bytes) -> None:
        """Send, or keep for sending."""

    def get_write_buffer_size(self) -> int:
        """Bytes that are kept."""

    def abort(self) -> None:
        """Hang up."""


@dataclass(slots=True)
class _Stream:
    outlet: Outlet
    walk: StateWalk | None  # until the state is sent


class Streams:
    """The streams of one leadership, by connection."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._taking_over: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def busy(self) -> bool:
        """Whether some standby is still being told the state."""
        return bool(self._taking_over)

    def add(self, conn: int, outlet: Outlet, core: MasterCore, *, sequence: int) -> None:
        """A standby joined: the state goes first, and whatever happens from now on between its slices."""
        walk = StateWalk(core)
        self._streams[conn] = _Stream(outlet, walk)
        self._taking_over.append(conn)
        self._write(outlet, [_pack(sequence, entry) for entry in walk.stores()])

    def drop(self, conn: int) -> None:
        """A connection ended."""
        if self._streams.pop(conn, None) is not None and conn in self._taking_over:
            self._taking_over.remove(conn)

    def send(self, entries: list[tuple[int, JournalEntry]]) -> None:
        """Operations with their sequences, to every standby."""
        if not self._streams:
            return
        packed = [_pack(sequence, entry) for sequence, entry in entries]
        for stream in self._streams.values():
            if stream.outlet.get_write_buffer_size() > UNSENT_BYTES_MAX:
                stream.outlet.abort()
            else:
                self._write(stream.outlet, packed)

    def beat(self) -> None:
        """Say that we live."""
        for stream in self._streams.values():
            stream.outlet.write(wire.pack(Kind.REPLICATE, b""))

    def step(self, *, sequence: int) -> None:
        """One slice of the state for a standby that takes it over."""
        conn = self._taking_over.popleft()
        stream = self._streams[conn]
        assert stream.walk is not None
        if stream.outlet.get_write_buffer_size() < STATE_UNSENT_BYTES:
            entries = stream.walk.step()
            if entries is None:
                stream.walk = None
                self._write(stream.outlet, [ENTRY.pack(sequence, STATE_END, 0, 0, 0)])
                return
            self._write(stream.outlet, [_pack(sequence, entry) for entry in entries])
        self._taking_over.append(conn)

    @staticmethod
    def _write(outlet: Outlet, packed: list[bytes]) -> None:
        batch: list[bytes] = []
        size = 0
        for piece in packed:
            if size + len(piece) > FRAME_BYTES_MAX and batch:
                outlet.write(wire.pack(Kind.REPLICATE, b"".join(batch)))
                batch, size = [], 0
            batch.append(piece)
            size += len(piece)
        if batch:
            outlet.write(wire.pack(Kind.REPLICATE, b"".join(batch)))


def _pack(sequence: int, entry: JournalEntry) -> bytes:
    kind, count, body = entry.encode()
    return ENTRY.pack(sequence, kind, 0, count, len(body)) + body
