"""
How fast a store comes and goes: memory prepared beside the kernel's own pace, first use after exec, the stop.

The bare populate beside it is one call of the kernel for each CPU, each on its own share of a memory file, in the same
run. Memory that a virtual machine has never touched comes at its host's pace: a run that does not count warms it.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Final

from kvops.bench.model import Effort, Params, Result, Tell
from kvops.bench.pool import BenchPool, ChildFailed, metric, wait_until
from kvops.fleet.preflight import read_memory_facts
from kvops.limits import GIB, MIB
from kvops.store.pages import address_of, populate

POPULATE_TIMEOUT_S_PER_GIB: Final = 20.0
STOP_TIMEOUT_S_PER_GIB: Final = 10.0
TIMEOUT_S_MIN: Final = 30.0
MEMORY_SHARE_MAX: Final = 0.6  # of what is available: others live here too


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    sizes: tuple[int, ...]
    runs: int

    @classmethod
    def of(cls, effort: Effort, *, available_bytes: int) -> Plan:
        """The plan for an effort, on a machine with so much memory."""
        sizes = (128 * MIB,) if effort.quick else (GIB, 4 * GIB, 8 * GIB)
        fitting = tuple(size for size in sizes if size <= MEMORY_SHARE_MAX * available_bytes)
        return cls(sizes=fitting or (64 * MIB,), runs=effort.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What one start and stop took, in seconds."""

    populate_s: float
    first_s: float
    stop_s: float


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    available = min(
        [read_memory_facts().available_bytes]
        + [group.limit_bytes - group.used_bytes for group in read_memory_facts().cgroups]
    )
    plan = Plan.of(effort, available_bytes=available)
    with BenchPool() as pool:
        pool.start_master()
        for size in plan.sizes:
            _bare(size)
            bare, ours = [], []
            for number in range(plan.runs):
                bare.append(_bare(size))
                ours.append(_start_and_stop(pool, size, number))
            params: Params = {"segment_mib": size // MIB}
            speeds = [size / one.populate_s / 1e9 for one in ours]
            kernel = [size / populate_s / 1e9 for populate_s, _ in bare]
            tell(Result(name="start.populate", unit="GB/s", params=params, runs=speeds))
            tell(Result(name="start.kernel_populate", unit="GB/s", params=params, runs=kernel))
            share = [mine / its for mine, its in zip(speeds, kernel, strict=True)]
            tell(Result(name="start.populate_of_kernel", unit="ratio", params=params, runs=share))
            first = [one.first_s * 1e3 for one in ours]
            tell(Result(name="start.first_allocatable", unit="ms", params=params, runs=first))
            tell(Result(name="start.stop", unit="ms", params=params, runs=[one.stop_s * 1e3 for one in ours]))
            release = [release_s * 1e3 for _, release_s in bare]
            tell(Result(name="start.kernel_release", unit="ms", params=params, runs=release))


def _bare(size: int) -> tuple[float, float]:
    """Seconds for a parallel populate with nothing around it, and for giving the memory back."""
    fd = os.memfd_create("kvops-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        address = address_of(memory)
        count = len(os.sched_getaffinity(0))
        share = -(-size // count // mmap.PAGESIZE) * mmap.PAGESIZE
        threads = [
            threading.Thread(target=populate, args=(address + at, min(share, size - at)))
            for at in range(0, size, share)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        populated = time.perf_counter()
        del memory
    finally:
        os.close(fd)
    return populated - began, time.perf_counter() - populated


def _start_and_stop(pool: BenchPool, size: int, number: int) -> _Run:
    """A store by the very command that units and ``kvops start`` run."""
    gib = size / GIB
    name = f"store-{size}-{number}"
    child, addresses, first_s = pool.serve_store(name, segment_size_bytes=size)
    if not pool.metric("kvops_master_capacity_bytes"):
        raise ChildFailed("a store said that it is ready and has no memory to allocate from", fix="report it")
    wait_until(
        lambda: metric(addresses["http"], "kvops_store_populated_bytes") >= size,
        timeout_s=TIMEOUT_S_MIN + POPULATE_TIMEOUT_S_PER_GIB * gib,
        what="a store's memory was not prepared",
        pause_s=0.1,
    )
    populate_s = metric(addresses["http"], "kvops_store_populate_seconds")
    began = time.perf_counter()
    child.signal(signal.SIGTERM)
    child.process.wait(TIMEOUT_S_MIN + STOP_TIMEOUT_S_PER_GIB * gib)
    stop_s = time.perf_counter() - began
    pool.drop(name)
    return _Run(populate_s=populate_s, first_s=first_s, stop_s=stop_s)
