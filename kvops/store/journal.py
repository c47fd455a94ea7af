"""
The master's journal: what a restarted master reads to know every COMPLETE object again.

::

    a batch. Little-endian, 32 bytes, then the body.
    offset  0  magic     4 s   b"KVOJ"
            4  version   u16   1
            6  kind      u16   Kind
            8  count     u32   rows in the body; 1 where it is msgpack
           12  body      u32   bytes that follow
           16  sequence  u64   one more with every batch; a snapshot's batches count from 0
           24  digest    u64   xxh3_64 of the body, seeded with xxh3_64 of bytes 0–23

A directory holds segments (``segment-N.log``) and at most one whole snapshot (``snapshot-N.rows``). The state
is the snapshot's batches, then those of segment N and later. Objects that change while a snapshot is taken
are in both; ``live_rows`` lets the highest generation win, so their order does not matter.

A killed process loses what it had not written yet, a few ms. So after a restart the stores' slot tables have
the last word, and a damaged journal is no reason not to start: ``set_aside`` moves it out of the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvops.errors import ConfigError, ParseError
from kvops.limits import MIB, STORE_COUNT_MAX
from kvops.store.model import LOCATION, Hold, StoreInfo
from kvops.store.term import sync_directory

MAGIC: Final = b"KVOJ"
VERSION: Final = 1
_VERSION_BYTES: Final = VERSION.to_bytes(2, "little")
HEADER_BYTES: Final = 32
_HEAD: Final = Struct("<4sHHIIQ")
_DIGEST: Final = Struct("<Q")
assert _HEAD.size + _DIGEST.size == HEADER_BYTES

BODY_BYTES_MAX: Final = 8 * MIB


class Kind(IntEnum):
    """What a batch holds. Numbers are never reused; 4 is none of them."""

    COMPLETE = 1  # rows of COMPLETE_ROW: objects that are readable from now on
    GONE = 2  # rows of GONE_ROW: objects that are not any more
    STORE = 3  # a StoreInfo: mounted, or changed; with state "gone" all its objects are gone
    OVERRUN = 5  # batches before this one are missing: the disk was too slow, or failed
    SNAPSHOT_END = 6  # a SnapshotEnd: a snapshot without it is not whole
    EXPIRES = 7  # rows of EXPIRES_ROW: until when those objects are readable that have a TTL
    LESS = 9  # rows of LESS_ROW: replicas that are gone, of objects that have others
    HOLDS = 8  # a list of Hold: set or changed together; "lifted" ends one


class SnapshotEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last batch of a snapshot."""

    rows: int  # of COMPLETE, in all its batches
    next_sequence: int  # of the first batch that follows it, in the segment of the same number


COMPLETE_ROW: Final = np.dtype(
    [("digest", "<u8", (2,)), ("location", LOCATION), ("chunk", "<u4"), ("depth", "<u2"), ("tenant", "<u2")]
)
GONE_ROW: Final = np.dtype([("digest", "<u8", (2,)), ("generation", "<u8")])
LESS_ROW: Final = np.dtype([("digest", "<u8", (2,)), ("generation", "<u8"), ("store", "<u8")])
EXPIRES_ROW: Final = np.dtype([("generation", "<u8"), ("when_ms", "<u8")])  # on CLOCK_BOOTTIME
COMPLETE: Final = Struct("<16sQQIHHIHH")  # the same as COMPLETE_ROW, for one row
assert (COMPLETE_ROW.itemsize, COMPLETE.size, GONE_ROW.itemsize) == (48, 48, 24)

Rows = NDArray[np.void]
ROWS: Final[dict[int, np.dtype[Any]]] = {
    Kind.COMPLETE: COMPLETE_ROW,
    Kind.GONE: GONE_ROW,
    Kind.EXPIRES: EXPIRES_ROW,
    Kind.LESS: LESS_ROW,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch as it was appended."""

    kind: int
    count: int
    sequence: int
    body: bytes

    def rows(self) -> Rows:
        """The rows of COMPLETE, GONE or EXPIRES, read-only, without a copy."""
        return np.frombuffer(self.body, ROWS[self.kind])

    def store(self) -> StoreInfo:
        """The store of STORE."""
        return msgspec.msgpack.decode(self.body, type=StoreInfo)

    def holds(self) -> list[Hold]:
        """The holds of HOLDS."""
        return msgspec.msgpack.decode(self.body, type=list[Hold])

    def snapshot_end(self) -> SnapshotEnd:
        """The counts of SNAPSHOT_END."""
        return msgspec.msgpack.decode(self.body, type=SnapshotEnd)


def encode_header(kind: int, count: int, sequence: int, body: bytes) -> bytes:
    """The 32 bytes before a batch's body."""
    head = _HEAD.pack(MAGIC, VERSION, kind, count, len(body), sequence)
    return head + _DIGEST.pack(xxh3_64_intdigest(body, xxh3_64_intdigest(head)))


def unwritable(directory: Path, error: OSError) -> ConfigError:
    """The error for a directory that does not take our files."""
    return ConfigError(
        f"the journal in {directory} cannot be written: {error.strerror}",
        fix="give this user a writable state_dir with free space",
    )


def segments(directory: Path) -> list[tuple[int, Path]]:
    """The segments there, by number."""
    return _numbered(directory, "segment-*.log")


def snapshots(directory: Path) -> list[tuple[int, Path]]:
    """The whole snapshots there, by number."""
    return _numbered(directory, "snapshot-*.rows")


def _numbered(directory: Path, pattern: str) -> list[tuple[int, Path]]:
    found = []
    for path in directory.glob(pattern):
        digits = path.stem.rpartition("-")[2]
        if digits.isascii() and digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


def recover(directory: Path) -> Iterator[Batch]:
    """
    Every batch that makes up the state, in order: the last snapshot's, then those of the segments after it.

    An unfinished batch at the end, as a killed process leaves it, ends the journal there (also where a later
    start went on in another segment).

    Raises:
        ParseError: A batch in the middle is damaged or missing; says in which file and where.
        ConfigError: A file cannot be read.
    """
    taken = snapshots(directory)
    first: int | None = None
    expected: int | None = None
    if taken:
        first, path = taken[-1]
        for batch in _snapshot_batches(path):
            if batch.kind == Kind.SNAPSHOT_END:
                expected = batch.snapshot_end().next_sequence
            yield batch
    torn: tuple[Path, int] | None = None
    for number, path in segments(directory):
        if first is not None and number < first:
            continue  # left over from a commit that was cut short
        reader = _Reader(path)
        for batch in reader:
            if batch.kind == Kind.OVERRUN:
                # What is missing before the first batch after a snapshot is in the snapshot.
                covered = number == first and reader.start == 0
            else:
                covered = False
                if expected is not None and batch.sequence != expected:
                    raise _damaged(*(torn or (path, reader.start)), _gap(expected, batch.sequence))
            torn = None
            expected = batch.sequence + 1
            if not covered:
                yield batch
        if reader.torn_at is not None:
            if reader.goes_on():
                raise _damaged(path, reader.torn_at, "whole batches follow a damaged one")
            torn = torn or (path, reader.torn_at)


def _gap(expected: int, found: int) -> str:
    return f"batch {found} stands where {expected} should be"


def _snapshot_batches(path: Path) -> Iterator[Batch]:
    rows = 0
    whole = False
    reader = _Reader(path)
    for index, batch in enumerate(reader):
        if whole or batch.sequence != index:
            raise _damaged(path, reader.start, _gap(index, batch.sequence))
        if batch.kind == Kind.COMPLETE:
            rows += batch.count
        whole = batch.kind == Kind.SNAPSHOT_END and batch.snapshot_end().rows == rows
        yield batch
    if reader.torn_at is not None or not whole:
        raise _damaged(path, reader.end, "the snapshot is not whole")


class _Reader:
    """The batches of one file, up to its end or to the first that is not whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start = 0
        """Where the last batch given begins."""
        self.end = 0
        """Where it ends."""
        self.torn_at: int | None = None
        """Where something begins that is no whole batch."""

    def __iter__(self) -> Iterator[Batch]:
        try:
            with self._path.open("rb", buffering=MIB) as file:
                while True:
                    header = file.read(HEADER_BYTES)
                    if not header:
                        return
                    batch = _read_batch(header, file)
                    self.start = self.end
                    if batch is None:
                        self.torn_at = self.start
                        return
                    if header[4:6] != _VERSION_BYTES:
                        raise _damaged(self._path, self.start, "it was written by another version of kvops")
                    self.end = self.start + HEADER_BYTES + len(batch.body)
                    yield batch
        except OSError as error:
            raise ConfigError(
                f"the journal file {self._path} cannot be read: {error.strerror}",
                fix="see its owner and mode",
            ) from None

    def goes_on(self) -> bool:
        """Whether a whole batch lies behind the damage: then it is not the end that was torn off."""
        assert self.torn_at is not None
        with self._path.open("rb") as file:
            file.seek(self.torn_at)
            rest = file.read()
            at = rest.find(MAGIC, 1)
            while at >= 0:
                file.seek(self.torn_at + at)
                if _read_batch(file.read(HEADER_BYTES), file) is not None:
                    return True
                at = rest.find(MAGIC, at + 1)
        return False


def _read_batch(header: bytes, file: BinaryIO) -> Batch | None:
    if len(header) < HEADER_BYTES:
        return None
    magic, _, kind, count, size, sequence = _HEAD.unpack_from(header)
    if magic != MAGIC or size > BODY_BYTES_MAX:
        return None
    body = file.read(size)
    (digest,) = _DIGEST.unpack_from(header, _HEAD.size)
    if len(body) < size or xxh3_64_intdigest(body, xxh3_64_intdigest(header[: _HEAD.size])) != digest:
        return None
    return Batch(kind, count, sequence, body)


def _damaged(path: Path, offset: int, why: str) -> ParseError:
    return ParseError(
        f"the journal is damaged at {path}, byte {offset}: {why}",
        fix="set the file aside; the master learns its objects from the stores' slot tables instead",
    )


@dataclass(frozen=True, slots=True)
class Recovery:
    """The state that a journal describes."""

    rows: Rows
    """COMPLETE_ROW, one for every object that is readable (one for each replica)."""
    stores: dict[int, StoreInfo] = field(default_factory=dict)
    """The last that was said of each mounted store, by id. Objects of others are in ``rows`` no more."""
    holds: dict[str, Hold] = field(default_factory=dict)
    """The last that was said of each target, lifted holds included: their numbers are not given again."""
    expires: dict[int, int] = field(default_factory=dict)
    """Until when an object is readable that has a TTL, in ms of CLOCK_BOOTTIME, by generation."""
    next_sequence: int = 0
    generation_max: int = 0
    """The highest generation that appears anywhere."""
    whole: bool = True
    """False when batches are known to be missing: what the stores do not confirm may be long gone."""


def recover_state(directory: Path) -> Recovery:
    """
    Read a journal whole.

    Raises:
        ParseError: As ``recover``, or a batch's body is not what its kind says.
        ConfigError: A file cannot be read.
    """
    # Bodies, joined at the end: numpy joins structured arrays field by field, 20 times slower.
    complete: list[bytes] = []
    gone: list[bytes] = []
    expires: dict[int, int] = {}
    stores: dict[int, StoreInfo] = {}
    holds: dict[str, Hold] = {}
    less: set[tuple[int, int]] = set()  # generation and store of replicas that are gone
    count = 0  # of COMPLETE rows
    ends: dict[int, int] = {}  # store id → how many of these are of stores that had the id before
    next_sequence, whole = 0, True
    for batch in recover(directory):
        next_sequence = batch.sequence + 1
        try:
            if batch.kind == Kind.COMPLETE:
                complete.append(_whole_rows(batch))
                count += batch.count
            elif batch.kind == Kind.GONE:
                gone.append(_whole_rows(batch))
            elif batch.kind == Kind.EXPIRES:
                expires.update(np.frombuffer(_whole_rows(batch), EXPIRES_ROW).tolist())
            elif batch.kind == Kind.LESS:
                less.update((row[1], row[2]) for row in np.frombuffer(_whole_rows(batch), LESS_ROW).tolist())
            elif batch.kind == Kind.STORE:
                store = batch.store()
                if store.state == "gone" or stores.get(store.id, store).incarnation != store.incarnation:
                    ends[store.id] = count  # its memory went with it; the id may be given again
                stores[store.id] = store
            elif batch.kind == Kind.HOLDS:
                holds.update({hold.target: hold for hold in batch.holds()})
            elif batch.kind == Kind.OVERRUN:
                whole = False
            elif batch.kind == Kind.SNAPSHOT_END:
                next_sequence = (
                    batch.snapshot_end().next_sequence
                )  # those of the snapshot's batches are its own
            else:
                raise ValueError("its kind is unknown")
        except (ValueError, msgspec.MsgspecError) as error:
            raise ParseError(
                f"batch {batch.sequence} (kind {batch.kind}) in {directory} cannot be read: {error}",
                fix="read it with the version of kvops that wrote it, or set it aside",
            ) from None
    rows = np.frombuffer(b"".join(complete), COMPLETE_ROW)
    lost = np.frombuffer(b"".join(gone), GONE_ROW)
    del complete, gone
    highest = [
        int(array.max()) for array in (rows["location"]["generation"], lost["generation"]) if len(array)
    ]
    if ends:
        end = np.zeros(STORE_COUNT_MAX + 1, np.int64)
        end[list(ends)] = list(ends.values())
        rows = _pick(rows, np.arange(len(rows)) >= end[rows["location"]["store"]])
    mounted = {id: store for id, store in stores.items() if store.state != "gone"}
    rows = without_replicas(live_rows(rows, lost), less)
    rows = _pick(rows, np.isin(rows["location"]["store"], np.fromiter(mounted, np.uint16, len(mounted))))
    if expires:
        generations = rows["location"]["generation"]
        expires = {one: expires[one] for one in generations.tolist() if one in expires}
    return Recovery(
        rows,
        stores=mounted,
        holds=holds,
        expires=expires,
        next_sequence=next_sequence,
        generation_max=max(highest, default=0),
        whole=whole,
    )


def live_rows(complete: Rows, gone: Rows) -> Rows:
    """
    Which of all objects that were ever COMPLETE still are.

    Of each key only the highest generation counts, once for each store (the replicas of one put share it),
    unless it is gone; older ones were replaced even where nothing says that they went. The order of either
    array matters to nothing but the order of the result.

    Args:
        complete: COMPLETE_ROW, in any order, repetitions welcome.
        gone: GONE_ROW, likewise.

    Returns:
        The rows that are left, in the order given.
    """
    first = np.ascontiguousarray(complete["digest"][:, 0])
    keep = np.ones(len(complete), bool)
    # Few keys come twice: only those that share their first digest word are sorted exactly.
    order = np.argsort(first)
    ordered = first[order]
    same = ordered[1:] == ordered[:-1]
    twin = np.zeros(len(complete), bool)
    twin[1:] |= same
    twin[:-1] |= same
    twins = np.sort(order[twin])
    if len(twins):
        keep[twins] = _newest(complete[twins])
    if len(gone):
        dead = np.sort(gone["generation"])
        generation = np.ascontiguousarray(complete["location"]["generation"])
        at = np.minimum(np.searchsorted(dead, generation), len(dead) - 1)
        keep &= dead[at] != generation
    return _pick(complete, keep)


def without_replicas(rows: Rows, less: set[tuple[int, int]]) -> Rows:
    """COMPLETE_ROW rows but for those of a generation and a store that ``less`` names."""
    if not less:
        return rows
    of_some = np.isin(rows["location"]["generation"], np.array([one for one, _ in less], np.uint64))
    keep = np.ones(len(rows), bool)
    for at in np.flatnonzero(of_some).tolist():
        place = (int(rows["location"]["generation"][at]), int(rows["location"]["store"][at]))
        keep[at] = place not in less
    return _pick(rows, keep)


def _whole_rows(batch: Batch) -> bytes:
    if len(batch.body) != batch.count * ROWS[batch.kind].itemsize:
        raise ValueError(f"{len(batch.body)} bytes are not {batch.count} rows")
    return batch.body


def _pick(rows: Rows, keep: NDArray[np.bool_]) -> Rows:
    # As plain bytes: a structured row is copied field by field.
    plain = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize)))
    return plain[keep].view(rows.dtype)


def _newest(rows: Rows) -> NDArray[np.bool_]:
    """Which rows have their key's highest generation, each store's once (the last)."""
    generation, store = rows["location"]["generation"], rows["location"]["store"]
    digest = rows["digest"]
    order = np.lexsort((store, generation, digest[:, 1], digest[:, 0]))
    digest, generation, store = digest[order], generation[order], store[order]
    next_key = np.append((digest[1:] != digest[:-1]).any(axis=1), True)
    ends = np.flatnonzero(next_key)
    highest = np.repeat(generation[ends], np.diff(ends, prepend=-1))
    again = np.append((generation[1:] == generation[:-1]) & (store[1:] == store[:-1]), False) & ~next_key
    keep = np.empty(len(rows), bool)
    keep[order] = (generation == highest) & ~again
    return keep


def set_aside(directory: Path) -> Path:
    """
    Move a journal that cannot be read out of the way, for a person to look at; the one before is deleted.

    Returns:
        Where it lies now: ``damaged`` in the same directory.
    """
    damaged = directory / "damaged"
    try:
        damaged.mkdir(mode=0o700, exist_ok=True)
        for path in damaged.iterdir():
            path.unlink()
        for _, path in (*segments(directory), *snapshots(directory)):
            path.rename(damaged / path.name)
        sync_directory(directory)
    except OSError as error:
        raise unwritable(directory, error) from None
    return damaged
