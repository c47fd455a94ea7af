"""
How good eviction is: token hit ratio of the real master's logic on a trace, beside exact LRU with as much memory.

In this process and in virtual time: the trace's timestamps are the clock, one paper store is mounted, and every
request looks up its blocks and puts what it misses. Only the contiguous prefix counts as hit, but whatever was
found is touched, by both. LRU gets as many blocks as the master held in the middle; leases count only against the
master.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.bench.model import Effort, Params, Result, Tell
from kvops.inference.synth import WORKLOADS, generate
from kvops.inference.trace import Request, read_trace
from kvops.limits import CHUNK_BYTES, PUTS_PER_FRAME_MAX
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.master_core import MasterCore, MasterSettings
from kvops.store.messages import PutStatus
from kvops.store.model import LOCATION, Digests
from kvops.transfer.layout import footprint_bytes

BLOCK_BYTES: Final = 64
STORE_CONN: Final = 1
CLIENT_CONN: Final = 2
WORK_MS_MAX: Final = 200  # of background work between two requests: more would change nothing
OCCUPANCY: Final = 0.94  # between the two watermarks: about so much of the pool is resident


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    resident: tuple[int, ...] = (2_000, 10_000, 20_000)
    requests: int = 4_000

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        return cls(resident=(2_000,), requests=800) if effort.quick else cls()


def run(effort: Effort, tell: Tell, *, trace: Path | None = None) -> None:
    """
    Measure, and tell each figure.

    Args:
        effort: How much.
        tell: Takes the figures.
        trace: In Mooncake's open format; by default a generated one, the same every time.

    Raises:
        ParseError: The trace is none.
    """
    plan = Plan.of(effort)
    if trace is None:
        requests = list(generate(WORKLOADS["synth"], requests=plan.requests, seed=1))
    else:
        requests = list(read_trace(str(trace)))
    name = trace.name if trace is not None else "synth, seed 1"
    for resident in plan.resident:
        ours, held = replay_master(requests, resident)
        exact = replay_lru(requests, held)
        params: Params = {"trace": name, "requests": len(requests), "resident": held}
        tell(Result(name="replay_quality.token_hit_ratio", unit="", params=params, runs=[ours]))
        tell(Result(name="replay_quality.exact_lru", unit="", params=params, runs=[exact]))
        tell(Result(name="replay_quality.difference", unit="", params=params, runs=[ours - exact]))


def replay_lru(requests: Iterable[Request], blocks: int) -> float:
    """Token hit ratio of exact LRU that holds so many blocks."""
    held: OrderedDict[int, None] = OrderedDict()
    hit = asked = 0
    for request in requests:
        asked += request.input_tokens
        present = [block in held for block in request.hash_ids]
        hit += request.tokens_of_prefix(_prefix(present))
        # The end of the chain first: of blocks touched together the deepest are to go first.
        for block in reversed(request.hash_ids):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return hit / asked


def replay_master(requests: Iterable[Request], resident: int) -> tuple[float, int]:
    """Token hit ratio of the master's logic, and how many blocks it held, in the median, once it was full."""
    master = _Master(resident)
    hit = asked = 0
    held = []
    for request in requests:
        asked += request.input_tokens
        hit += request.tokens_of_prefix(master.serve(request))
        if master.core.outbox.counters.evicted:
            held.append(len(master.core.index))
    return hit / asked, int(statistics.median(held)) if held else len(master.core.index)


def _prefix(present: Sequence[bool]) -> int:
    return present.index(False) if False in present else len(present)


class _Master:
    """The master's core with one paper store, whose answers come at once."""

    def __init__(self, resident: int) -> None:
        self.core = MasterCore(
            MasterSettings(group="quality", objects_max=max(4 * resident, 100_000)), term=1, now_ms=0
        )
        self._now_ms = 0
        self._digest_of: dict[int, bytes] = {}
        capacity = round(resident / OCCUPANCY) * footprint_bytes(BLOCK_BYTES, CHUNK_BYTES)
        for conn, role in ((STORE_CONN, "store"), (CLIENT_CONN, "client")):
            hello = Hello(
                role=role,
                group="quality",
                name=role,
                host="host-0",
                numa_node=0,
                pid=1,
                boot_id="",
                nonce=bytes(16),
            )
            self.core.connected(conn, hello)
        mount = m.Mount(
            name="paper",
            host="host-0",
            numa_node=0,
            incarnation=1,
            boot_id="",
            pid=1,
            address="127.0.0.1:1",
            unix_path="",
            http_address="",
            capacity_bytes=capacity,
            populated_bytes=capacity,
            highest_generation=0,
            objects=0,
            transports=["tcp"],
        )
        self._ask(STORE_CONN, Kind.MOUNT, wire.encode(mount))
        self._ask(STORE_CONN, Kind.SLOTS, b"")

    def serve(self, request: Request) -> int:
        """One request; how many blocks of its prefix were there."""
        self._advance(request.timestamp_ms)
        digests = b"".join(map(self._digest, request.hash_ids))
        answer = self._ask(CLIENT_CONN, Kind.LOOKUP, digests)
        count = len(request.hash_ids)
        present = np.frombuffer(answer, LOCATION, count, m.LOOKUP_HEAD.size)["store"] != 0
        if not present.all():
            missing = np.flatnonzero(~present)
            for start in range(0, len(missing), PUTS_PER_FRAME_MAX):
                self._put(
                    np.frombuffer(digests, np.uint64).reshape(-1, 2),
                    missing[start : start + PUTS_PER_FRAME_MAX],
                )
        return _prefix(present.tolist())

    def _put(self, digests: Digests, missing: NDArray[np.int64]) -> None:
        rows = np.zeros(len(missing), m.PUT_ROW)
        rows["digest"], rows["size"], rows["depth"] = digests[missing], BLOCK_BYTES, missing
        answer = self._ask(CLIENT_CONN, Kind.PUT_START, m.PUT_HEAD.pack(1, 0, 0, 0, 0) + rows.tobytes())
        granted = np.frombuffer(answer, np.uint8, len(rows), m.PUT_REPLY_HEAD.size) == PutStatus.GRANTED
        start = m.PUT_REPLY_HEAD.size + len(rows) + -len(rows) % 8
        ends = np.zeros(np.count_nonzero(granted), m.END_ROW)
        ends["digest"] = rows["digest"][granted]
        ends["generation"] = np.frombuffer(answer, LOCATION, len(rows), start)["generation"][granted]
        ends["written"] = 1
        if len(ends):
            self._ask(CLIENT_CONN, Kind.PUT_END, ends.tobytes())

    def _digest(self, block: int) -> bytes:
        digest = self._digest_of.get(block)
        if digest is None:
            digest = self._digest_of[block] = index_digests(NAMESPACE_DEFAULT, [str(block)])
        return digest

    def _advance(self, now_ms: int) -> None:
        """Background work up to a request's time, a millisecond a slice; the node clears what it is told to."""
        while self._now_ms < now_ms:
            self._now_ms = max(self._now_ms + 1, now_ms - WORK_MS_MAX)
            self.core.work(now_ms=self._now_ms)
            self._clear()
            if not self.core.has_work:
                self._now_ms = now_ms
        if self.core.has_work:
            self.core.work(now_ms=now_ms)
            self._clear()

    def _clear(self) -> None:
        self._ask(STORE_CONN, Kind.BEAT, _BEAT)
        for conn, frame in self.core.next_frames():
            if conn == STORE_CONN:
                body = frame[wire.HEADER_BYTES + m.FREE_HEAD.size :]
                self.core.handle(STORE_CONN, wire.reply(Kind.FREE), 1, body, now_ms=self._now_ms)
        self.core.outbox.journal.clear()
        self.core.outbox.events.clear()

    def _ask(self, conn: int, kind: Kind, body: bytes) -> bytes:
        answer = self.core.handle(conn, kind, 1, body, now_ms=self._now_ms)
        assert answer is not None
        return answer


_BEAT: Final = wire.encode(m.Beat(populated_bytes=0, objects=0, used_bytes=0, loop_lag_ms=0))
