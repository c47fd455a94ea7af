"""
A store that is stopped (SIGSTOP: sockets open, no answer), and a stopped master: what callers notice of it.

Beside every wait for a deadline stands a bare wait of the same thread: how late the machine itself wakes a process.
"""

from __future__ import annotations

import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvops.bench import raw
from kvops.bench.model import Effort, Params, Result, Tell, percentile
from kvops.bench.pool import BenchPool, Child, pool_of, wait_until
from kvops.bench.read import must_be_ok
from kvops.limits import KIB, MIB
from kvops.store.client import Pool
from kvops.store.model import Outcome, Reason

STORES: Final = 3
STOPPED: Final = "store-1"
KEYS: Final = 64
OBJECT_BYTES: Final = 64 * KIB
DEADLINE_MS: Final = 200
PATIENT_MS: Final = 10_000  # for what must succeed
BARE_WAIT_MS: Final = 50
RECOVER_TIMEOUT_S: Final = 30.0
SEQUENCE: Final = 12  # batches in a row with one client


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    repeats: int = 100
    sequences: int = 3
    open_s: float = 1.5  # how long the master stays stopped: probes come and fail meanwhile

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        return cls(repeats=3, sequences=1, open_s=0.7) if effort.quick else cls()


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    with pool_of(STORES, segment_size_bytes=64 * MIB) as pool:
        keys = _spread(pool)
        _stopped_store(plan, pool, keys, tell)
        _sequence(plan, pool, keys, tell)
        _mapped(plan, pool, keys, tell)
        _stopped_master(plan, pool, keys, tell)


def _spread(pool: BenchPool) -> list[str]:
    """Keys on all stores alike: each put by a writer on its store's host."""
    keys = [f"hung/{number}" for number in range(KEYS)]
    source = raw.buffers(1, OBJECT_BYTES)
    for store in range(STORES):
        mine = keys[store::STORES]
        with pool.connect(host=f"host-{store}", deadline_ms=PATIENT_MS) as writer:
            must_be_ok(writer.batch_put_from(mine, source * len(mine)))
    return keys


@contextmanager
def _stopped(child: Child) -> Iterator[None]:
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def _bare_wait() -> float:
    """By how many milliseconds a wait without anything to wait for ends late."""
    began = time.perf_counter()
    select.poll().poll(BARE_WAIT_MS)
    return (time.perf_counter() - began) * 1e3 - BARE_WAIT_MS


def _read(reader: Pool, keys: list[str], targets: list[memoryview]) -> tuple[float, list[Outcome]]:
    """Milliseconds and outcomes of one batch."""
    began = time.perf_counter()
    outcomes = reader.batch_get_into(keys, targets, deadline_ms=DEADLINE_MS)
    return (time.perf_counter() - began) * 1e3, outcomes


def _warm(pool: BenchPool, keys: list[str], targets: list[memoryview], **more: object) -> Pool:
    """A client with a connection to every store, whose breakers are closed."""
    reader = pool.connect(deadline_ms=PATIENT_MS, **more)

    def all_there() -> bool:
        return all(outcome.ok for outcome in reader.batch_get_into(keys, targets))

    wait_until(all_there, timeout_s=RECOVER_TIMEOUT_S, what="the stores did not come back")
    return reader


def _lost(keys: list[str], outcomes: list[Outcome]) -> int:
    """Keys of the other stores that were not read: there must be none."""
    stopped = set(range(1, len(keys), STORES))
    return sum(not outcome.ok for index, outcome in enumerate(outcomes) if index not in stopped)


def _stopped_store(plan: Plan, pool: BenchPool, keys: list[str], tell: Tell) -> None:
    """A new client each time, so with closed breakers: the batch in which the store stops answering."""
    targets = raw.buffers(KEYS, OBJECT_BYTES)
    times, bare, lost = [], [], 0
    for _ in range(plan.repeats):
        with _warm(pool, keys, targets, transports=["tcp"]) as reader:
            with _stopped(pool.children[STOPPED]):
                ms, outcomes = _read(reader, keys, targets)
            times.append(ms)
            lost += _lost(keys, outcomes)
        bare.append(_bare_wait())
    params: Params = {
        "transport": "tcp",
        "keys": KEYS,
        "deadline_ms": DEADLINE_MS,
        "repeats": plan.repeats,
    }
    times.sort()
    bare.sort()
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        tell(
            Result(name=f"hung.store_batch_{name}", unit="ms", params=params, runs=[percentile(times, share)])
        )
    tell(Result(name="hung.bare_wait_late_p99", unit="ms", params=params, runs=[percentile(bare, 0.99)]))
    tell(Result(name="hung.other_stores_keys_lost", unit="", params=params, runs=[lost]))


def _sequence(plan: Plan, pool: BenchPool, keys: list[str], tell: Tell) -> None:
    """One client, batch after batch: what the stopped store costs once the breaker knows it."""
    targets = raw.buffers(KEYS, OBJECT_BYTES)
    others = [key for index, key in enumerate(keys) if index % STORES != 1]
    rows: list[list[float]] = []
    healthy: list[float] = []
    lost = 0
    reasons: Counter[str] = Counter()
    for _ in range(plan.sequences):
        with _warm(pool, keys, targets, transports=["tcp"]) as reader:
            healthy += [_read(reader, others, targets[: len(others)])[0] for _ in range(SEQUENCE)]
            with _stopped(pool.children[STOPPED]):
                row = []
                for _ in range(SEQUENCE):
                    ms, outcomes = _read(reader, keys, targets)
                    row.append(ms)
                    lost += _lost(keys, outcomes)
                    reasons.update(outcome.reason.value for outcome in outcomes if not outcome.ok)
            rows.append(row)
    params: Params = {"transport": "tcp", "keys": KEYS, "deadline_ms": DEADLINE_MS}
    tell(Result(name="hung.two_healthy_stores_alone", unit="ms", params=params, runs=healthy))
    for number in (1, 2, 3):
        runs = [row[number - 1] for row in rows]
        tell(Result(name="hung.sequence", unit="ms", params={**params, "batch_number": number}, runs=runs))
    rest = [ms for row in rows for ms in row[2:]]
    seen = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    late: Params = {**params, "batch_number": f"3 to {SEQUENCE}", "misses": seen}
    tell(Result(name="hung.sequence", unit="ms", params=late, runs=rest))
    tell(Result(name="hung.sequence_keys_lost", unit="", params=params, runs=[lost]))


def _mapped(plan: Plan, pool: BenchPool, keys: list[str], tell: Tell) -> None:
    """By shm a stopped store's memory can still be read: nobody has to answer."""
    targets = raw.buffers(KEYS, OBJECT_BYTES)
    times, hits = [], []
    with _warm(pool, keys, targets) as reader:
        running = [_read(reader, keys, targets)[0] for _ in range(plan.sequences * 5)]
        with _stopped(pool.children[STOPPED]):
            for _ in range(plan.sequences * 5):
                ms, outcomes = _read(reader, keys, targets)
                times.append(ms)
                hits.append(sum(outcome.ok for outcome in outcomes))
    params: Params = {"transport": "shm", "keys": KEYS, "deadline_ms": DEADLINE_MS}
    tell(Result(name="hung.mapped_store_running", unit="ms", params=params, runs=running))
    tell(Result(name="hung.mapped_store_stopped", unit="ms", params=params, runs=times))
    tell(Result(name="hung.mapped_store_stopped_hits", unit="keys", params=params, runs=hits))


def _stopped_master(plan: Plan, pool: BenchPool, keys: list[str], tell: Tell) -> None:
    """Lookups at their deadline first, then at once, until the probe finds the master again."""
    first, later, recovered = [], [], []
    for _ in range(plan.sequences):
        with pool.connect(deadline_ms=PATIENT_MS) as reader:
            assert all(reader.batch_exists(keys))
            with _stopped(pool.master):
                row: list[float] = []
                while reader.health()["master"]["breaker"] == "closed" and len(row) < SEQUENCE:
                    began = time.perf_counter()
                    reader.batch_exists(keys, deadline_ms=DEADLINE_MS)
                    row.append((time.perf_counter() - began) * 1e3)
                first += row
                began = time.perf_counter()
                while time.perf_counter() - began < plan.open_s:
                    asked = time.perf_counter()
                    outcome = reader.batch_get_into(
                        keys[:1], raw.buffers(1, OBJECT_BYTES), deadline_ms=DEADLINE_MS
                    )[0]
                    later.append((time.perf_counter() - asked) * 1e3)
                    assert outcome.reason is not Reason.HIT
            began = time.perf_counter()
            wait_until(
                lambda: all(reader.batch_exists(keys, deadline_ms=DEADLINE_MS)),
                timeout_s=RECOVER_TIMEOUT_S,
                what="the client did not find the master again",
            )
            recovered.append((time.perf_counter() - began) * 1e3)
    later.sort()
    params: Params = {"deadline_ms": DEADLINE_MS}
    tell(Result(name="hung.master_until_breaker_opens", unit="ms", params=params, runs=first))
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        runs = [percentile(later, share)]
        tell(Result(name=f"hung.master_breaker_open_{name}", unit="ms", params=params, runs=runs))
    tell(Result(name="hung.master_found_again", unit="ms", params=params, runs=recovered))
