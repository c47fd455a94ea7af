"""
What taking a store away costs: the drain's call, readers beside its sweep, a migration, SIGTERM and SIGKILL.

Stores of many objects are on paper (``paper.py``): the master does with them what it does with real ones. Whatever
moves bytes, or ends by a signal, is a real store.
"""

from __future__ import annotations

import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvops.bench.model import Effort, Params, Result, Tell, percentile
from kvops.bench.pool import BenchPool, ChildFailed, paper_keys, paper_pool, pool_of, wait_until
from kvops.files import read_secret
from kvops.limits import ALIGN_BYTES, CHUNK_BYTES, MIB, PUTS_PER_FRAME_MAX
from kvops.store.client import Pool
from kvops.store.control import ControlClient
from kvops.store.model import HoldInfo, HoldState, Reason
from kvops.transfer.layout import footprint_bytes

BATCH: Final = 32  # keys of a lookup
OBJECT_BYTES: Final = 64
OTHERS: Final = 20_000  # objects of the store that is read meanwhile
DEADLINE_MS: Final = 5_000
CONTROL_S: Final = 30.0
SWEEP_S_MAX: Final = 900.0
VICTIM: Final = "paper-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    objects: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    calls: int = 20  # drains of each
    swept: int = 1_000_000
    window: int = 10_000  # lookups behind one p99
    drains: int = 20  # under load
    move_bytes: int = 384 * MIB
    limit_bps: int = 1_000_000_000
    ended: int = 100_000  # objects of a store that gets a signal

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        if not effort.quick:
            return cls()
        return cls(
            objects=(1_000, 20_000),
            calls=5,
            swept=20_000,
            window=1_000,
            drains=4,
            move_bytes=64 * MIB,
            limit_bps=400_000_000,
            ended=2_000,
        )


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    for objects in plan.objects:
        _calls(plan, objects, tell)
    _sweep(plan, effort, tell)
    _under_load(plan, tell)
    _migration(plan, tell)
    _ends(plan, effort, tell)


@contextmanager
def _control(pool: BenchPool) -> Iterator[ControlClient]:
    address, secret = pool.master_addresses["control"], read_secret(pool.secret_file)
    with ControlClient(address, secret, timeout_s=CONTROL_S) as client:
        client.status()  # the connection is not what is measured
        yield client


@contextmanager
def _two_papers(objects: int) -> Iterator[BenchPool]:
    """One store of so many objects to be drained, and another one."""
    with paper_pool(objects, object_bytes=OBJECT_BYTES) as pool:
        size = 2 * OTHERS * footprint_bytes(OBJECT_BYTES, CHUNK_BYTES) // ALIGN_BYTES * ALIGN_BYTES
        pool.start_paper(objects=OTHERS, capacity_bytes=size, object_bytes=OBJECT_BYTES, prefix="other")
        yield pool


def _hold(client: ControlClient, target: str) -> HoldInfo:
    return next(hold for hold in client.holds().holds if hold.target == target)


def _drained(client: ControlClient, target: str) -> HoldInfo:
    wait_until(
        lambda: _hold(client, target).state is HoldState.DRAINED,
        timeout_s=SWEEP_S_MAX,
        what="a drain did not end",
    )
    return _hold(client, target)


def _calls(plan: Plan, objects: int, tell: Tell) -> None:
    """The drain as the caller of the control RPC sees it."""
    with (
        _two_papers(objects) as pool,
        _control(pool) as control,
        pool.connect(deadline_ms=DEADLINE_MS) as reader,
    ):
        keys = paper_keys("bench", BATCH)
        times: dict[str, list[float]] = {"drain": [], "undrain": []}
        for _ in range(plan.calls):
            reader.locate(keys)  # leases: nothing is swept within the next second
            for name, call in (("drain", control.drain), ("undrain", control.undrain)):
                began = time.perf_counter()
                call([VICTIM])
                times[name].append((time.perf_counter() - began) * 1e3)
        known = int(pool.metric("kvops_master_objects"))
        if known != objects + OTHERS:
            raise ChildFailed(f"{known} of {objects + OTHERS} objects are left", fix="report it")
    for name, runs in times.items():
        tell(Result(name=f"drain.{name}_call", unit="ms", params={"objects": objects}, runs=runs))


def _sweep(plan: Plan, effort: Effort, tell: Tell) -> None:
    """Lookups in a closed loop: quiet, beside the sweep of another store, and quiet again."""
    with (
        _two_papers(plan.swept) as pool,
        _control(pool) as control,
        pool.connect(deadline_ms=DEADLINE_MS) as reader,
    ):
        keys = paper_keys("other", OTHERS)
        drawn = random.Random(1).choices(keys, k=BATCH * 4_096)
        sets = [drawn[at : at + BATCH] for at in range(0, len(drawn), BATCH)]

        def window() -> float:
            """The p99 of so many lookups, in seconds."""
            times = []
            for call in range(plan.window):
                sent = time.perf_counter()
                reader.locate(sets[call % len(sets)])
                times.append(time.perf_counter() - sent)
            return percentile(sorted(times), 0.99)

        window()  # warm
        quiet = [window() for _ in range(effort.runs)]
        slice_s = pool.metric("kvops_master_slice_seconds_max")
        began = time.monotonic()
        control.drain([VICTIM])
        sweeping = []
        while _hold(control, VICTIM).state is HoldState.DRAINING and time.monotonic() - began < SWEEP_S_MAX:
            sweeping.append(window())
        hold = _drained(control, VICTIM)
        took_s = time.monotonic() - began
        again = [window() for _ in range(effort.runs)]
        longest = pool.metric("kvops_master_slice_seconds_max")
    params: Params = {"objects": plan.swept, "batch": BATCH, "window": plan.window}
    base = sorted(quiet)[len(quiet) // 2]
    for phase, found in (("quiet", quiet), ("sweep", sweeping), ("quiet again", again)):
        if found:
            micros, ratios = [one * 1e6 for one in found], [one / base for one in found]
            phased = {**params, "phase": phase}
            tell(Result(name="drain.lookup_p99", unit="µs", params=phased, runs=micros))
            tell(Result(name="drain.p99_ratio_to_quiet", unit="", params=phased, runs=ratios))
    tell(Result(name="drain.sweep", unit="s", params=params, runs=[took_s]))
    tell(Result(name="drain.swept", unit="objects", params=params, runs=[hold.swept]))
    tell(Result(name="drain.left", unit="objects", params=params, runs=[hold.left]))
    before: Params = {**params, "before_ms": round(slice_s * 1e3, 3)}
    tell(Result(name="drain.longest_slice_cpu", unit="ms", params=before, runs=[longest * 1e3]))


class _Watcher:
    """A client in a thread that looks up and puts, and notes whatever names a store that is drained."""

    def __init__(self, pool: Pool, keys: list[str], prefix: str) -> None:
        self.drained: tuple[str, frozenset[int]] | None = None  # after the reply: name and ids of its mounts
        self.lookups = self.puts = self.named = self.placed = 0
        self._pool, self._keys, self._prefix = pool, keys, prefix
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            before = self.drained
            found = set(self._pool.locate(self._keys)["store"].tolist())
            number += 1
            put = self._pool.put(f"{self._prefix}/{number}", bytes(OBJECT_BYTES))
            if before is None or self.drained is not before:
                continue  # it was drained, or let go, meanwhile
            self.lookups += len(self._keys)
            self.puts += 1
            self.named += bool(found & before[1])
            self.placed += put.store == before[0]

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(10)


def _under_load(plan: Plan, tell: Tell) -> None:
    """Drains beside clients that look up, put and read."""
    size, victim = MIB, "store-1"
    count = 48
    with (
        pool_of(3, segment_size_bytes=128 * MIB) as pool,
        _control(pool) as control,
        pool.connect(host="host-1", deadline_ms=DEADLINE_MS) as local,
        pool.connect(host="host-9", deadline_ms=DEADLINE_MS, transports=["tcp"]) as reader,
        pool.connect(host="host-1", deadline_ms=DEADLINE_MS) as one,
        pool.connect(host="host-8", deadline_ms=DEADLINE_MS) as other,
    ):
        keys = [f"load/{number}" for number in range(count)]
        pages = [number.to_bytes(2, "big") * (size // 2) for number in range(count)]
        buffers = [bytearray(size) for _ in keys]
        watchers = [_Watcher(one, keys, "one"), _Watcher(other, keys, "other")]
        under_way = failed = wrong = 0
        for number in range(plan.drains):
            _put_all(local, keys, pages)
            ids = frozenset(info.id for info in local.stores() if info.name == victim)
            outcomes: list[bool] = []
            thread = threading.Thread(
                target=lambda into: into.extend(
                    outcome.ok for outcome in reader.batch_get_into(keys, buffers)
                ),
                args=(outcomes,),
            )
            thread.start()
            select.select([], [], [], 0.003)  # its lookup takes a tenth of this; its bytes ten times as long
            running = thread.is_alive()
            control.drain([victim], reason=f"bench {number}")
            for watcher in watchers:
                watcher.drained = (victim, ids)
            thread.join(DEADLINE_MS / 1e3)
            if running and sum(outcomes):
                under_way += len(outcomes)
                failed += outcomes.count(False)
            wrong += sum(
                ok and buffer != page for ok, buffer, page in zip(outcomes, buffers, pages, strict=False)
            )
            _drained(control, victim)
            for watcher in watchers:
                watcher.drained = None
            control.undrain([victim])
        for watcher in watchers:
            watcher.stop()
    params: Params = {"drains": plan.drains}
    for name, value in (
        ("lookups_after_reply", sum(watcher.lookups for watcher in watchers)),
        ("lookups_naming_it", sum(watcher.named for watcher in watchers)),
        ("puts_after_reply", sum(watcher.puts for watcher in watchers)),
        ("puts_placed_there", sum(watcher.placed for watcher in watchers)),
        ("reads_under_way", under_way),
        ("reads_failed", failed),
        ("wrong_bytes_reads", wrong),
    ):
        tell(Result(name=f"drain.{name}", unit="", params=params, runs=[value]))


def _put_all(pool: Pool, keys: list[str], pages: list[bytes]) -> None:
    outcomes = pool.batch_put_from(keys, pages)
    if not all(outcome.ok for outcome in outcomes):
        bad = next(outcome.reason for outcome in outcomes if not outcome.ok)
        raise ChildFailed(f"objects could not be put: {bad}", fix="report it")


def _migration(plan: Plan, tell: Tell) -> None:
    """How fast a store copies itself away, without a limit and with one, beside what a reader gets by tcp."""
    size, victim = MIB, "store-0"
    count = plan.move_bytes // size
    with (
        pool_of(3, segment_size_bytes=plan.move_bytes // 9 * 10 // (2 * MIB) * 2 * MIB + 16 * MIB) as pool,
        _control(pool) as control,
        pool.connect(host="host-0", deadline_ms=60_000) as local,
        pool.connect(host="host-9", deadline_ms=60_000, transports=["tcp"]) as reader,
    ):
        page = random.Random(1).randbytes(size)
        buffers = [bytearray(size) for _ in range(64)]
        rates: dict[str, list[float]] = {"read": [], "free": [], "limited": []}
        for phase, limit_bps in (("free", 0), ("limited", plan.limit_bps)):
            number = count if not limit_bps else max(1, min(count, 3 * limit_bps // 8 // size))
            keys = [f"{phase}/{i}" for i in range(number)]
            for at in range(0, number, PUTS_PER_FRAME_MAX):
                some = keys[at : at + PUTS_PER_FRAME_MAX]
                _put_all(local, some, [page] * len(some))
            if not limit_bps:
                began = time.perf_counter()
                for at in range(0, number, len(buffers)):
                    some = keys[at : at + len(buffers)]
                    if not all(one.ok for one in reader.batch_get_into(some, buffers[: len(some)])):
                        raise ChildFailed("a read failed", fix="report it")
                rates["read"].append(number * size / (time.perf_counter() - began) / 1e9)
            rates[phase].append(_move(control, victim, limit_bps) / 1e9)
            hold = _drained(control, victim)
            missing = [key for key, there in zip(keys, reader.batch_exists(keys), strict=True) if not there]
            if missing and not hold.unmoved:
                raise ChildFailed(f"{len(missing)} objects are gone after a migration", fix="report it")
            control.undrain([victim])
            for key in keys:
                reader.remove(key)
    params: Params = {"object_bytes": size, "bytes": plan.move_bytes}
    tell(Result(name="drain.tcp_read", unit="GB/s", params=params, runs=rates["read"]))
    tell(Result(name="drain.migrate", unit="GB/s", params=params, runs=rates["free"]))
    share = [free / read for free, read in zip(rates["free"], rates["read"], strict=True)]
    tell(Result(name="drain.migrate_share_of_read", unit="", params=params, runs=share))
    limited: Params = {**params, "limit_gb_per_s": plan.limit_bps / 8e9}
    tell(Result(name="drain.migrate_limited", unit="GB/s", params=limited, runs=rates["limited"]))
    kept = [rate / (plan.limit_bps / 8e9) for rate in rates["limited"]]
    tell(Result(name="drain.migrate_share_of_limit", unit="", params=limited, runs=kept))


def _move(control: ControlClient, victim: str, limit_bps: int) -> float:
    """Migrate; bytes per second between the first progress seen and the last."""
    control.drain([victim], migrate=True, bandwidth_bps=limit_bps)
    poll = select.poll()
    deadline = time.monotonic() + SWEEP_S_MAX
    seen: list[tuple[float, int]] = []
    while time.monotonic() < deadline:
        hold = _hold(control, victim)
        if hold.migrated_bytes and (not seen or hold.migrated_bytes != seen[-1][1]):
            seen.append((time.perf_counter(), hold.migrated_bytes))
        if hold.state is not HoldState.MIGRATING:
            break
        poll.poll(2)
    if len(seen) < 2:
        raise ChildFailed("a migration was over before it was seen", fix="report it")
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def _ends(plan: Plan, effort: Effort, tell: Tell) -> None:
    """For how long lookups go on naming a store that gets a signal."""
    for number, count in ((signal.SIGTERM, plan.ended), (signal.SIGKILL, min(plan.ended, 10_000))):
        runs = [_end(number, count) for _ in range(min(2, effort.runs))]
        params: Params = {"objects": count}
        for at, name in enumerate(("named", "unread")):
            figures = [run[at] for run in runs]
            tell(Result(name=f"drain.{number.name.lower()}_{name}", unit="ms", params=params, runs=figures))


def _end(number: signal.Signals, count: int) -> tuple[float, float]:
    """Until the last lookup that named it, and until the last read that went wrong there, after the signal."""
    size = 8 * count * footprint_bytes(OBJECT_BYTES, CHUNK_BYTES) // 7
    segment = max(16 * MIB, -(-size // (2 * MIB)) * 2 * MIB)
    with (
        pool_of(2, segment_size_bytes=segment) as pool,
        pool.connect(host="host-1", deadline_ms=60_000) as local,
        pool.connect(host="host-9", deadline_ms=DEADLINE_MS, transports=["tcp"]) as reader,
        pool.connect(host="host-9", deadline_ms=DEADLINE_MS) as looker,
    ):
        keys = [f"end/{i}" for i in range(count)]
        for at in range(0, count, PUTS_PER_FRAME_MAX):
            some = keys[at : at + PUTS_PER_FRAME_MAX]
            _put_all(local, some, [bytes(OBJECT_BYTES)] * len(some))
        some = keys[:BATCH]
        buffers = [bytearray(OBJECT_BYTES) for _ in some]
        reader.batch_get_into(some, buffers)
        looker.locate(some)
        began = time.monotonic()
        pool.children["store-1"].signal(number)
        named = failed = began
        while time.monotonic() - began < 3:
            sent = time.monotonic()
            if looker.locate(some)["store"].any():
                named = sent
            bad = [one for one in reader.batch_get_into(some, buffers) if not one.ok]
            if any(one.reason is not Reason.MISS for one in bad):
                failed = sent
            if sent - named > 1:
                break
    return (named - began) * 1e3, (failed - began) * 1e3
