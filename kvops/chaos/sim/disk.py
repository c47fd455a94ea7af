"""
A host's disk as the master uses it: journal files that a slow disk, a kill or a power loss leaves unfinished.

The bytes are the real journal's (``journal.encode_header``), and the real ``recover_state`` reads them back. The
queue before them behaves as ``JournalWriter`` does, whose thread and system calls are not covered here.
"""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec

from kvops.store.journal import HEADER_BYTES, Kind, Recovery, SnapshotEnd, encode_header, recover_state

if TYPE_CHECKING:
    from kvops.chaos.sim.process import Process

GATHER_US: Final = 2_000
WRITE_US: Final = 100
SEGMENT_BYTES_MAX: Final = 16 << 10  # small: snapshots are to happen
QUEUE_BYTES_MAX: Final = 32 << 10  # small: a slow disk is to be too slow now and then

_SEGMENT, _SNAPSHOT, _BEGIN, _COMMIT, _ABORT = range(5)
_Item = tuple[int, bytes]


class Disk:
    """What outlives the processes of one host."""

    def __init__(self, directory: Path, rng: Random) -> None:
        self.directory = directory
        self.slow_us = 0  # every write takes so much longer
        self.rng = rng
        self.segments: dict[int, bytearray] = {}
        self.snapshots: dict[int, bytes] = {}
        self.synced: dict[int, int] = {}  # bytes of a segment that even a power loss leaves
        self.set_aside = 0
        directory.mkdir(parents=True, exist_ok=True)

    def lose_power(self) -> None:
        """What was not synced may be gone, cut anywhere."""
        for number, data in self.segments.items():
            synced = self.synced.get(number, 0)
            if len(data) > synced:
                del data[self.rng.randint(synced, len(data)) :]

    def lose_journal(self) -> None:
        """The journal is gone; the next master learns from the stores what there is."""
        self.segments.clear()
        self.snapshots.clear()
        self.synced.clear()

    def lose_everything(self) -> None:
        """The whole state directory is gone: the next master starts at the first term."""
        self.lose_journal()
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def recover(self) -> Recovery:
        """
        Read the journal as a starting master does.

        Raises:
            ParseError: It is damaged.
        """
        place = self.directory / "journal"
        place.mkdir(exist_ok=True)
        try:
            for number, data in self.segments.items():
                (place / f"segment-{number:016d}.log").write_bytes(data)
            for number, rows in self.snapshots.items():
                (place / f"snapshot-{number:016d}.rows").write_bytes(rows)
            return recover_state(place)
        finally:
            shutil.rmtree(place)

    def put_aside(self) -> None:
        """A damaged journal is moved out of the way."""
        self.set_aside += 1
        self.lose_journal()


class JournalModel:
    """The journal of one running master: ``JournalWriter``'s interface over a ``Disk``, in virtual time."""

    def __init__(self, disk: Disk, process: Process, *, next_sequence: int) -> None:
        self._disk = disk
        self._process = process
        self._sequence = next_sequence
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0
        self._overrun = False
        self._snapshot: _Snapshot | None = None
        self._snapshot_file: bytearray | None = None
        self._tail_bytes = 0
        self._snapshot_bytes = 0
        self._writing: list[_Item] = []
        self._number = max(disk.segments, default=0)
        self._snapshot_number = 0
        self._scheduled = False
        self._next_segment()

    @property
    def wants_snapshot(self) -> bool:
        """As ``JournalWriter`` says it."""
        if self._snapshot is not None:
            return False
        if self._overrun:
            return self._queued_bytes <= QUEUE_BYTES_MAX // 2
        return self._tail_bytes >= max(SEGMENT_BYTES_MAX, 2 * self._snapshot_bytes)

    def append(self, kind: Kind, count: int, body: bytes) -> int:
        """Queue one batch."""
        sequence = self._sequence
        self._sequence = sequence + 1
        if self._overrun:
            return sequence
        size = HEADER_BYTES + len(body)
        if self._queued_bytes + size > QUEUE_BYTES_MAX:
            self._overrun = True
            return sequence
        self._tail_bytes += size
        self._put(_SEGMENT, encode_header(kind, count, sequence, body) + body)
        return sequence

    def begin_snapshot(self) -> None:
        """Begin the state anew."""
        assert self._snapshot is None, "one snapshot at a time"
        missed = self._overrun
        self._overrun = False
        self._tail_bytes = 0
        self._snapshot = _Snapshot(next_sequence=self._sequence)
        self._put(_BEGIN, b"")
        if missed:
            self.append(Kind.OVERRUN, 1, b"")

    def append_snapshot(self, kind: Kind, count: int, body: bytes) -> bool:
        """Queue a batch of the snapshot; False: later."""
        snapshot = self._snapshot
        assert snapshot is not None
        if self._queued_bytes > QUEUE_BYTES_MAX // 2:
            return False
        self._put(_SNAPSHOT, encode_header(kind, count, snapshot.sequence, body) + body)
        snapshot.sequence += 1
        snapshot.bytes += HEADER_BYTES + len(body)
        if kind == Kind.COMPLETE:
            snapshot.rows += count
        return True

    def commit_snapshot(self) -> bool:
        """Let it replace what was before; False when it was given up."""
        snapshot, self._snapshot = self._snapshot, None
        assert snapshot is not None
        if self._overrun:
            self._put(_ABORT, b"")
            return False
        body = msgspec.msgpack.encode(SnapshotEnd(rows=snapshot.rows, next_sequence=snapshot.next_sequence))
        self._put(_SNAPSHOT, encode_header(Kind.SNAPSHOT_END, 1, snapshot.sequence, body) + body)
        self._put(_COMMIT, b"")
        self._snapshot_bytes = snapshot.bytes
        return True

    def _put(self, target: int, data: bytes) -> None:
        self._queue.append((target, data))
        self._queued_bytes += len(data) + 1
        if not self._scheduled:
            self._scheduled = True
            self._process.timer(GATHER_US, self._begin_write)

    def _begin_write(self) -> None:
        self._writing = list(self._queue)
        self._queue.clear()
        self._process.timer(WRITE_US + self._disk.slow_us, self._end_write)

    def _end_write(self) -> None:
        for target, data in self._writing:
            self._queued_bytes -= len(data) + 1
            self._land(target, data)
        self._writing = []
        if self._queue:
            self._begin_write()
        else:
            self._scheduled = False

    def _land(self, target: int, data: bytes) -> None:
        disk = self._disk
        if target == _SEGMENT:
            if len(disk.segments[self._number]) >= SEGMENT_BYTES_MAX:
                self._next_segment()
            disk.segments[self._number] += data
        elif target == _BEGIN:
            self._next_segment()
            self._snapshot_number = self._number
            self._snapshot_file = bytearray()
        elif target == _SNAPSHOT:
            assert self._snapshot_file is not None
            self._snapshot_file += data
        elif target == _ABORT:
            self._snapshot_file = None
        else:
            assert self._snapshot_file is not None
            disk.snapshots = {self._snapshot_number: bytes(self._snapshot_file)}
            disk.segments = {n: s for n, s in disk.segments.items() if n >= self._snapshot_number}
            self._snapshot_file = None

    def _next_segment(self) -> None:
        disk = self._disk
        if self._number in disk.segments:
            disk.synced[self._number] = len(disk.segments[self._number])
        self._number += 1
        disk.segments[self._number] = bytearray()

    def flush(self) -> None:
        """All that is queued is written; the time that takes is not modelled."""
        for target, data in (*self._writing, *self._queue):
            self._land(target, data)
        self._writing = []
        self._queue.clear()
        self._queued_bytes = 0

    def killed(self) -> None:
        """The process ended: of what was being written some has reached the file, of what was queued nothing."""
        rest = self._disk.rng.randint(0, sum(len(data) for _, data in self._writing))
        for target, data in self._writing:
            if target == _COMMIT or len(data) > rest:
                if target == _SEGMENT:
                    self._land(target, data[:rest])
                break
            self._land(target, data)
            rest -= len(data)

    def close(self) -> None:
        """An orderly end: all that is queued is written."""
        self.flush()
        if self._overrun:
            self._land(_SEGMENT, encode_header(Kind.OVERRUN, 1, self._sequence, b""))


class _Snapshot:
    def __init__(self, *, next_sequence: int) -> None:
        self.next_sequence = next_sequence
        self.sequence = 0
        self.rows = 0
        self.bytes = 0
