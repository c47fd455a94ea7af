"""
The writing side of the journal: ``append`` never waits, since a thread does all that touches the disk.

Nothing is synced but whole segments and snapshots: what is written outlives the process, and a power loss
takes the stores' memory with it anyway.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from kvops.errors import AlreadyRunning
from kvops.limits import MIB
from kvops.store.journal import (
    BODY_BYTES_MAX,
    HEADER_BYTES,
    Kind,
    SnapshotEnd,
    encode_header,
    recover_state,
    segments,
    snapshots,
    unwritable,
)
from kvops.store.term import sync_directory

SEGMENT_BYTES_MAX: Final = 64 * MIB
QUEUE_BYTES_MAX: Final = 64 * MIB
assert BODY_BYTES_MAX < QUEUE_BYTES_MAX

_WRITE_PIECES_MAX: Final = 512  # of one writev; the kernel takes 1,024
_WRITE_BYTES_MAX: Final = MIB  # about: a stalled write is noticed by what waits behind it
_GATHER_S: Final = 0.002  # batches gather this long: one write for many, and less rivalry for the GIL

# What an item of the queue is for.
_SEGMENT, _SNAPSHOT, _BEGIN, _COMMIT, _ABORT = range(5)


class JournalWriter:
    """
    The journal of a running master. For one thread, its loop; nothing here waits but ``flush`` and ``close``.

    When the disk cannot keep up, or fails, batches are dropped from then on and ``wants_snapshot`` is set;
    the next snapshot makes the journal whole again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        next_sequence: int | None = None,
        segment_bytes_max: int = SEGMENT_BYTES_MAX,
        queue_bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        """
        Begin a new segment after those that are there.

        Args:
            directory: Made when missing. One writer at a time.
            next_sequence: ``Recovery.next_sequence``, just read; None reads it from the directory.
            segment_bytes_max: A segment that reaches this is closed.
            queue_bytes_max: Unwritten bytes beyond which batches are dropped.

        Raises:
            AlreadyRunning: Another process writes there.
            ConfigError: The directory cannot be written.
            ParseError: The journal there is damaged (only where ``next_sequence`` is None).
        """
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._queue_bytes_max = queue_bytes_max
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _lock(directory / "lock")
        except OSError as error:
            raise unwritable(directory, error) from None
        try:
            if next_sequence is None:
                next_sequence = recover_state(directory).next_sequence
            self._disk = _Disk(directory)
        except BaseException:
            os.close(self._lock)
            raise
        # Owned by the loop.
        self._sequence = next_sequence
        self._queued_bytes = 0
        self._overrun = False
        self._snapshot: _Snapshot | None = None
        self._tail_bytes = 0
        self._snapshot_bytes = 0
        self._epoch = 0  # snapshots begun: what the disk refused before one has no meaning after it
        # Shared. Each side writes only what is its own; deque and int reads are atomic.
        self._queue: deque[tuple[int, bytes, bytes]] = deque()
        self._written_bytes = 0  # thread's
        self._failed: tuple[int, OSError] | None = None  # thread's: in which epoch the disk refused what
        self._disk_epoch = 0  # thread's: the epoch of what it writes now
        self._idle = False
        self._closed = False
        self._work = threading.Event()  # there is something after nothing
        self._hurry = threading.Event()  # somebody waits: do not gather
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Appended, but not written yet."""
        return self._queued_bytes - self._written_bytes

    @property
    def failure(self) -> OSError | None:
        """What the disk refused since the last snapshot began: nothing is written until the next."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] == self._epoch else None

    @property
    def wants_snapshot(self) -> bool:
        """
        Whether the master should begin a snapshot now.

        Batches were dropped, or the tail has become longer than two snapshots. With a disk that fails this
        stays true, so leave some seconds between two attempts.
        """
        if self._snapshot is not None:
            return False
        if self._overrun or self.failure is not None:
            return self.backlog_bytes <= self._queue_bytes_max // 2
        return self._tail_bytes >= max(self._segment_bytes_max, 2 * self._snapshot_bytes)

    def append(self, kind: Kind, count: int, body: bytes) -> int:
        """
        Queue one batch, as ``JournalEntry.encode`` gives it; never waits.

        Args:
            kind: Of its rows.
            count: How many there are.
            body: Rows (``array.tobytes()``) or msgpack, at most ``BODY_BYTES_MAX``.

        Returns:
            Its sequence.
        """
        assert len(body) <= BODY_BYTES_MAX, "split the batch"
        sequence = self._sequence
        self._sequence = sequence + 1
        if self._overrun or (self._failed is not None and self.failure is not None):
            return sequence
        size = HEADER_BYTES + len(body)
        if self._queued_bytes - self._written_bytes + size > self._queue_bytes_max:
            self._overrun = True  # a hole: nothing after it is worth writing
            return sequence
        self._tail_bytes += size
        self._put(_SEGMENT, encode_header(kind, count, sequence, body), body)
        return sequence

    def begin_snapshot(self) -> None:
        """
        Begin the state anew: batches appended from now on follow the snapshot that is being taken.

        The master then hands over, in slices, every store and COMPLETE object it has, and commits.
        """
        assert self._snapshot is None, "one snapshot at a time"
        missed = self._overrun or self.failure is not None
        self._overrun = False
        self._epoch += 1
        self._tail_bytes = 0
        self._snapshot = _Snapshot(next_sequence=self._sequence)
        self._put(_BEGIN, b"", b"")
        if missed:
            self.append(Kind.OVERRUN, 1, b"")

    def append_snapshot(self, kind: Kind, count: int, body: bytes) -> bool:
        """
        Queue one batch of the snapshot.

        Returns:
            False when the queue is half full: nothing was taken, try again. It pushes no batch out.
        """
        snapshot = self._snapshot
        assert snapshot is not None, "begin a snapshot first"
        assert len(body) <= BODY_BYTES_MAX, "split the batch"
        if self.backlog_bytes > self._queue_bytes_max // 2:
            return False
        self._put(_SNAPSHOT, encode_header(kind, count, snapshot.sequence, body), body)
        snapshot.sequence += 1
        snapshot.bytes += HEADER_BYTES + len(body)
        if kind == Kind.COMPLETE:
            snapshot.rows += count
        return True

    def commit_snapshot(self) -> bool:
        """
        Let the snapshot replace all that came before it, as soon as it is safely on disk.

        Returns:
            False when batches were dropped since it began: it was given up, begin another.
        """
        snapshot = self._snapshot
        assert snapshot is not None, "begin a snapshot first"
        self._snapshot = None
        if self._overrun or self.failure is not None:
            self._put(_ABORT, b"", b"")
            return False
        end = SnapshotEnd(rows=snapshot.rows, next_sequence=snapshot.next_sequence)
        body = msgspec.msgpack.encode(end)
        self._put(_SNAPSHOT, encode_header(Kind.SNAPSHOT_END, 1, snapshot.sequence, body), body)
        self._put(_COMMIT, b"", b"")
        self._snapshot_bytes = snapshot.bytes
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was appended is written; False when the time ran out, or the disk refused."""
        target = self._queued_bytes
        self._hurry.set()
        self._wake()
        with self._progress:
            done = self._progress.wait_for(lambda: self._written_bytes >= target, timeout_s)
        return done and self.failure is None and not self._overrun

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write and sync what is queued, let the directory go; False when that took too long, or failed."""
        if self._closed:
            return True
        if self._overrun:
            # Beyond the queue's bound, by 32 bytes: who reads this must know that its end is not the end.
            self._put(_SEGMENT, encode_header(Kind.OVERRUN, 1, self._sequence, b""), b"")
        self._closed = True
        self._hurry.set()
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False  # its disk hangs: the lock stays until the process ends
        os.close(self._lock)
        return self.failure is None and not self._overrun

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, target: int, head: bytes, body: bytes) -> None:
        # Every item counts at least one byte, so that flush() waits for commands too.
        self._queued_bytes += len(head) + len(body) + 1
        self._queue.append((target, head, body))
        if self._idle:
            self._wake()

    def _wake(self) -> None:
        self._idle = False
        self._work.set()

    def _run(self) -> None:
        while True:
            if not self._queue:
                self._idle = True
                # Looked at again after saying so: whoever appended in between did not wake us.
                if not self._queue:
                    if self._closed:
                        break
                    self._work.wait()
                self._idle = False
                self._work.clear()
            if not self._hurry.is_set():
                self._hurry.wait(_GATHER_S)
            self._drain()
            if not self._closed:
                self._hurry.clear()
        self._guard(self._disk.close)

    def _drain(self) -> None:
        while self._queue:
            target, taken, pieces = self._take()
            if target == _BEGIN:
                self._disk_epoch += 1
                self._guard(self._disk.begin)
            elif self._failed is None or self._failed[0] < self._disk_epoch:
                # After a failure only a new snapshot makes sense of anything that follows.
                if target == _SEGMENT:
                    self._guard(self._disk.write_segment, pieces, self._segment_bytes_max)
                elif target == _SNAPSHOT:
                    self._guard(self._disk.write_snapshot, pieces)
                elif target == _ABORT:
                    self._guard(self._disk.abort)
                elif target == _COMMIT:
                    self._guard(self._disk.commit)
            with self._progress:
                self._written_bytes += taken
                self._progress.notify_all()

    def _take(self) -> tuple[int, int, list[bytes]]:
        """The next items for one target: what they count, and their bytes."""
        target, head, body = self._queue.popleft()
        size = len(head) + len(body) + 1
        pieces = [head, body]
        while (
            target in (_SEGMENT, _SNAPSHOT)
            and self._queue
            and self._queue[0][0] == target
            and len(pieces) < _WRITE_PIECES_MAX
            and size < _WRITE_BYTES_MAX
        ):
            _, head, body = self._queue.popleft()
            size += len(head) + len(body) + 1
            pieces += (head, body)
        return target, size, pieces

    def _guard(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except OSError as error:
            self._failed = (self._disk_epoch, error)


@dataclass(slots=True)
class _Snapshot:
    next_sequence: int
    sequence: int = 0
    rows: int = 0
    bytes: int = 0


class _Disk:
    """The files behind a writer; every method may wait for the disk and raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = max((number for number, _ in segments(directory)), default=0)
        self._segment = -1
        self._segment_bytes = 0
        self._snapshot = -1
        self._snapshot_number = 0
        for path in directory.glob("snapshot-*.tmp"):
            path.unlink()
        try:
            self._next_segment()
        except OSError as error:
            raise unwritable(directory, error) from None

    def write_segment(self, pieces: list[bytes], segment_bytes_max: int) -> None:
        if self._segment_bytes >= segment_bytes_max:
            self._next_segment()
        self._segment_bytes += _write_all(self._segment, pieces)

    def begin(self) -> None:
        self.abort()
        self._next_segment()
        self._snapshot_number = self._number
        self._snapshot = _create(self._snapshot_path(".tmp"))

    def write_snapshot(self, pieces: list[bytes]) -> None:
        _write_all(self._snapshot, pieces)

    def commit(self) -> None:
        os.fdatasync(self._snapshot)
        os.close(self._snapshot)
        self._snapshot = -1
        self._snapshot_path(".tmp").rename(self._snapshot_path(".rows"))
        sync_directory(self._directory)
        # From here on it is the state; what it replaces may go in any order.
        for number, path in (*segments(self._directory), *snapshots(self._directory)):
            if number < self._snapshot_number:
                path.unlink(missing_ok=True)

    def abort(self) -> None:
        if self._snapshot >= 0:
            os.close(self._snapshot)
            self._snapshot = -1
            self._snapshot_path(".tmp").unlink(missing_ok=True)

    def close(self) -> None:
        self.abort()
        self._end_segment()

    def _snapshot_path(self, suffix: str) -> Path:
        return self._directory / f"snapshot-{self._snapshot_number:016d}{suffix}"

    def _next_segment(self) -> None:
        self._end_segment()
        self._number += 1
        self._segment = _create(self._directory / f"segment-{self._number:016d}.log")
        self._segment_bytes = 0

    def _end_segment(self) -> None:
        if self._segment >= 0:
            descriptor, self._segment = self._segment, -1
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(descriptor: int, pieces: list[bytes]) -> int:
    total = sum(map(len, pieces))
    written = os.writev(descriptor, pieces)
    if written < total:  # a nearly full disk, or a signal
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    return total


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AlreadyRunning(
            f"another process writes the journal in {path.parent}",
            fix="stop the other master, or give this one a state_dir of its own",
        ) from None
    return descriptor
