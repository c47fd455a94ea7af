"""L2: host memory of one inference node, over the pool (L3)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import numpy as np

from kvops.errors import Refused, UsageError
from kvops.inference.pages import Bytes
from kvops.limits import MIB
from kvops.store.model import Outcome, PutOptions, Reason

BATCH_PAGES: Final = 128
"""Pages of one pool call; more are read in several. As SGLang's STORAGE_BATCH_SIZE: a prefix grows by whole
calls."""
BATCH_BYTES_MAX: Final = 64 * MIB  # … and fewer where pages are large: a node holds one batch beside its L2
WAIT_COMPLETE_MS_MAX: Final = 60_000  # even "wait for all of it" ends: no request waits for ever
OVER_DEADLINE_GRACE_MS: Final = 25.0
"""A call counts as over its deadline from here on: a busy machine's scheduler alone delays a process by some
ms."""


class PoolLike(Protocol):
    """The part of a pool that a tier needs; what each call does and promises is the pool's own contract."""

    def allocate(self, size_bytes: int) -> memoryview:
        """Memory to put from at the least cost, all zeros; refused when the machine has none."""

    def prefix_hits(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> int:
        """How many keys from the start are present; 0 without an answer."""

    def batch_exists(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> list[bool]:
        """Which keys are present; neither leases nor touches them."""

    def batch_get_into(
        self, keys: Sequence[str], buffers: Sequence[memoryview], *, deadline_ms: int | None = None
    ) -> list[Outcome]:
        """Read objects into buffers, an outcome a key; after it returned nothing writes into them."""

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffers: Sequence[memoryview],
        *,
        deadline_ms: int | None = None,
        options: PutOptions | None = None,
        depths: Sequence[int] | None = None,
    ) -> list[Outcome]:
        """
        Store objects, an outcome a key; one that exists is a success that stores nothing, and EXISTS without
        ``ok`` means that somebody else is writing it.
        """

    def touch(self, keys: Sequence[str], *, deadline_ms: int | None = None) -> None:
        """These were used elsewhere: keep them as if they had been looked up."""

    def health(self) -> dict[str, Any]:
        """
        What the client knows without asking anybody.

        ``{"master": {"breaker"}, "group": {"breaker"}, "stores": [{"name", "breaker"}]}``, each breaker
        ``closed``, ``open`` or ``half_open``.
        """

    def close(self) -> None:
        """Let go of every connection."""


class PrefetchPolicy(StrEnum):
    """How long a request may wait for pages of the pool; the names are SGLang's."""

    BEST_EFFORT = "best_effort"  # until the GPU is free, not longer
    TIMEOUT = "timeout"  # until a limit that grows with the tokens asked for
    WAIT_COMPLETE = "wait_complete"  # until all of it is there: a hung store then holds the request


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Sizes and limits of a tier."""

    page_bytes: int
    page_tokens: int
    l2_pages: int  # 0: no L2, every hit is read from the pool
    prefetch: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    deadline_ms: int = 200  # of a look-up or a write, and the base of a prefetch
    prefetch_ms_per_ki_token: float = 10.0  # on top of the base, per 1,024 tokens that are read
    prefetch_ms_max: int = 1_000  # SGLang 0.5.23 has no such cap: a long prompt then waits for minutes

    @property
    def batch_pages(self) -> int:
        """Pages of one pool call."""
        return min(BATCH_PAGES, max(1, BATCH_BYTES_MAX // self.page_bytes))

    def prefetch_ms(self, pages: int, *, gpu_free_in_ms: float) -> float:
        """How long reading so many pages may take, from when the request arrived."""
        match self.prefetch:
            case PrefetchPolicy.BEST_EFFORT:
                return max(0.0, gpu_free_in_ms)
            case PrefetchPolicy.TIMEOUT:
                tokens = pages * self.page_tokens
                return min(
                    self.prefetch_ms_max, self.deadline_ms + self.prefetch_ms_per_ki_token * tokens / 1024
                )
            case PrefetchPolicy.WAIT_COMPLETE:
                return WAIT_COMPLETE_MS_MAX


@dataclass(slots=True, kw_only=True)
class Fetched:
    """What a prefetch brought: the first ``l2_pages + l3_pages`` pages of the request are in memory, and
    right.
    """

    l2_pages: int = 0
    l3_pages: int = 0
    lookup_ms: float = 0.0
    read_ms: float = 0.0
    pages_checked: int = 0
    wrong_bytes: int = 0
    over_deadline: int = 0  # pool calls that came back more than the grace after their deadline
    stopped_by: Reason | None = None  # why the page after the last one did not come though the pool has it

    @property
    def pages(self) -> int:
        """Pages from the start that need not be computed."""
        return self.l2_pages + self.l3_pages


@dataclass(slots=True, kw_only=True)
class Written:
    """What a write-back did."""

    stored_pages: int = 0
    failed_pages: dict[str, int] = field(default_factory=dict)  # by reason
    write_ms: float = 0.0
    over_deadline: int = 0


class HostTier:
    """
    The HiCache role: pages in host memory, the least recently used one dropped first, over the pool.

    Memory is one array ``[l2_pages + batch_pages, page_bytes]``; a page that was read or computed stays in
    its row, and the row joins the L2 without a copy. One thread only. Pages of one request age deepest first,
    so a prefix stays usable for as long as any of it is kept; what is deeper than the whole L2 never enters
    it.

    Args:
        pool: The L3.
        config: Sizes and limits.
        wrong_bytes: How many bytes of a page are not its key's: 0 for a right one. Asked about every page on
            each use.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        pool: PoolLike,
        config: TierConfig,
        *,
        wrong_bytes: Callable[[Bytes, str], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if config.l2_pages < 0:
            raise UsageError(
                f"an L2 of {config.l2_pages} pages is not possible", fix="give it 0 pages or more"
            )
        self._pool = pool
        self._config = config
        self._wrong_bytes = wrong_bytes
        self._clock = clock
        self._batch_pages = config.batch_pages
        rows = config.l2_pages + self._batch_pages
        # Memory that starts on a page, as fast copies want it (64 B); numpy's own starts 16 B after one.
        size = rows * config.page_bytes
        try:
            memory = pool.allocate(size)  # what stores of this host copy from
        except (Refused, UsageError) as error:
            raise Refused(
                f"the machine does not give {size} B of host memory: {error.what}",
                fix="choose a smaller L2 (--l2-size)",
            ) from error
        self._rows: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(rows, config.page_bytes)
        self._free = list(range(rows - 1, -1, -1))
        self._l2: OrderedDict[str, int] = OrderedDict()  # key → row, oldest first

    def __len__(self) -> int:
        """Pages in L2."""
        return len(self._l2)

    def prefetch(self, keys: Sequence[str], *, gpu_free_in_ms: float = 0.0) -> Fetched:
        """
        Bring as much of a request's prefix into memory as L2 and the pool give within the policy's time.

        Args:
            keys: One a page, in prefix order.
            gpu_free_in_ms: When the GPU could start, for ``best_effort``.
        """
        fetched = Fetched()
        self._take_from_l2(keys, fetched)
        if fetched.l2_pages == len(keys) or fetched.stopped_by is not None:
            return fetched
        wanted = keys[fetched.l2_pages :]
        budget_ms = self._config.prefetch_ms(len(wanted), gpu_free_in_ms=gpu_free_in_ms)
        if budget_ms < 1.0:
            fetched.stopped_by = Reason.TIMEOUT
            return fetched
        started = self._clock()
        deadline_ms = min(self._config.deadline_ms, int(budget_ms))
        present = self._pool.prefix_hits(wanted, deadline_ms=deadline_ms)
        fetched.lookup_ms = self._since_ms(started)
        fetched.over_deadline += fetched.lookup_ms > deadline_ms + OVER_DEADLINE_GRACE_MS
        for first in range(0, present, self._batch_pages):
            left_ms = int(budget_ms - fetched.lookup_ms - fetched.read_ms)
            if left_ms < 1:
                fetched.stopped_by = Reason.TIMEOUT
            else:
                self._read(wanted[first : min(first + self._batch_pages, present)], left_ms, fetched)
            if fetched.stopped_by is not None:
                break
        return fetched

    def _take_from_l2(self, keys: Sequence[str], fetched: Fetched) -> None:
        for key in keys:
            row = self._l2.get(key)
            if row is None:
                return
            fetched.pages_checked += 1
            wrong = self._wrong_bytes(self._rows[row], key)
            if wrong:
                # Somebody wrote into memory that was ours: the worst a transfer can do. Counted, and dropped.
                fetched.wrong_bytes += wrong
                fetched.stopped_by = Reason.CORRUPT
                self._free.append(self._l2.pop(key))
                return
            self._l2.move_to_end(key)
            fetched.l2_pages += 1

    def _read(self, keys: Sequence[str], deadline_ms: int, fetched: Fetched) -> None:
        rows = [self._free.pop() for _ in keys]
        buffers = [self._rows[row].data for row in rows]
        started = self._clock()
        outcomes = self._pool.batch_get_into(keys, buffers, deadline_ms=deadline_ms)
        took_ms = self._since_ms(started)
        fetched.read_ms += took_ms
        fetched.over_deadline += took_ms > deadline_ms + OVER_DEADLINE_GRACE_MS
        for key, row, outcome in zip(keys, rows, outcomes, strict=True):
            reason = outcome.reason
            if outcome.ok:
                fetched.pages_checked += 1
                wrong = self._wrong_bytes(self._rows[row], key)
                fetched.wrong_bytes += wrong
                reason = Reason.CORRUPT if wrong else Reason.HIT
            if reason is Reason.HIT and fetched.stopped_by is None:
                fetched.l3_pages += 1
                self._admit(key, row, depth=fetched.pages - 1)
                continue
            # Pages behind a gap are of no use to this request, and the GPU is about to make them anew.
            self._free.append(row)
            fetched.stopped_by = fetched.stopped_by or reason

    def _admit(self, key: str, row: int, *, depth: int) -> None:
        if depth >= self._config.l2_pages or key in self._l2:
            self._free.append(row)
            return
        self._l2[key] = row
        while len(self._l2) > self._config.l2_pages:
            self._free.append(self._l2.popitem(last=False)[1])

    def why_absent(self, key: str) -> Reason:
        """
        Ask the pool once more for one page that a look-up did not find, for the reason alone.

        ``HIT`` means that it is there now: another node wrote it in the meantime.
        """
        row = self._free[-1]
        outcome = self._pool.batch_get_into(
            [key], [self._rows[row].data], deadline_ms=self._config.deadline_ms
        )[0]
        return outcome.reason

    def write_back(
        self, keys: Sequence[str], fetched: Fetched, *, compute: Callable[[Bytes, str], None]
    ) -> Written:
        """
        Compute the pages a prefetch did not bring, keep them in L2, and give the pool what it lacks.

        Pages that L2 served are reported to the pool as used, or it would take the hottest ones for cold;
        where it has lost them, with a store for instance, it gets them back.

        Args:
            keys: The request's, as given to ``prefetch``.
            fetched: What that returned.
            compute: Fills a page of its key: the GPU's part.
        """
        written = Written()
        write = True
        if fetched.l2_pages:
            held = keys[: fetched.l2_pages]
            self._pool.touch(held, deadline_ms=self._config.deadline_ms)
            there = self._pool.batch_exists(held, deadline_ms=self._config.deadline_ms)
            lost = [(depth, key) for depth, key in enumerate(held) if not there[depth] and key in self._l2]
            for first in range(0, len(lost), self._batch_pages):
                some = lost[first : first + self._batch_pages]
                rows = [self._l2[key] for _, key in some]
                write = write and self._put(
                    [key for _, key in some], rows, [depth for depth, _ in some], written
                )
        for first in range(fetched.pages, len(keys), self._batch_pages):
            some_keys = keys[first : first + self._batch_pages]
            rows = [self._free.pop() for _ in some_keys]
            for key, row in zip(some_keys, rows, strict=True):
                compute(self._rows[row], key)
            write = write and self._put(some_keys, rows, range(first, first + len(rows)), written)
            for depth, (key, row) in enumerate(zip(some_keys, rows, strict=True), start=first):
                self._admit(key, row, depth=depth)
        for key in reversed(keys):
            if key in self._l2:
                self._l2.move_to_end(key)
        return written

    def _put(self, keys: Sequence[str], rows: Sequence[int], depths: Sequence[int], written: Written) -> bool:
        """Write one batch; False when nothing of it was taken: then the rest of the request is not tried."""
        deadline_ms = self._config.deadline_ms
        buffers = [self._rows[row].data for row in rows]
        started = self._clock()
        outcomes = self._pool.batch_put_from(keys, buffers, deadline_ms=deadline_ms, depths=list(depths))
        took_ms = self._since_ms(started)
        written.write_ms += took_ms
        written.over_deadline += took_ms > deadline_ms + OVER_DEADLINE_GRACE_MS
        taken = False
        for outcome in outcomes:
            if outcome.ok or outcome.reason is Reason.EXISTS:
                taken = True
                written.stored_pages += outcome.reason is Reason.STORED
            else:
                written.failed_pages[outcome.reason] = written.failed_pages.get(outcome.reason, 0) + 1
        return taken

    def _since_ms(self, started: float) -> float:
        return (self._clock() - started) * 1000.0
