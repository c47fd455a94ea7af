"""
The pool as an engine sees it: blocking, thread-safe, and never later than its deadline.

A call runs in the caller's thread: one lookup at the master, then every store's reads side by side. Expected
trouble is an outcome per key. Probes, reports and clean-up run in the pool's caretaker (``caretaker.py``).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from kvops.errors import ClosedPool, Unreachable, UsageError, WireError
from kvops.limits import (
    DEADLINE_MS_MAX,
    DIGEST_BYTES,
    KEYS_PER_BATCH_MAX,
    KEYS_PER_FRAME_MAX,
    LEASE_MARGIN_MS,
    OBJECT_BYTES_MAX,
    PART_CHUNK_BYTES,
    PUTS_PER_FRAME_MAX,
)
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.dial import Target
from kvops.net.link import call
from kvops.net.wire import Kind, decode
from kvops.store import messages as m
from kvops.store.breaker import RetryBudget
from kvops.store.caretaker import Caretaker
from kvops.store.carrier import Carrier
from kvops.store.channel import Identity, MasterChannel, StoreChannel, Trouble
from kvops.store.client_core import MISS, Located, PutPlan, ReadPlan
from kvops.store.keys import index_digests, key_bytes
from kvops.store.known_stores import KnownStores
from kvops.store.messages import RemoveStatus
from kvops.store.model import LOCATION, Locations, ObjectFlag, Outcome, PutOptions, Reason, StoreInfo, View
from kvops.store.trail import Trail
from kvops.transfer import messages as tm
from kvops.transfer.buffers import readable, writable
from kvops.transfer.engine import Lease, Leased
from kvops.transfer.region import Regions

STAT_KEYS: Final = 1_024  # a request
END_RESERVE_S: Final = 0.02  # of a put's time is kept for telling the master
CURSOR_DIGITS_MAX: Final = 15  # of a place in a segment


class Pool:
    """A connected pool; make one with :func:`connect`, share it between threads."""

    def __init__(
        self,
        addresses: Sequence[Target],
        identity: Identity,
        *,
        namespace: bytes,
        deadline_ms: float,
        transports: Sequence[str],
        transports_between_hosts: Sequence[str],
    ) -> None:
        self._identity = identity
        self._namespace = namespace
        self._deadline_ms = deadline_ms
        self._transports, self._between_hosts = tuple(transports), tuple(transports_between_hosts)
        self._addresses = tuple(addresses)
        self._closed = False
        self._regions = Regions()
        self._trail: Trail | None = None
        self._start()
        _POOLS.add(self)

    def _start(self) -> None:
        """Fresh connections and locks: at birth, and in the child of a fork."""
        self._master = MasterChannel(self._addresses, self._identity)
        self._stores = KnownStores(
            self._identity,
            transports=self._transports,
            transports_between_hosts=self._between_hosts,
        )
        self._retries = RetryBudget()
        self._group_open = False
        self._counts: dict[Reason, int] = dict.fromkeys(Reason, 0)
        self._caretaker = Caretaker(self._master, self._stores.now, self.refresh, self._group_changed)
        self._carrier = Carrier(self._stores, self._caretaker, self._regions)
        self._leave_trail()

    def _after_fork(self) -> None:
        """The parent's connections are the parent's: start anew, under the child's own pid."""
        hello = self._identity.hello
        self._identity = Identity(
            hello=Hello(
                **{**{name: getattr(hello, name) for name in hello.__struct_fields__}, "pid": os.getpid()}
            ),
            secret=self._identity.secret,
        )
        self._start()

    # Reading.

    def get(self, key: str, *, deadline_ms: int | None = None) -> bytes | None:
        """The bytes that were put under a key, or None."""
        deadline = self._begin(deadline_ms)
        try:
            located, lease = self._locate(self._digests([key]), deadline)
        except Trouble:
            return None
        buffer = bytearray(located.rows[0][2])
        plan = ReadPlan(located, self._namespace, [key])
        plan.want_whole(0, memoryview(buffer))
        return bytes(buffer) if self._read(plan, lease, deadline)[0].ok else None

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        """
        Read objects into the caller's memory.

        Args:
            keys: At most ``KEYS_PER_BATCH_MAX``.
            buffers: One writable, contiguous buffer a key. One that is too small is REFUSED with the object's
                size; a larger one is filled to that size. Copies are fastest into memory aligned to 64 bytes.
            deadline_ms: From now; the pool's own by default.

        Returns:
            One outcome a key, by the deadline. ``ok`` means that the buffer holds exactly the bytes that were
            put; otherwise its contents are undefined. After the return nothing writes into any buffer.

        Raises:
            UsageError: A buffer cannot be written, or counts differ.
        """
        deadline = self._begin(deadline_ms)
        if len(keys) != len(buffers):
            raise UsageError(f"{len(keys)} keys and {len(buffers)} buffers", fix="give one buffer a key")
        views = [writable(buffer) for buffer in buffers]
        if not keys:
            return []
        try:
            located, lease = self._locate(self._digests(keys), deadline)
        except Trouble as trouble:
            return self._all(len(keys), trouble.reason)
        plan = ReadPlan(located, self._namespace, keys)
        for index, view in enumerate(views):
            plan.want_whole(index, view)
        return self._read(plan, lease, deadline)

    def get_range_into(
        self, key: str, buffer: Any, *, offset: int, deadline_ms: int | None = None
    ) -> Outcome:
        """
        Read ``len(buffer)`` bytes from ``offset`` of an object, verified; fewer where the object ends.

        Returns:
            ``size_bytes`` is the count of bytes read; REFUSED with the object's size when ``offset`` lies
            beyond it.
        """
        deadline = self._begin(deadline_ms)
        view = writable(buffer)
        if offset < 0:
            raise UsageError(f"offset {offset}", fix="count from the object's first byte")
        try:
            located, lease = self._locate(self._digests([key]), deadline)
        except Trouble as trouble:
            return self._all(1, trouble.reason)[0]
        plan = ReadPlan(located, self._namespace, [key])
        target = plan.want_range(0, offset, view)
        outcome = self._read(plan, lease, deadline)[0]
        if not outcome.ok or target is None:
            return outcome
        memory, begin = target
        length = min(len(view), located.rows[0][2] - offset)
        if begin or len(memory) != length:
            view[:length] = memory[begin : begin + length]
        return Outcome(True, Reason.HIT, length, outcome.store)

    def _locate(self, digests: bytes, deadline: float) -> tuple[Located, Lease]:
        """Where keys lie, and how long their memory may be read."""
        if self._group_open:
            raise Trouble(Reason.BREAKER_OPEN)
        located = Located()
        sent = time.monotonic()
        for frame in _frames(digests, KEYS_PER_FRAME_MAX * DIGEST_BYTES):
            located.add(self._ask(Kind.LOOKUP, frame, deadline), len(frame) // DIGEST_BYTES)
            if located.lease_ms == 0:
                self._group_open = True
                self._caretaker.watch_group()
                raise Trouble(Reason.BREAKER_OPEN)
        self._know_stores(located.epoch, {row[3] for row in located.rows}, deadline)

        def renew(by: float) -> float | None:
            again = time.monotonic()
            try:
                for number, frame in enumerate(_frames(digests, KEYS_PER_FRAME_MAX * DIGEST_BYTES)):
                    answer = self._ask(Kind.TOUCH, frame, min(by, deadline))
                    if not located.renewed(number * KEYS_PER_FRAME_MAX, answer):
                        return None
            except Trouble:
                return None
            return again + (located.lease_ms - LEASE_MARGIN_MS) / 1_000

        return located, Lease(sent + (located.lease_ms - LEASE_MARGIN_MS) / 1_000, renew)

    def _read(self, plan: ReadPlan, lease: Lease, deadline: float) -> list[Outcome]:
        """Round by round: a replica that fails is followed by the next one while time and budget last."""
        until = Leased(deadline, lease)
        self._retries.note_request(plan.pending)
        while plan.pending:
            if plan.retrying and (
                until.left(time.monotonic()) <= 0
                or not all(self._retries.take() for _ in range(plan.pending))
            ):
                break
            if self._trail is not None and plan.retrying:
                self._trail.retries += plan.pending
            self._carrier.read(plan.next_round(self._carrier.route), until)
            plan.settle()
        if self._trail is not None:
            self._trail.named(plan.places())
            self._trail.read(lease_end_s=lease.end)
        self._count(plan.outcomes)
        return plan.outcomes

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        """Whether each key is readable now; takes no lease and touches nothing. False without a master."""
        deadline = self._begin(deadline_ms)
        if not keys or self._group_open:
            return [False] * len(keys)
        try:
            answers = [
                self._ask(Kind.EXISTS, frame, deadline)
                for frame in _frames(self._digests(keys), KEYS_PER_FRAME_MAX * DIGEST_BYTES)
            ]
        except Trouble:
            return [False] * len(keys)
        return list(map(bool, b"".join(answers)))

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        """How many keys are readable from the first on without a gap."""
        hits = self.batch_exists(keys, deadline_ms=deadline_ms)
        return hits.index(False) if False in hits else len(hits)

    def locate(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> Locations:
        """
        Where each key lies, with a lease on every hit; store 0 where absent.

        Raises:
            Unreachable: The master did not answer in time.
        """
        deadline = self._begin(deadline_ms)
        parts = []
        for frame in _frames(self._digests(keys), KEYS_PER_FRAME_MAX * DIGEST_BYTES):
            answer = self._ask_or_raise(Kind.LOOKUP, frame, deadline)
            parts.append(np.frombuffer(answer, LOCATION, len(frame) // DIGEST_BYTES, m.LOOKUP_HEAD.size))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """Say that keys were used although the pool was not asked: hits in the engine's own memory."""
        deadline = self._begin(deadline_ms)
        if not keys or self._group_open:
            return
        try:
            for frame in _frames(self._digests(keys), KEYS_PER_FRAME_MAX * DIGEST_BYTES):
                self._ask(Kind.TOUCH, frame, deadline)
        except Trouble:
            return  # recency is a hint

    # Writing.

    def put(
        self, key: str, data: Any, *, options: PutOptions | None = None, deadline_ms: int | None = None
    ) -> Outcome:
        """Store one object; an existing readable key is a success that stores nothing."""
        return self.batch_put_from([key], [data], options=options, deadline_ms=deadline_ms)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """
        Store objects from the caller's memory.

        Args:
            keys: Texts of 1 to ``KEY_BYTES_MAX`` bytes.
            buffers: One contiguous buffer a key, not empty.
            deadline_ms: From now; the pool's own by default.
            options: For all of them.
            depths: Each object's place in its prefix chain, from 0; deeper ones are evicted first among equals.

        Returns:
            STORED when the object is readable, EXISTS with ``ok`` when it already was, EXISTS without when
            somebody else is writing it; otherwise why not.
        """
        deadline = self._begin(deadline_ms)
        options = options or PutOptions()
        if not len(keys) == len(buffers) == len(depths if depths is not None else keys):
            raise UsageError("keys, buffers and depths differ in number", fix="give one of each a key")
        texts = [key_bytes(key) for key in keys]
        views = [readable(buffer) for buffer in buffers]
        outcomes: list[Outcome] = []
        for at in range(0, len(keys), PUTS_PER_FRAME_MAX):
            part = slice(at, at + PUTS_PER_FRAME_MAX)
            some = depths[part] if depths is not None else None
            outcomes += self._put(keys[part], texts[part], views[part], deadline, options, some)
        return outcomes

    def allocate(self, size_bytes: int) -> memoryview:
        """
        Memory from which stores on this host copy by themselves: a put from it sends no payload.

        Reads into it are as fast as into any other. It is all zeros, takes pages when it is touched, and belongs to
        this pool until ``close``: then it can be used on, and written from by the socket. A child of a fork shares
        it with its parent: what one writes there, both have.

        Args:
            size_bytes: 1 to ``REGION_BYTES_MAX``; a few large regions, not one an object. A store copies from the
                first ``REGIONS_MAX`` that were put from, and gets what lies in others by the socket.

        Raises:
            UsageError: No such size.
            Refused: The kernel gives none.
        """
        self._begin(None)
        return self._regions.allocate(size_bytes)

    def put_part(
        self,
        key: str,
        buffer: Any,
        *,
        offset: int,
        total_size: int,
        options: PutOptions | None = None,
        depth: int = 0,
        deadline_ms: int | None = None,
    ) -> Outcome:
        """
        Write one rank's range of an object that several ranks share; it is readable once every byte is there.

        Args:
            key: The same for all ranks.
            buffer: This rank's bytes.
            offset: Of the range, a multiple of ``PART_CHUNK_BYTES`` as is its length, unless it ends the object.
            total_size: Of the whole object, the same for all ranks.
            options: The same for all ranks; one replica.
            depth: As for ``batch_put_from``.
            deadline_ms: From now.

        Returns:
            STORED: this range is in place, and if it was the last one the object is readable.
        """
        deadline = self._begin(deadline_ms)
        view = readable(buffer)
        end = offset + len(view)
        aligned = offset % PART_CHUNK_BYTES == 0 and (end % PART_CHUNK_BYTES == 0 or end == total_size)
        if not (aligned and 0 <= offset < end <= total_size <= OBJECT_BYTES_MAX):
            raise UsageError(
                f"a part of {len(view)} B at {offset} of {total_size} B",
                fix=f"parts begin and end at multiples of {PART_CHUNK_BYTES} B, inside the object",
            )
        options = options or PutOptions()
        if options.replicas != 1:
            raise UsageError("an object written in parts has one replica", fix="leave replicas at 1")
        return self._put(
            [key], [key_bytes(key)], [view], deadline, options, [depth], part=(offset, total_size)
        )[0]

    def _put(
        self,
        keys: Sequence[str],
        texts: list[bytes],
        views: list[memoryview],
        deadline: float,
        options: PutOptions,
        depths: Sequence[int] | None,
        part: tuple[int, int] | None = None,
    ) -> list[Outcome]:
        if self._group_open:
            return self._all(len(keys), Reason.BREAKER_OPEN)
        return self._carry_out(
            PutPlan(self._namespace, keys, texts, views, self._digests(keys), options, depths, part=part),
            deadline,
        )

    def carry_out(self, plan: PutPlan, *, deadline_ms: int) -> list[Outcome]:
        """A put of which the caller has made the plan: for a store that moves what it holds."""
        return self._carry_out(plan, self._begin(deadline_ms))

    def _carry_out(self, plan: PutPlan, deadline: float) -> list[Outcome]:
        try:
            epoch, store_ids = plan.started(self._ask(plan.start_kind, plan.start_body(), deadline))
            self._know_stores(epoch, store_ids, deadline)
        except Trouble as trouble:
            return self._all(len(plan.outcomes), trouble.reason)
        if self._trail is not None:
            self._trail.named(plan.places(self._carrier.route))
        self._carrier.write(plan.groups(self._carrier.route), deadline - END_RESERVE_S)
        rows = plan.end_body()
        if rows:
            try:
                plan.ended(self._ask(Kind.PUT_END, rows, deadline))
            except Trouble as trouble:
                plan.lost(trouble.reason)
                self._caretaker.revoke(rows)
        self._count(plan.outcomes)
        return plan.outcomes

    def remove(self, key: str, *, deadline_ms: int | None = None) -> Outcome:
        """
        Remove an object: hidden at once, gone from its store's memory when this returns ``ok``.

        Returns:
            HIT when it was removed, MISS when there was none, TIMEOUT when its store has not confirmed yet.
        """
        deadline = self._begin(deadline_ms)
        try:
            answer = self._ask(Kind.REMOVE, self._digests([key]), deadline)
        except Trouble as trouble:
            return self._all(1, trouble.reason)[0]
        status = RemoveStatus(answer[0])
        if status is RemoveStatus.HIDDEN:
            return Outcome(False, Reason.TIMEOUT)
        return Outcome(True, Reason.HIT) if status is RemoveStatus.REMOVED else MISS

    # Looking.

    def stat(self, key: str, *, deadline_ms: int | None = None) -> dict[str, Any] | None:
        """
        What the master knows of a key; takes no lease. None when it is not readable.

        Raises:
            Unreachable: The master did not answer in time.
        """
        deadline = self._begin(deadline_ms)
        answer = self._ask_or_raise(Kind.STAT, self._digests([key]), deadline)
        row = np.frombuffer(answer, m.STAT_ROW)[0]
        generation, offset, size, store, flags = row["location"].tolist()
        if not store:
            return None
        if self._stores.get(store) is None:
            self.refresh(deadline)
        channel = self._stores.get(store)
        return {
            "key": key,
            "size_bytes": size,
            "store": channel.info.name if channel else f"#{store}",
            "host": channel.info.host if channel else "",
            "offset": offset,
            "generation": generation,
            "replicas": int(row["replicas"]),
            "age_ms": int(row["age_ms"]),
            "depth": int(row["depth"]),
            "tenant": int(row["tenant"]),
            "ttl_left_ms": int(row["ttl_left_ms"]) if flags & ObjectFlag.HAS_TTL else None,
            "soft_pin": bool(flags & ObjectFlag.SOFT_PIN),
            "hard_pin": bool(flags & ObjectFlag.HARD_PIN),
            "parts": bool(flags & ObjectFlag.PARTS),
        }

    def stat_rows(self, digests: bytes, *, deadline_ms: int | None = None) -> NDArray[np.void]:
        """
        STAT_ROW of index digests, 16 B each end to end; takes no lease.

        Raises:
            Unreachable: The master did not answer in time.
        """
        deadline = self._begin(deadline_ms)
        parts = [
            np.frombuffer(self._ask_or_raise(Kind.STAT, frame, deadline), m.STAT_ROW)
            for frame in _frames(digests, STAT_KEYS * DIGEST_BYTES)
        ]
        return np.concatenate([np.empty(0, m.STAT_ROW), *parts])

    def ls(
        self,
        *,
        prefix: str = "",
        store: str | None = None,
        limit: int = 1_000,
        cursor: str = "",
        deadline_ms: int | None = None,
    ) -> tuple[list[dict[str, Any]], str | None]:
        """
        Keys as the stores hold them, store by store, in the order in which they lie; takes no lease.

        Args:
            prefix: Of the keys.
            store: Of one store only.
            limit: Rows of one page, at most.
            cursor: "" to begin; then what the last page said.
            deadline_ms: From now; the pool's own by default.

        Returns:
            Rows {key, size_bytes, store, depth, generation}, and the cursor of the next page.

        Raises:
            Unreachable: The master or a store did not answer in time.
            UsageError: No store of that name, or not a cursor, or not a prefix of any key.
        """
        deadline = self._begin(deadline_ms)
        first, at = _place_of(cursor)
        if limit < 1:
            raise UsageError(f"a page of {limit} keys", fix="ask for one at least")
        if prefix:
            key_bytes(prefix)
        self.refresh(deadline, must=True)
        channels = sorted(self._stores.now(), key=lambda channel: channel.info.name)
        if store is not None:
            names = ", ".join(channel.info.name for channel in channels) or "none"
            channels = [channel for channel in channels if channel.info.name == store]
            if not channels:
                raise UsageError(f"no store {store!r}; there are: {names}", fix="kvops status")
        rows: list[dict[str, Any]] = []
        for channel in channels:
            name = channel.info.name
            if name < first:
                continue
            at = at if name == first else 0
            while at >= 0:
                if len(rows) >= limit:
                    return rows, f"{name}@{at}"
                query = tm.ListQuery(
                    prefix=prefix, limit=min(limit - len(rows), KEYS_PER_BATCH_MAX), cursor=at
                )
                page = decode(self._ask_store(channel, Kind.LIST, wire.encode(query), deadline), tm.ListReply)
                at = page.cursor
                rows += [
                    {
                        "key": row.key,
                        "size_bytes": row.size_bytes,
                        "store": name,
                        "depth": row.depth,
                        "generation": row.generation,
                    }
                    for row in page.rows
                ]
        return rows, None

    def _ask_store(self, channel: StoreChannel, kind: Kind, body: bytes, deadline: float) -> bytes:
        link = channel.link()
        try:
            answer = call(link, kind, body, request=1, deadline=deadline)
        except BaseException:
            link.close()  # interrupted between request and answer: the next call must not read that answer
            raise
        channel.put_back(link)
        return answer

    def stores(self, *, deadline_ms: int | None = None) -> list[StoreInfo]:
        """
        The pool's stores as the master sees them now.

        Raises:
            Unreachable: The master did not answer in time.
        """
        self.refresh(self._begin(deadline_ms), must=True)
        return [channel.info for channel in self._stores.now()]

    def health(self) -> dict[str, Any]:
        """What this client knows, without asking anybody: breakers, stores, what became of its keys."""
        return {
            "master": {
                "breaker": self._master.breaker.state.value,
                "addresses": [str(address) for address in self._addresses],
                "last_error": self._master.last_error,
            },
            "group": {"breaker": "open" if self._group_open else "closed"},
            "stores": [
                {
                    "name": channel.info.name,
                    "host": channel.info.host,
                    "breaker": channel.breaker.state.value,
                    "transport": "shm" if channel.same_memory else "tcp",
                    "mapped": channel.mapping is not None,
                }
                for channel in self._stores.now()
            ],
            "outcomes": {reason.value: count for reason, count in self._counts.items() if count},
        }

    def follow(self, trail: Trail | None) -> None:
        """Leave a trail of every call from now on, for whoever checks what the pool promises; None ends it."""
        self._trail = trail
        self._leave_trail()

    def _leave_trail(self) -> None:
        self._master.trail = self._carrier.trail = self._trail

    def _group_changed(self, is_open: bool) -> None:
        """The caretaker has asked how the group's breaker is."""
        self._group_open = is_open

    def _know_stores(self, epoch: int, store_ids: set[int], deadline: float) -> None:
        """
        See to it that we know the stores an answer names.

        Raises:
            Trouble: Another master gave the answer, and its view could not be had: its ids mean nothing to us.
        """
        if not self._stores.are_of(self._master.incarnation):
            if not self.refresh(deadline):
                raise Trouble(Reason.TIMEOUT)
        elif not self._stores.know(store_ids, epoch=epoch):
            self.refresh(deadline)

    def refresh(self, deadline: float, *, must: bool = False) -> bool:
        """
        Ask the master for its stores; without an answer the known ones stay.

        Returns:
            Whether it answered.

        Raises:
            Unreachable: ``must`` is set and the master did not answer.
        """
        incarnation = self._master.incarnation  # if it changes meanwhile, the next answer makes us ask again
        try:
            view = decode(self._ask(Kind.VIEW, b"", deadline), View)
        except Trouble as trouble:
            if must:
                raise Unreachable(
                    f"the master at {self._addresses[0]} did not answer: {trouble.reason}",
                    fix="kvops status shows what runs; kvops start starts it",
                ) from trouble
            return False
        except WireError as error:
            if must:
                raise Unreachable(
                    f"the master at {self._addresses[0]} speaks another language: {error.what}",
                    fix="upgrade one side: neighbouring versions work together",
                ) from error
            return False
        self._stores.take(view, incarnation=incarnation)
        return True

    # Plumbing.

    def _begin(self, deadline_ms: int | None) -> float:
        if self._closed:
            raise ClosedPool("the pool is closed", fix="connect again")
        if self._trail is not None:
            self._trail.begin()
        ms: float = self._deadline_ms if deadline_ms is None else deadline_ms
        if not 0 <= ms <= DEADLINE_MS_MAX:
            ms = bounded_ms(ms)
        return time.monotonic() + ms / 1_000

    def _digests(self, keys: Sequence[str]) -> bytes:
        if len(keys) > KEYS_PER_BATCH_MAX:
            raise UsageError(f"a batch of {len(keys)} keys", fix=f"at most {KEYS_PER_BATCH_MAX} in one call")
        return index_digests(self._namespace, keys)

    def _ask(self, kind: Kind, body: bytes, deadline: float) -> bytes:
        try:
            return self._master.call(kind, body, deadline=deadline)
        except Trouble:
            if self._master.open:
                self._caretaker.wake()
            raise

    def _ask_or_raise(self, kind: Kind, body: bytes, deadline: float) -> bytes:
        try:
            return self._ask(kind, body, deadline)
        except Trouble as trouble:
            raise Unreachable(
                f"the master at {self._addresses[0]} did not answer: {trouble.reason}",
                fix="kvops status shows what runs; kvops start starts it",
            ) from trouble

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._counts[outcome.reason] += 1

    def _all(self, count: int, reason: Reason) -> list[Outcome]:
        self._counts[reason] += count
        return [Outcome(False, reason)] * count

    def close(self) -> None:
        """Hang up, unmap, stop the caretaker; idempotent, at once with or without a master."""
        if self._closed:
            return
        self._closed = True
        self._caretaker.close()
        self._master.close()
        self._stores.close()
        self._regions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _reconnect_in_child() -> None:
    for pool in list(_POOLS):
        pool._after_fork()


os.register_at_fork(after_in_child=_reconnect_in_child)


def bounded_ms(deadline_ms: float) -> float:
    """A deadline that poll(2) can wait for: none that is over already is further in the past than others."""
    if deadline_ms != deadline_ms:
        raise UsageError("a deadline that is no number", fix="pass milliseconds")
    return min(max(deadline_ms, 0), DEADLINE_MS_MAX)


def _place_of(cursor: str) -> tuple[str, int]:
    """Where a page of ``ls`` begins: the store's name, and the place in it."""
    name, _, place = cursor.rpartition("@")
    digits = place.isascii() and place.isdigit() and len(place) <= CURSOR_DIGITS_MAX
    if cursor and not (name and digits):
        raise UsageError(f"{cursor!r} is no cursor", fix="pass the one that the last page gave")
    return name, int(place or 0)


def _frames(data: bytes, size: int) -> list[bytes]:
    return [data] if len(data) <= size else [data[at : at + size] for at in range(0, len(data), size)]
