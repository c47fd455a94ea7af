"""Reads: from a store's mapped memory and by tcp, whole and verified, beside what the machine can do by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvops.bench import raw
from kvops.bench.model import Effort, Params, Result, Tell
from kvops.bench.pool import BenchPool, pool_of
from kvops.limits import KIB, MIB
from kvops.store.client import Pool
from kvops.store.model import Outcome

DEADLINE_MS: Final = 20_000
TRANSPORTS: Final = ("shm", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...] = (64 * KIB, MIB, 4 * MIB)
    batches: tuple[int, ...] = (1, 16, 64)
    held_bytes: int = 512 * MIB  # of objects: far more than a cache
    moved_bytes: int = 256 * MIB  # in one run

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        if effort.quick:
            return cls(sizes=(MIB,), batches=(16,), held_bytes=128 * MIB, moved_bytes=64 * MIB)
        return cls()


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    for size in plan.sizes:
        with pool_of(1, segment_size_bytes=plan.held_bytes * 5 // 4) as pool:
            _measure(plan, effort.runs, size, pool, tell)


def _measure(plan: Plan, runs: int, size: int, pool: BenchPool, tell: Tell) -> None:
    keys = [f"read/{number}" for number in range(plan.held_bytes // size)]
    with pool.connect(deadline_ms=DEADLINE_MS) as writer:
        fill(writer, keys, size)
    peer = raw.RawPeer(pool, memory_bytes=plan.held_bytes)
    cold = raw.ColdMemory(plan.held_bytes)
    for transport in TRANSPORTS:
        with pool.connect(deadline_ms=DEADLINE_MS, transports=[transport, "tcp"]) as reader:
            for batch in plan.batches:
                case = _Case(reader, keys, raw.buffers(batch, size))
                bare = partial(raw.copy, cold) if transport == "shm" else partial(peer.read, "tcp")
                calls = max(1, plan.moved_bytes // (batch * size))
                control = partial(bare, case.targets)
                tell_ratio("read", transport, size, batch, calls, runs, case.read, control, tell)
    peer.close()


class _Case:
    """Batches of one size, one after the other through all keys."""

    def __init__(self, reader: Pool, keys: Sequence[str], targets: list[memoryview]) -> None:
        self.targets = targets
        self._reader = reader
        self._keys = keys
        self._at = 0

    def read(self) -> None:
        """The next batch."""
        batch = len(self.targets)
        self._at = self._at + batch if self._at + 2 * batch <= len(self._keys) else 0
        must_be_ok(self._reader.batch_get_into(self._keys[self._at : self._at + batch], self.targets))


def fill(pool: Pool, keys: Sequence[str], size: int) -> None:
    """Put objects of one size."""
    sources = raw.buffers(min(len(keys), 64 * MIB // size), size)
    for at in range(0, len(keys), len(sources)):
        some = keys[at : at + len(sources)]
        must_be_ok(pool.batch_put_from(some, sources[: len(some)]))


def must_be_ok(outcomes: Sequence[Outcome]) -> None:
    """A benchmark that reads or writes half of its objects measures nothing."""
    failed = [outcome for outcome in outcomes if not outcome.ok]
    assert not failed, f"{len(failed)} of {len(outcomes)} keys: {failed[0]}"


def tell_ratio(
    name: str,
    transport: str,
    size: int,
    batch: int,
    calls: int,
    runs: int,
    ours: Callable[[], None],
    control: Callable[[], None],
    tell: Tell,
    after: Callable[[], None] = lambda: None,
) -> None:
    """
    Ours between two of the machine's own, in every run; tells both and their ratios.

    ``ratio`` goes by the clock on the wall. ``cpu_ratio`` goes by this thread's CPU time, which other processes
    disturb less; it says something only where nobody else has a part in the work (shm).
    """
    bytes_a_run = calls * batch * size

    def timed(work: Callable[[], None]) -> tuple[float, float]:
        """GB/s, and ms of CPU a call."""
        began, began_cpu = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            work()
        return raw.rate_gb_per_s(bytes_a_run, began), (time.thread_time() - began_cpu) / calls * 1e3

    ours()
    control()  # connections, mappings, warm buffers
    rates, controls, ratios, cpu_ms, cpu_ratios = [], [], [], [], []
    for _ in range(runs):
        first, first_ms = timed(control)
        rate, ms = timed(ours)
        after()
        last, last_ms = timed(control)
        rates.append(rate)
        controls.append((first + last) / 2)
        ratios.append(rate / controls[-1])
        cpu_ms.append(ms)
        cpu_ratios.append((first_ms + last_ms) / 2 / ms)
    params: Params = {"transport": transport, "object_bytes": size, "batch": batch}
    tell(Result(name=f"{name}.rate", unit="GB/s", params=params, runs=rates))
    tell(Result(name=f"{name}.machine", unit="GB/s", params=params, runs=controls))
    tell(Result(name=f"{name}.ratio", unit="", params=params, runs=ratios))
    tell(Result(name=f"{name}.cpu_ratio", unit="", params=params, runs=cpu_ratios))
    tell(Result(name=f"{name}.cpu_client", unit="ms/call", params=params, runs=cpu_ms))
