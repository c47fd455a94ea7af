"""Memory the master takes for each object, and the longest pause while it grows, both as the system sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvops.bench.model import Effort, Params, Result, Tell
from kvops.bench.pool import BenchPool, wait_until
from kvops.limits import CHUNK_BYTES
from kvops.transfer.layout import footprint_bytes

OBJECT_BYTES: Final = 64
SETTLE_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    objects: tuple[int, ...] = (1_000_000, 5_000_000)
    runs: int = 2  # each takes a new master: memory does not come back to where it was

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        return cls(objects=(200_000,), runs=1) if effort.quick else cls(runs=min(effort.runs, 2))


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    for objects in plan.objects:
        each, requests, slices = [], [], []
        for _ in range(plan.runs):
            with BenchPool() as pool:
                pool.start_master()
                before = _settled_rss(pool)
                capacity = 2 * objects * footprint_bytes(OBJECT_BYTES, CHUNK_BYTES)
                pool.start_paper(objects=objects, capacity_bytes=capacity, object_bytes=OBJECT_BYTES)
                each.append((_settled_rss(pool) - before) / objects)
                assert pool.metric("kvops_master_objects") == objects
                requests.append(pool.metric("kvops_master_request_seconds_max") * 1e3)
                slices.append(pool.metric("kvops_master_slice_seconds_max") * 1e3)
        params: Params = {"objects": objects}
        tell(Result(name="memory.per_object", unit="B", params=params, runs=each))
        tell(Result(name="memory.longest_request_cpu", unit="ms", params=params, runs=requests))
        tell(Result(name="memory.longest_slice_cpu", unit="ms", params=params, runs=slices))


def _settled_rss(pool: BenchPool) -> int:
    """Resident memory once nothing is left to do: no change and hardly any CPU time between two looks."""
    seen: list[tuple[int, float]] = []

    def settled() -> bool:
        seen.append((pool.master.rss_bytes(), pool.master.cpu_s()))
        if len(seen) < 2:
            return False
        (rss, cpu_s), (rss_now, cpu_s_now) = seen[-2:]
        return rss_now == rss and cpu_s_now - cpu_s < 0.1

    wait_until(settled, timeout_s=SETTLE_TIMEOUT_S, what="the master did not come to rest", pause_s=0.3)
    return seen[-1][0]
