"""
What eviction costs a reader: lookups in a closed loop while the pool is quiet, quiet again, written to, and full.

A writer that only announces (``put_start``, ``put_end``, no data) takes its turns between the lookups of the same
thread: with a process of its own it would compete for the cores, and that is not what is asked. The store is on
paper (``paper.py``): it answers the master's FREE frames from a process of its own, as a node does.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvops.bench.model import Effort, Params, Result, Tell, percentile
from kvops.bench.pool import GROUP, BenchPool, ChildFailed, paper_keys, paper_pool, wait_until
from kvops.files import read_secret
from kvops.net.auth import Hello
from kvops.net.link import Address
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.channel import Identity, MasterChannel, Trouble
from kvops.store.client import Pool
from kvops.store.clock import boot_id
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.messages import PutStatus
from kvops.store.model import LOCATION

BATCH: Final = 32
RATE_PER_S: Final = (
    6_000  # objects put, and so evicted; what the reference system reached in its own benchmark
)
BEHIND_MAX: Final = 4  # batches of puts
OBJECT_BYTES: Final = 64
DEADLINE_MS: Final = 5_000
FREE_SHARE: Final = 0.3  # at the start; eviction begins at 0.05
ROUND_S_MAX: Final = 120.0
FILL_MAX: Final = 5_000  # times 20 batches
EVICTED: Final = "kvops_master_evicted_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    objects: int = 1_000_000
    calls: int = 20_000  # in one run

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        return cls(objects=100_000, calls=3_000) if effort.quick else cls()


class PaperWriter:
    """Puts of objects whose bytes nobody ever sends."""

    def __init__(self, pool: BenchPool) -> None:
        secret = read_secret(pool.secret_file)
        hello = Hello(
            role="client",
            group=GROUP,
            name="paper-writer",
            host="host-paper",
            numa_node=0,
            pid=os.getpid(),
            boot_id=boot_id(),
            nonce=os.urandom(16),
        )
        address = Address.parse(pool.master_addresses["unix"])
        self._channel = MasterChannel([address], Identity(hello=hello, secret=secret))
        self._numbers = itertools.count()
        self.stored = 0
        self.refused = 0

    def put(self, count: int) -> None:
        """So many new objects."""
        keys = [f"evict/{next(self._numbers):012d}" for _ in range(count)]
        rows = np.zeros(count, m.PUT_ROW)
        rows["digest"] = np.frombuffer(index_digests(NAMESPACE_DEFAULT, keys), np.uint64).reshape(-1, 2)
        rows["size"] = OBJECT_BYTES
        answer = self._call(Kind.PUT_START, m.PUT_HEAD.pack(1, 0, 0, 0, 0) + rows.tobytes())
        status = np.frombuffer(answer, np.uint8, count, m.PUT_REPLY_HEAD.size)
        start = m.PUT_REPLY_HEAD.size + count + -count % 8
        granted = np.frombuffer(answer, LOCATION, count, start)[status == PutStatus.GRANTED]
        self.refused += count - len(granted)
        if not len(granted):
            return
        ends = np.zeros(len(granted), m.END_ROW)
        ends["digest"] = rows["digest"][status == PutStatus.GRANTED]
        ends["generation"] = granted["generation"]
        ends["written"] = 1
        self.stored += self._call(Kind.PUT_END, ends.tobytes()).count(PutStatus.STORED)

    def _call(self, kind: Kind, body: bytes) -> bytes:
        try:
            return self._channel.call(kind, body, deadline=time.monotonic() + DEADLINE_MS / 1_000)
        except Trouble as trouble:
            raise ChildFailed(
                f"the master did not answer: {trouble.reason}", fix="run it again on a quieter machine"
            ) from trouble

    def close(self) -> None:
        """Hang up."""
        self._channel.close()


class _Loop:
    """Lookups of random keys, one after the other, and puts in between when they are due."""

    def __init__(self, pool: Pool, writer: PaperWriter, objects: int, calls: int) -> None:
        self._pool = pool
        self._writer = writer
        self._calls = calls
        keys = paper_keys("bench", objects)
        drawn = random.Random(1).choices(keys, k=BATCH * min(calls, 20_000))
        self._sets = [drawn[at : at + BATCH] for at in range(0, len(drawn), BATCH)]

    def run(self, *, puts: bool) -> list[float]:
        """Ascending times of the lookups, in seconds."""
        clock = time.perf_counter
        times = []
        began = due = clock()
        for call in range(self._calls):
            keys = self._sets[call % len(self._sets)]
            sent = clock()
            self._pool.locate(keys)
            now = clock()
            times.append(now - sent)
            if puts and now >= due:
                # After a pause little is made up for: a burst would be another load.
                due = max(due + BATCH / RATE_PER_S, now - BEHIND_MAX * BATCH / RATE_PER_S)
                self._writer.put(BATCH)
            if now - began > ROUND_S_MAX:
                raise ChildFailed(f"{call} lookups took {ROUND_S_MAX:g} s", fix="use a quieter machine")
        return sorted(times)


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    with (
        paper_pool(plan.objects, free_share=FREE_SHARE, object_bytes=OBJECT_BYTES) as pool,
        pool.connect(deadline_ms=DEADLINE_MS) as reader,
    ):
        writer = PaperWriter(pool)
        loop = _Loop(reader, writer, plan.objects, plan.calls)
        loop.run(puts=False)  # warm
        _measure(effort, plan, pool, loop, writer, tell)
        writer.close()


def _measure(
    effort: Effort, plan: Plan, pool: BenchPool, loop: _Loop, writer: PaperWriter, tell: Tell
) -> None:
    times: dict[str, list[list[float]]] = {"quiet": [], "quiet again": [], "puts": [], "evicting": []}
    base: list[list[float]] = []
    for _ in range(min(effort.runs, 2)):  # there is room for so many
        base.append(loop.run(puts=False))
        times["puts"].append(loop.run(puts=True))
    assert pool.metric(EVICTED) == 0, "there was room for these puts"
    rates = []
    slice_s = pool.metric("kvops_master_slice_seconds_max")  # so far: the announcement
    for _ in range(effort.runs):
        times["quiet"].append(loop.run(puts=False))
        _fill(pool, writer)
        evicted, began = pool.metric(EVICTED), time.monotonic()
        times["evicting"].append(loop.run(puts=True))
        rates.append((pool.metric(EVICTED) - evicted) / (time.monotonic() - began))
        _rest(pool)
        times["quiet again"].append(loop.run(puts=False))
    params: Params = {"objects": plan.objects, "batch": BATCH, "calls": plan.calls}
    for phase, runs in times.items():
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            micros = [percentile(run, share) * 1e6 for run in runs]
            tell(
                Result(name=f"evict.lookup_{name}", unit="µs", params={**params, "phase": phase}, runs=micros)
            )
    for phase, against in (("quiet again", times["quiet"]), ("evicting", times["quiet"]), ("puts", base)):
        ratios = [
            percentile(run, 0.99) / percentile(quiet, 0.99)
            for run, quiet in zip(times[phase], against, strict=True)
        ]
        tell(Result(name="evict.p99_ratio_to_quiet", unit="", params={**params, "phase": phase}, runs=ratios))
    tell(Result(name="evict.rate", unit="objects/s", params=params, runs=rates))
    tell(Result(name="evict.puts_refused", unit="", params=params, runs=[writer.refused]))
    longest = pool.metric("kvops_master_slice_seconds_max")
    tell(
        Result(
            name="evict.longest_slice_cpu",
            unit="ms",
            params={**params, "before_eviction_ms": round(slice_s * 1e3, 3)},
            runs=[longest * 1e3],
        )
    )


def _fill(pool: BenchPool, writer: PaperWriter) -> None:
    """Put until eviction has begun: from then on it keeps pace with the puts."""
    evicted = pool.metric(EVICTED)
    for _ in range(FILL_MAX):
        for _ in range(20):
            writer.put(BATCH)
        if pool.metric(EVICTED) > evicted:
            return
    raise ChildFailed("the pool does not evict", fix="report it")


def _rest(pool: BenchPool) -> None:
    """Wait until the pool is below its low watermark, and evicts no more."""
    seen = [-1.0]

    def still() -> bool:
        seen.append(pool.metric(EVICTED))
        return seen[-1] == seen[-2]

    wait_until(still, timeout_s=ROUND_S_MAX, what="eviction did not end", pause_s=0.2)
