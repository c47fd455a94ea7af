"""
Three masters by an etcd of three members: what a group loses, and for how long, when its leader dies, hangs or is
cut off from etcd, under load; what replication costs; and how long a takeover takes with many objects.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvops.bench import raw
from kvops.bench.cuttable import CuttableRelay
from kvops.bench.model import Effort, Params, Result, Tell
from kvops.bench.pool import BenchPool, metric, pool_of, wait_until
from kvops.errors import KvopsError, Unreachable
from kvops.files import write_yaml
from kvops.fleet import etcd as local_etcd
from kvops.limits import KIB, MIB
from kvops.store.client import Pool
from kvops.store.model import Reason

MASTERS: Final = 3
STORES: Final = 3
OBJECT_BYTES: Final = 64 * KIB
DEADLINE_MS: Final = 200
KEPT: Final = 500  # objects that are acknowledged before each fault
SETTLE_S: Final = 20.0
FAULTS: Final = ("killed", "stopped", "cut from etcd")
ETCD_FAULTS: Final = ("member killed", "member stopped", "leader stopped")
PUT_BATCH: Final = 16
LATE_MS: Final = 20.0  # past its deadline: more than the machine's own hiccups


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    repeats: int = 5
    put_s: float = 4.0
    etcd_s: float = 5.0  # how long a member of etcd is gone
    quorum_s: float = 30.0
    takeover_objects: tuple[int, ...] = (10_000, 1_000_000)

    @classmethod
    def of(cls, effort: Effort) -> Plan:
        """The plan for an effort."""
        if effort.quick:
            return cls(repeats=1, put_s=1.0, etcd_s=2.0, quorum_s=4.0, takeover_objects=(10_000,))
        return cls(repeats=effort.runs)


class Etcd:
    """Three members on this machine, tuned as ``kvops start --etcd auto`` tunes them."""

    def __init__(self, directory: Path) -> None:
        names = [f"etcd-{number}" for number in range(local_etcd.MEMBERS)]
        self._directory, self._program, self._names = directory, local_etcd.program(), names
        self._configurations = local_etcd.configurations(
            names,
            [directory / name for name in names],
            token=directory.name,
            addresses=["127.0.0.1"] * len(names),
        )
        self.endpoints = [local_etcd.endpoint(one) for one in self._configurations]
        self.processes: list[subprocess.Popen[bytes]] = []
        for name, configuration in zip(names, self._configurations, strict=True):
            write_yaml(directory / f"{name}.yaml", configuration)
            self.processes.append(self._start(name))

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        path = self._directory / f"{name}.yaml"
        with (self._directory / f"{name}.log").open("ab") as log:
            return subprocess.Popen([self._program, "--config-file", str(path)], stdout=log, stderr=log)

    def leader(self) -> int:
        """The member that leads etcd, by its own word."""
        for number, endpoint in enumerate(self.endpoints):
            request = urllib.request.Request(f"http://{endpoint}/v3/maintenance/status", data=b"{}")
            with urllib.request.urlopen(request, timeout=2.0) as answer:  # noqa: S310 (our own etcd, by http)
                status = msgspec.json.decode(answer.read())
            if status["leader"] == status["header"]["member_id"]:
                return number
        raise Unreachable("etcd has no leader", fix="run it again on a quieter machine")

    def heal(self) -> None:
        """Wake what is stopped, and start what has ended."""
        for number, name in enumerate(self._names):
            if self.processes[number].poll() is None:
                self.processes[number].send_signal(signal.SIGCONT)
            else:
                self.processes[number] = self._start(name)

    def close(self) -> None:
        """Kill and reap."""
        for process in self.processes:
            process.kill()
            process.wait()


@dataclass
class Group:
    """Masters, each with a way of its own to etcd that can be cut, and stores."""

    pool: BenchPool
    relays: dict[str, list[CuttableRelay]]
    etcd: Etcd

    def connect(self) -> Pool:
        """A client that knows every master."""
        return self.pool.connect(deadline_ms=DEADLINE_MS, host="host-0")

    def heal(self, name: str, fault: str) -> None:
        """Take a fault back, and wait until two standbys could lead."""
        if fault == "killed":
            self.pool.drop(name)
            self.pool.start_one_of_several(name, endpoints(self.relays[name]), **SETTINGS)
        elif fault == "stopped":
            self.pool.children[name].signal(signal.SIGCONT)
        else:
            for relay in self.relays[name]:
                relay.mend()
        self.ready()

    def ready(self) -> str:
        """Wait until somebody leads, with both others in step; who."""
        leader = self.pool.find_leader(timeout_s=SETTLE_S)
        wait_until(
            lambda: self.pool.metric("kvops_master_standbys") == MASTERS - 1,
            timeout_s=SETTLE_S,
            what="the standbys did not catch up",
        )
        return leader


SETTINGS: Final[dict[str, Any]] = {"etcd_ttl_s": local_etcd.LEASE_TTL_S}


def endpoints(relays: list[CuttableRelay]) -> list[str]:
    """What a master behind these relays takes for etcd."""
    return [f"127.0.0.1:{relay.port}" for relay in relays]


@contextmanager
def group(*, segment_size_bytes: int = 256 * MIB, stores: int = STORES) -> Iterator[Group]:
    """Three masters, and stores."""
    with ExitStack() as ends:
        pool = ends.enter_context(BenchPool())
        etcd = Etcd(pool.directory)
        ends.callback(etcd.close)
        relays: dict[str, list[CuttableRelay]] = {}
        for number in range(MASTERS):
            mine = [CuttableRelay(int(endpoint.rpartition(":")[2])) for endpoint in etcd.endpoints]
            relays[f"master-{number}"] = mine
            for relay in mine:
                ends.callback(relay.close)
        pool.start_masters([endpoints(mine) for mine in relays.values()], **SETTINGS)
        for number in range(stores):
            pool.start_store(number, segment_size_bytes=segment_size_bytes)
        made = Group(pool, relays, etcd)
        made.ready()
        yield made


@dataclass
class _Load:
    """A thread that puts and gets until told to stop, and when each last worked and took longest."""

    client: Pool
    keys: list[str]
    data: bytes
    stop: threading.Event = field(default_factory=threading.Event)
    got: list[float] = field(default_factory=list)
    put: list[float] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    wrong: int = 0
    late: int = 0
    calls: int = 0

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            began = time.monotonic()
            found = self.client.get(self.keys[number % len(self.keys)])
            between = time.monotonic()
            key = f"load/{id(self)}/{number}"
            outcome = self.client.put(key, self.data)
            ended = time.monotonic()
            self.calls = number
            self.late += (between - began) * 1e3 > DEADLINE_MS + LATE_MS
            self.late += (ended - between) * 1e3 > DEADLINE_MS + LATE_MS
            if found is not None:
                self.got.append(between)
                self.wrong += found != self.data
            if outcome.reason is Reason.STORED:
                self.put.append(ended)
                self.stored.append(key)


def run(effort: Effort, tell: Tell) -> None:
    """Measure, and tell each figure."""
    plan = Plan.of(effort)
    with group() as made:
        for fault in FAULTS:
            _faults(plan, made, fault, tell)
        for fault in ETCD_FAULTS:
            _etcd_member(plan, made, fault, tell)
        _quorum(plan, made, tell)
    _cost(plan, tell)
    for objects in plan.takeover_objects:
        _takeover(objects, tell)
        _cold(objects, tell)


def _faults(plan: Plan, made: Group, fault: str, tell: Tell) -> None:
    rows: dict[str, list[float]] = {}
    for repeat in range(plan.repeats):
        for name, value in _one_fault(made, fault, repeat).items():
            rows.setdefault(name, []).append(value)
    units = {"kept": "share", "wrong_bytes": "objects", "late_calls": "calls"}
    for name, runs in rows.items():
        tell(Result(name=f"failover.{name}", unit=units.get(name, "s"), runs=runs, params={"fault": fault}))


def _one_fault(made: Group, fault: str, repeat: int) -> dict[str, float]:
    leader = made.ready()
    term = made.pool.metric("kvops_master_term")
    data = bytes(raw.buffers(1, OBJECT_BYTES)[0])
    with made.connect() as client, made.connect() as worker:
        keys = [f"kept/{fault}/{repeat}/{number}" for number in range(KEPT)]
        outcomes = client.batch_put_from(keys, [data] * KEPT, deadline_ms=10_000)
        keys = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok]
        load = _Load(worker, keys, data)
        thread = threading.Thread(target=load.run, daemon=True)
        thread.start()
        wait_until(lambda: len(load.put) > 20, timeout_s=SETTLE_S, what="puts did not work")
        began = time.monotonic()
        wall = time.time()
        if fault == "cut from etcd":
            for relay in made.relays[leader]:
                relay.cut()
        else:
            made.pool.children[leader].signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        after = (
            began + 0.3
        )  # what was under way when it happened proves nothing, nor does a lease that still runs
        if fault == "cut from etcd":
            wait_until(lambda: _silent(load, began), timeout_s=SETTLE_S, what="the leader did not stop")
            after = load.put[-1]
        wait_until(
            lambda: load.put and load.got and load.put[-1] > after and load.got[-1] > after,
            timeout_s=SETTLE_S,
            what="puts did not work again",
        )
        load.stop.set()
        thread.join()
        made.pool.find_leader(before=int(term), timeout_s=SETTLE_S)
        elected = _elected(made.pool.directory, wall)
        made.heal(leader, fault)

        def kept() -> int:
            everything = [*keys, *load.stored]
            return sum(outcome.ok for outcome in client.batch_get_into(everything, room, deadline_ms=10_000))

        room = [memoryview(bytearray(OBJECT_BYTES)) for _ in range(len(keys) + len(load.stored))]
        try:
            wait_until(lambda: kept() == len(room), timeout_s=5.0, what="", pause_s=0.2)
        except KvopsError:
            pass  # the share says so
        share = kept() / len(room)
        wrong = load.wrong + sum(bytes(buffer) != data for buffer in room if any(buffer[:1]))
        for at in range(0, len(room), KEPT):
            for key in [*keys, *load.stored][at : at + KEPT]:
                client.remove(key)
    first_put = min(at for at in load.put if at > after) - began
    first_get = min(at for at in load.got if at > after) - began
    return {
        "next_put": first_put,
        "next_lookup": first_get,
        **({"elected": elected[0], "takeover": elected[1]} if elected else {}),
        "kept": share,
        "wrong_bytes": wrong,
        "late_calls": load.late,
    }


def _etcd_member(plan: Plan, made: Group, fault: str, tell: Tell) -> None:
    """One member of etcd is gone: puts and gets that did not work meanwhile, and changes of the leader."""
    rows: dict[str, list[float]] = {"failed_share": [], "late_calls": [], "terms": []}
    for _ in range(plan.repeats):
        made.ready()
        term = made.pool.metric("kvops_master_term")
        with _loaded(made) as load:
            number = made.etcd.leader()
            number = number if fault == "leader stopped" else (number + 1) % len(made.etcd.processes)
            how = signal.SIGKILL if fault == "member killed" else signal.SIGSTOP
            before, worked = load.calls, len(load.put) + len(load.got)
            made.etcd.processes[number].send_signal(how)
            threading.Event().wait(plan.etcd_s)
            calls, working = load.calls - before, len(load.put) + len(load.got) - worked
            made.etcd.heal()
        made.ready()
        rows["failed_share"].append(max(0.0, 1 - working / max(1, 2 * calls)))
        rows["late_calls"].append(load.late)
        rows["terms"].append(made.pool.metric("kvops_master_term") - term)
    for name, runs in rows.items():
        tell(Result(name=f"failover.etcd_{name}", unit="", runs=runs, params={"fault": fault}))


def _quorum(plan: Plan, made: Group, tell: Tell) -> None:
    """No quorum in etcd: how long the leader still serves, and how soon all is well afterwards."""
    rows: dict[str, list[float]] = {"served": [], "recovery": [], "late_calls": []}
    for _ in range(plan.repeats):
        made.ready()
        with _loaded(made) as load:
            for process in made.etcd.processes[:2]:
                process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            threading.Event().wait(plan.quorum_s)
            rows["served"].append(load.put[-1] - began)
            made.etcd.heal()
            healed = time.monotonic()
            wait_until(
                lambda since=healed: load.put[-1] > since, timeout_s=SETTLE_S, what="puts did not work again"
            )
            rows["recovery"].append(next(at for at in load.put if at > healed) - healed)
        made.ready()
        rows["late_calls"].append(load.late)
    units = {"served": "s", "recovery": "s", "late_calls": "calls"}
    for name, runs in rows.items():
        tell(
            Result(
                name=f"failover.quorum_lost_{name}",
                unit=units[name],
                runs=runs,
                params={"seconds": plan.quorum_s},
            )
        )


@contextmanager
def _loaded(made: Group) -> Iterator[_Load]:
    """Puts and gets go on while the block runs."""
    data = bytes(raw.buffers(1, OBJECT_BYTES)[0])
    with made.connect() as client:
        keys = [f"etcd/{time.monotonic_ns()}/{number}" for number in range(100)]
        client.batch_put_from(keys, [data] * len(keys), deadline_ms=10_000)
        load = _Load(client, keys, data)
        thread = threading.Thread(target=load.run, daemon=True)
        thread.start()
        try:
            wait_until(lambda: len(load.put) > 20, timeout_s=SETTLE_S, what="puts did not work")
            yield load
        finally:
            load.stop.set()
            thread.join()


def _silent(load: _Load, began: float) -> bool:
    """No put has worked for a while, although some did since the fault."""
    now = time.monotonic()
    return now - began > 0.5 and (not load.put or now - load.put[-1] > 2 * DEADLINE_MS / 1e3)


def _elected(directory: Path, wall: float) -> tuple[float, float] | None:
    """When after ``wall`` a master said that it leads, and how long it took to take over; of the masters' logs."""
    found = []
    for path in directory.glob("master-*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if '"master.elected"' not in line:
                continue
            row = msgspec.json.decode(line.encode(), type=dict[str, Any])
            at = _unix_time(row["time"])
            if at >= wall:
                found.append((at - wall, float(row["takeover_s"])))
    return min(found, default=None)


def _unix_time(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _cost(plan: Plan, tell: Tell) -> None:
    """What acknowledging only what standbys have costs: the same writer and reader, with and without."""
    single: dict[str, list[float]] = {}
    several: dict[str, list[float]] = {}
    with pool_of(STORES) as alone, group() as made:
        for _ in range(plan.repeats):
            for rows, pool in ((single, alone), (several, made.pool)):
                for name, value in _throughput(pool, plan.put_s).items():
                    rows.setdefault(name, []).append(value)
    for name, runs in several.items():
        params: Params = {"masters": MASTERS}
        tell(Result(name=f"failover.{name}", unit="1/s", runs=runs, params=params))
        tell(Result(name=f"failover.{name}", unit="1/s", runs=single[name], params={"masters": 1}))
        ratios = [value / other for value, other in zip(runs, single[name], strict=True)]
        tell(Result(name=f"failover.{name}_ratio", unit="", runs=ratios, params=params))


def _throughput(pool: BenchPool, seconds: float) -> dict[str, float]:
    data = raw.buffers(1, OBJECT_BYTES)[0]
    with pool.connect(deadline_ms=5_000, host="host-0") as client:
        puts, number, ends = 0, 0, time.monotonic() + seconds
        tag = time.monotonic_ns()
        while time.monotonic() < ends:
            keys = [f"cost/{tag}/{number + at}" for at in range(PUT_BATCH)]
            number += PUT_BATCH
            puts += sum(outcome.ok for outcome in client.batch_put_from(keys, [data] * PUT_BATCH))
        lookups, ends = 0, time.monotonic() + seconds / 2
        while time.monotonic() < ends:
            client.batch_exists(keys)
            lookups += 1
    return {"puts": puts / seconds, "lookups": lookups / (seconds / 2)}


def _takeover(objects: int, tell: Tell) -> None:
    """From the leader's death to a standby that names every object of a store."""
    with group(stores=0) as made:
        made.pool.start_paper(objects=objects, capacity_bytes=objects * 512 * KIB // KIB)
        leader = made.ready()
        term = made.pool.metric("kvops_master_term")
        wait_until(
            lambda: all(
                metric(one["http"], "kvops_master_objects") == objects for one in made.pool.masters.values()
            ),
            timeout_s=120.0,
            what="the standbys did not have every object",
        )
        wall = time.time()
        made.pool.children[leader].signal(signal.SIGKILL)
        made.pool.find_leader(before=int(term), timeout_s=60.0)
        elected = _elected(made.pool.directory, wall)
        assert elected is not None
        wait_until(
            lambda: made.pool.metric("kvops_master_capacity_bytes") > 0,
            timeout_s=60.0,
            what="the store did not come back",
        )
        params: Params = {"objects": objects}
        tell(Result(name="failover.takeover_hot", unit="s", runs=[elected[1]], params=params))
        tell(
            Result(
                name="failover.takeover_to_store_back",
                unit="s",
                runs=[time.time() - wall - elected[0]],
                params=params,
            )
        )


def _cold(objects: int, tell: Tell) -> None:
    """A master without any state learns everything from a store's slot table."""
    with BenchPool() as pool:
        pool.start_master()
        pool.start_paper(objects=objects, capacity_bytes=objects * 512 * KIB // KIB)
        address = pool.master_addresses["listen"]
        pool.children["master"].signal(signal.SIGKILL)
        pool.drop("master")
        shutil.rmtree(pool.directory / "master")
        began = time.monotonic()
        pool.start_master(listen=address)
        wait_until(
            lambda: pool.metric("kvops_master_objects") == objects,
            timeout_s=120.0,
            what="not every object was back",
        )
        tell(
            Result(
                name="failover.rebuild_cold",
                unit="s",
                runs=[time.monotonic() - began],
                params={"objects": objects},
            )
        )
