"""
The client's logic, without I/O: whom to ask for what, and what the answers mean.

A read is a lookup's answer turned into rounds of slices, each want's next replica in the next round. A put is a
PUT_START, a slice for every replica granted, and a PUT_END that says which of them are whole. Sockets, clocks,
breakers and threads are the pool's (``client.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvops.errors import UsageError
from kvops.limits import DEPTH_MAX, DIGEST_BYTES
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.keys import key_digest
from kvops.store.messages import PutStatus
from kvops.store.model import LOCATION, ObjectFlag, Outcome, PutOptions, Reason, StoreInfo, chunk_of
from kvops.store.trail import Place
from kvops.transfer.layout import chunk_span
from kvops.transfer.model import ReadSlice, SliceState, WriteSlice

Replica = tuple[int, int]
"""Store id and offset."""
Route = Callable[[int], StoreInfo | Reason]
"""The store with an id if it may be used now, or why not."""

MISS: Final = Outcome(False, Reason.MISS)
_REASONS: Final = {
    SliceState.STALE: Reason.STALE,
    SliceState.CORRUPT: Reason.CORRUPT,
    SliceState.REFUSED: Reason.STALE,
    SliceState.FAILED: Reason.STORE_DOWN,
    SliceState.LATE: Reason.TIMEOUT,
    SliceState.PENDING: Reason.TIMEOUT,
}
_PUT_OUTCOMES: Final = {
    PutStatus.EXISTS: Outcome(True, Reason.EXISTS),
    PutStatus.IN_PROGRESS: Outcome(False, Reason.EXISTS),
    PutStatus.NO_SPACE: Outcome(False, Reason.NO_SPACE),
    PutStatus.REFUSED: Outcome(False, Reason.REFUSED),
}


class Located:
    """What one or more LOOKUP answers say, in the order of the keys."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []  # LOCATION
        self.further: dict[int, list[Replica]] = {}  # replicas beyond the first, by key
        self.epoch = 0
        self.lease_ms = 0  # 0: the group's breaker is open

    def held(self, digests: bytes) -> bytes:
        """Of the digests that were looked up, those that were there, so that there is a lease on them."""
        return b"".join(
            digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
            for index, row in enumerate(self.rows)
            if row[3]
        )

    def add(self, answer: bytes, count: int) -> None:
        """Take in the answer to ``count`` digests."""
        self.epoch, self.lease_ms, further_count, _ = m.LOOKUP_HEAD.unpack_from(answer)
        if further_count:
            start = m.LOOKUP_HEAD.size + count * LOCATION.itemsize
            for index, _, place in np.frombuffer(answer, m.EXTRA, further_count, start).tolist():
                self.further.setdefault(len(self.rows) + index, []).append((place[3], place[1]))
        self.rows += np.frombuffer(answer, LOCATION, count, m.LOOKUP_HEAD.size).tolist()


def renewed(answer: bytes, digests: bytes) -> bool:
    """Whether the answer to a TOUCH says that the lease on each of these was renewed: not what is gone, or draining."""
    _, lease_ms, _, count = m.LOOKUP_HEAD.unpack_from(answer)
    return bool(lease_ms and count * DIGEST_BYTES == len(digests))


@dataclass(slots=True, eq=False)
class _Want:
    """One range of one object."""

    index: int  # of its key
    generation: int
    size: int
    chunk: int
    digest: bytes
    start: int
    buffer: memoryview
    places: list[Replica]  # not tried yet
    piece: ReadSlice | None = None  # of this round
    reason: Reason = Reason.STORE_DOWN
    store: str | None = None


class ReadPlan:
    """
    A read of several objects into the caller's memory, round by round.

    ``outcomes`` has one entry a key and is whole once ``next_round`` has nothing more to ask for.
    """

    def __init__(self, located: Located, namespace: bytes, keys: Sequence[str]) -> None:
        self.outcomes = [MISS] * len(keys)
        self._located = located
        self._namespace = namespace
        self._keys = keys
        self._pending: list[_Want] = []
        self._all = self._pending  # every round makes a list of its own
        self._rounds = 0

    def want_whole(self, index: int, view: memoryview) -> None:
        """Read a key's object into the front of ``view``; one that is too small is refused with the size."""
        _, _, size, store, _ = self._located.rows[index]
        if not store:
            return
        if len(view) < size:
            self.outcomes[index] = Outcome(False, Reason.REFUSED, size)
            return
        self._want(index, 0, view[:size])

    def want_range(self, index: int, offset: int, view: memoryview) -> tuple[memoryview, int] | None:
        """
        Read whole chunks around ``[offset, offset + len(view))`` of a key's object.

        Returns:
            Memory that will hold them, ``view`` itself where it begins and ends with chunks, and where in it the
            wanted range begins. None when there is nothing to read; the outcome then says why.
        """
        _, _, size, store, flags = self._located.rows[index]
        if not store:
            return None
        if not 0 <= offset < size or not len(view):
            self.outcomes[index] = Outcome(False, Reason.REFUSED, size)
            return None
        length = min(len(view), size - offset)
        start, end = chunk_span(offset, length, size=size, chunk=chunk_of(flags))
        direct = (start, end) == (offset, offset + length)
        target = view[:length] if direct else memoryview(bytearray(end - start))
        self._want(index, start, target)
        return target, offset - start

    def _want(self, index: int, start: int, buffer: memoryview) -> None:
        generation, offset, size, store, flags = self._located.rows[index]
        places = [(store, offset), *self._located.further.get(index, ())]
        digest = key_digest(self._namespace, self._keys[index])
        self._pending.append(_Want(index, generation, size, chunk_of(flags), digest, start, buffer, places))

    @property
    def pending(self) -> int:
        """Ranges that are still wanted."""
        return len(self._pending)

    def places(self) -> Iterator[tuple[int, Place]]:
        """Where each key's last attempt went, with the key's place in the batch."""
        for want in self._all:
            if want.piece is not None:
                yield (
                    want.index,
                    Place(
                        store=want.store or "",
                        incarnation=want.piece.incarnation,
                        offset=want.piece.offset,
                        size_bytes=want.size,
                        generation=want.generation,
                    ),
                )

    @property
    def retrying(self) -> bool:
        """Whether the next round asks again for what a first one did not get."""
        return self._rounds > 0

    def next_round(self, route: Route) -> dict[int, list[ReadSlice]]:
        """Each range's next usable replica, by store id; empty when nothing can be done any more."""
        self._rounds += 1
        groups: dict[int, list[ReadSlice]] = {}
        asked = []
        for want in self._pending:
            while want.places:
                store_id, offset = want.places.pop(0)
                store = route(store_id)
                if isinstance(store, Reason):
                    want.reason = store
                    continue
                want.store = store.name
                want.piece = ReadSlice(
                    want.index,
                    want.generation,
                    offset,
                    want.size,
                    want.chunk,
                    store.incarnation,
                    want.digest,
                    want.start,
                    want.buffer,
                )
                groups.setdefault(store_id, []).append(want.piece)
                asked.append(want)
                break
            else:
                self.outcomes[want.index] = Outcome(False, want.reason, 0, want.store)
        self._pending = asked
        return groups

    def settle(self) -> None:
        """Read the states of the last round's slices; what failed and has another replica stays pending."""
        again = []
        for want in self._pending:
            assert want.piece is not None
            state = want.piece.state
            if state is SliceState.DONE:
                self.outcomes[want.index] = Outcome(True, Reason.HIT, len(want.buffer), want.store)
                continue
            want.reason = _REASONS[state]
            self.outcomes[want.index] = Outcome(False, want.reason, 0, want.store)
            if want.places:
                again.append(want)
        self._pending = again


@dataclass(slots=True, eq=False)
class _Grant:
    """One object that may be written."""

    index: int
    slices: list[WriteSlice] = field(default_factory=list)
    stores: list[str | None] = field(default_factory=list)
    written: int = 0  # bit i: replica i is whole, as far as this writer can tell

    def settle(self) -> None:
        """All slices have ended."""
        self.written = sum([1 << i for i, s in enumerate(self.slices) if s.state is SliceState.DONE])

    @property
    def stored(self) -> Outcome:
        """What a caller hears of an object of which something was written: the first such store, and how many."""
        first = (self.written & -self.written).bit_length() - 1
        return Outcome(
            True,
            Reason.STORED,
            len(self.slices[0].data),
            self.stores[first],
            replicas=self.written.bit_count(),
        )


class PutPlan:
    """
    A put of several objects, or of one rank's part of a shared one.

    Use it in this order: ``start_body``, ``started``, ``groups``, ``end_body``, then ``ended`` or ``lost``.
    """

    def __init__(
        self,
        namespace: bytes,
        keys: Sequence[str],
        texts: Sequence[bytes],
        views: Sequence[memoryview],
        digests: bytes,
        options: PutOptions,
        depths: Sequence[int] | None,
        *,
        part: tuple[int, int] | None = None,
    ) -> None:
        """
        Args:
            namespace: Of the keys.
            keys: Their texts.
            texts: The same in UTF-8.
            views: What to store.
            digests: Index digests, 16 B a key.
            options: For all of them.
            depths: In their prefix chains.
            part: Offset of the one view in the object, and the object's size.

        Raises:
            UsageError: A depth is no number.
        """
        self.outcomes = [MISS] * len(keys)
        self._namespace, self._keys, self._texts, self._views = namespace, keys, texts, views
        self._digests, self._options, self._part = digests, options, part
        try:
            given = [0] * len(keys) if depths is None else depths
            self._depths = [min(max(depth, 0), DEPTH_MAX) for depth in given]
        except TypeError:
            raise UsageError("a depth that is no number", fix="pass whole numbers, 0 for the first") from None
        self._grants: list[_Grant] = []
        self._ends: list[_Grant] = []

    start_kind = Kind.PUT_START

    def start_body(self) -> bytes:
        """The body of its first request, a ``start_kind``."""
        options = self._options
        rows = np.zeros(len(self._keys), m.PUT_ROW)
        rows["digest"] = np.frombuffer(self._digests, np.uint64).reshape(-1, 2)
        rows["size"] = [self._part[1]] if self._part else [len(view) for view in self._views]
        rows["depth"] = self._depths
        flags = (
            (ObjectFlag.SOFT_PIN if options.soft_pin else 0)
            | (ObjectFlag.HARD_PIN if options.hard_pin else 0)
            | (ObjectFlag.PARTS if self._part else 0)
        )
        return m.PUT_HEAD.pack(options.replicas, flags, options.tenant, 0, options.ttl_ms) + rows.tobytes()

    def started(self, answer: bytes) -> tuple[int, set[int]]:
        """Take in the answer; returns the view's epoch, and the ids of the stores that were granted."""
        count = len(self._keys)
        epoch, replicas = m.PUT_REPLY_HEAD.unpack_from(answer)
        statuses = answer[m.PUT_REPLY_HEAD.size : m.PUT_REPLY_HEAD.size + count]
        start = m.PUT_REPLY_HEAD.size + count + -count % 8
        rows = np.frombuffer(answer, LOCATION, count * replicas, start).tolist()
        for index, status in enumerate(statuses):
            self.outcomes[index] = _PUT_OUTCOMES.get(status, MISS)  # type: ignore[call-overload]
            if status != PutStatus.GRANTED:
                continue
            grant = _Grant(index)
            for row in rows[index * replicas : (index + 1) * replicas]:
                if row[3]:
                    grant.slices.append(self._slice(index, row))
            self._grants.append(grant)
        return epoch, {piece.store for grant in self._grants for piece in grant.slices}

    def _slice(self, index: int, row: tuple[int, int, int, int, int]) -> WriteSlice:
        """What goes to one location."""
        generation, offset, size, store, flags = row
        return WriteSlice(
            store,
            self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES],
            key_digest(self._namespace, self._keys[index]),
            self._texts[index],
            generation,
            offset,
            size,
            chunk_of(flags),
            self._depths[index],
            self._options.tenant,
            flags,
            self._part[0] if self._part else 0,
            self._views[index],
        )

    def groups(self, route: Route) -> dict[int, list[WriteSlice]]:
        """What to write, by store id."""
        groups: dict[int, list[WriteSlice]] = {}
        for grant in self._grants:
            for piece in grant.slices:
                store = route(piece.store)
                if isinstance(store, Reason):
                    piece.state = SliceState.FAILED
                    grant.stores.append(None)
                else:
                    grant.stores.append(store.name)
                    groups.setdefault(piece.store, []).append(piece)
        return groups

    def places(self, route: Route) -> Iterator[tuple[int, Place]]:
        """Where each key was given room, its first replica alone, with the key's place in the batch."""
        for grant in self._grants:
            piece = grant.slices[0]
            store = route(piece.store)
            if not isinstance(store, Reason):
                yield (
                    grant.index,
                    Place(
                        store=store.name,
                        incarnation=store.incarnation,
                        offset=piece.offset,
                        size_bytes=piece.size,
                        generation=piece.generation,
                    ),
                )

    def end_body(self) -> bytes:
        """The PUT_END body, after all slices have ended; empty when the master need not be told."""
        self._ends = []
        for grant in self._grants:
            first = grant.slices[0]
            grant.settle()
            if grant.written and first.flags & ObjectFlag.PARTS and not first.sealed:
                self.outcomes[grant.index] = (
                    grant.stored
                )  # the rank that completes the object tells the master
                continue
            if not grant.written:
                self.outcomes[grant.index] = Outcome(False, _REASONS[first.state], 0, grant.stores[0])
            self._ends.append(grant)
        return b"".join(
            m.END.pack(grant.slices[0].digest, grant.slices[0].generation, grant.written)
            for grant in self._ends
        )

    def ended(self, answer: bytes) -> None:
        """Take in the answer to PUT_END."""
        for grant, status in zip(self._ends, answer, strict=True):
            if grant.written:
                self.outcomes[grant.index] = (
                    grant.stored if status == PutStatus.STORED else Outcome(False, Reason.STALE)
                )

    def lost(self, reason: Reason) -> None:
        """The master did not answer PUT_END: nobody knows whether the objects are readable."""
        for grant in self._ends:
            if grant.written:
                self.outcomes[grant.index] = Outcome(False, reason)
