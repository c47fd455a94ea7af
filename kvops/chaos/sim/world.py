"""One simulated pool: its machines and processes, what goes wrong with them, and how a run ends."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from kvops.chaos.sim.client import ClientProcess
from kvops.chaos.sim.clock import Host, Scheduler, Violation
from kvops.chaos.sim.disk import Disk
from kvops.chaos.sim.etcd import Etcd, EtcdMember
from kvops.chaos.sim.master import MasterProcess
from kvops.chaos.sim.net import HOSTS_MAX, Network, Trouble
from kvops.chaos.sim.oracle import Oracle
from kvops.chaos.sim.plan import (
    LEADER,
    PART_BYTES,
    SEGMENT_BYTES,
    Fault,
    Op,
    Plan,
    client_names,
    etcd_names,
    host_of,
    master_names,
    store_names,
)
from kvops.chaos.sim.process import Process
from kvops.chaos.sim.store import StoreProcess
from kvops.errors import KvopsError
from kvops.store.master_core import MasterSettings
from kvops.store.model import HoldKind, PlacementPolicy

RATE_ERROR_MAX: Final = 0.005  # ten times what a crystal does
BOOT_MS_MAX: Final = 1 << 33  # u32 clocks wrap in some runs
CHECK_US: Final = 1_000_000
SETTLE_US: Final = 60_000_000  # a put whose caller vanished is given up after 30 s
SETTLE_STEP_US: Final = 500_000
SERVE_US: Final = 20_000_000  # breakers try again after 12 s at the latest
UNDRAIN_US: Final = 500_000
OBJECTS_MAX: Final = 2_048
TIMELINE_MAX: Final = 100_000


@dataclass(slots=True)
class Result:
    """How a run ended."""

    violation: str | None  # None: all held
    invariant: str = ""
    at_us: int = 0
    messages: int = 0  # frames that reached a process, etcd's included
    cpu_s: float = 0.0  # processor time of all of it, the drawing of its plan included
    trace: str = ""
    simulated_us: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    evicted: int = 0
    timeline: list[str] = field(default_factory=list)


class World:
    """Everything of one run."""

    def __init__(self, plan: Plan, directory: Path, *, recording: bool = False) -> None:
        self.plan = plan
        self.recording = recording
        self.closing = False  # no new calls
        self.timeline: list[str] = []
        self.scheduler = Scheduler()
        rng = Random(plan.seed)
        self.net = Network(self.scheduler, rng)
        self.oracle = Oracle(self)
        self.etcd = Etcd(self, Random(rng.getrandbits(64)))
        self.etcd_ops: dict[tuple[int, int], object] = {}  # what requests and answers under way mean
        self.injected: dict[str, int] = {}
        self._rng = rng
        self._directory = directory
        self._incarnations = 0
        self._draining: dict[str, object] = {}  # by store
        self._hosts: dict[str, Host] = {}
        self._disks: dict[str, Disk] = {}
        self._processes: dict[str, Process] = {}
        config = plan.config
        keys = dict.fromkeys(key for op in plan.ops for key in op.keys)
        self._probe_keys = {
            name: [f"q{number}-{turn}" for turn in range(8)]
            for number, name in enumerate(client_names(config))
        }
        self.oracle.know([*keys, *(key for some in self._probe_keys.values() for key in some)])
        self._names = names = [
            *etcd_names(config),
            *master_names(config),
            *store_names(config),
            *client_names(config),
        ]
        for name in dict.fromkeys(host_of(name, config) for name in names):
            rate = 1 + rng.uniform(-RATE_ERROR_MAX, RATE_ERROR_MAX)
            host = Host(name, len(self._hosts), rate=rate, boot_ms=rng.randrange(1_000, BOOT_MS_MAX))
            self._hosts[name] = host
            self.net.add_host(host)
        for name in master_names(config):
            self._disks[name] = Disk(directory / name, Random(rng.getrandbits(64)))
        self._settings = MasterSettings(
            group="sim",
            placement=rng.choice(
                (PlacementPolicy.LOCAL_FIRST, PlacementPolicy.LOCAL_FIRST, PlacementPolicy.RANDOM)
            ),
            objects_max=OBJECTS_MAX,
            seed=rng.getrandbits(31),
        )
        self._maps = {name: rng.random() < 0.8 for name in client_names(config)}
        self._start_all(names)

    def say(self, who: str, text: str) -> None:
        """A line of the timeline."""
        if self.recording and len(self.timeline) < TIMELINE_MAX:
            self.timeline.append(f"{self.scheduler.now_us / 1_000:12.3f} ms  {who:<12} {text}")

    def masters(self) -> list[MasterProcess]:
        """Each master's last life."""
        return [one for one in self._processes.values() if isinstance(one, MasterProcess)]

    def stores(self) -> list[StoreProcess]:
        """Each store's last life."""
        return [one for one in self._processes.values() if isinstance(one, StoreProcess)]

    def leader(self) -> MasterProcess | None:
        """The master that serves."""
        return next((one for one in self.masters() if one.leads), None)

    def in_core(self, process: Process) -> bool:
        """Whether it must come to rest and serve at the end."""
        return process.host.name not in self.plan.lost_for_good

    # Lives.

    def _start_all(self, names: list[str]) -> None:
        for name in names:
            # They boot in any order.
            address = host_of(name, self.plan.config)
            self.net._places[name] = self._hosts[address]
            self.scheduler.at(self._rng.randrange(300_000), self._spawn, name)

    def _spawn(self, name: str) -> None:
        old = self._processes.get(name)
        host = self._hosts[host_of(name, self.plan.config)]
        if (old is not None and old.alive) or not host.up:
            return
        rng = Random(self._rng.getrandbits(64))
        masters = master_names(self.plan.config)
        process: Process
        if name.startswith("master"):
            process = MasterProcess(
                self,
                name,
                host,
                rng,
                disk=self._disks[name],
                settings=self._settings,
                etcd=etcd_names(self.plan.config),
                ttl_s=self.plan.config.ttl_s,
            )
        elif name.startswith("etcd"):
            process = EtcdMember(self, name, host, rng, cluster=self.etcd)
        elif name.startswith("store"):
            self._incarnations += 1
            process = StoreProcess(
                self,
                name,
                host,
                rng,
                masters=masters,
                incarnation=self._incarnations,
                segment_bytes=SEGMENT_BYTES,
            )
        else:
            number = int(name.rpartition("-")[2])
            workers: list[list[Op]] = [[] for _ in range(self.plan.config.workers)]
            for op in self.plan.ops:
                if op.client == number and op.at_us >= self.scheduler.now_us:
                    workers[op.worker].append(op)
            process = ClientProcess(
                self, name, host, rng, masters=masters, maps=self._maps[name], workers=workers
            )
        self._processes[name] = process
        process.start()

    # Faults.

    def _route(self, a: str, b: str) -> int:
        return self._hosts[a].index * HOSTS_MAX + self._hosts[b].index

    def _routes(self, fault: Fault) -> list[int]:
        out = [self._route(fault.target, other) for other in fault.others]
        back = [self._route(other, fault.target) for other in fault.others]
        if fault.name == "net.oneway":
            return out if fault.amount < 0 else back
        return out + back

    def inject(self, fault: Fault) -> None:
        """Begin a fault; it ends by itself."""
        if self.closing:
            return
        if fault.target == LEADER:
            leader = self.leader()
            if leader is None:
                return
            on_host = fault.name.startswith(("net.", "host.", "clock."))
            target = leader.host.name if on_host else leader.name
            others = tuple(host for host in fault.others if host != target)
            fault = replace(fault, target=target, others=others)
        undo = self._inject(fault)
        if undo is None:
            return
        self.injected[fault.name] = self.injected.get(fault.name, 0) + 1
        self.say("fault", f"begins: {fault}")
        self.scheduler.at(self.scheduler.now_us + fault.for_us, self._undo, fault, undo)

    def _undo(self, fault: Fault, undo: Callable[[], None]) -> None:
        self.say("fault", f"ends:   {fault}")
        undo()

    def _inject(self, fault: Fault) -> Callable[[], None] | None:
        process = self._processes.get(fault.target)
        if fault.name.startswith(("process.", "disk.lost", "disk.wiped")) and (
            process is None or not process.alive
        ):
            return None
        match fault.name:
            case "process.kill":
                assert process is not None
                process.kill()
                return lambda: self._spawn(fault.target)
            case "process.restart":
                assert process is not None
                if isinstance(process, StoreProcess | MasterProcess):
                    if process.paused:
                        return None
                    process.stop()
                else:
                    process.kill()
                return lambda: self._spawn_after_stop(fault.target)
            case "process.pause":
                assert process is not None
                process.pause()
                return process.resume
            case "process.slow":
                assert process is not None
                slow_us = int(fault.amount * 1_000)
                process.slow_us += slow_us
                return lambda: _slow(process, -slow_us)
            case "store.drain_under_load":
                return self._hold(fault.target, HoldKind.DRAIN)
            case "store.migrate":
                return self._hold(fault.target, HoldKind.DRAIN, migrate=True)
            case "store.cordon":
                return self._hold(fault.target, HoldKind.CORDON)
            case "etcd.member" | "etcd.leader" | "etcd.quorum":
                return self._pause_etcd(fault)
            case "host.power":
                return self._power_off(self._hosts[fault.target])
            case "clock.skew":
                host = self._hosts[fault.target]
                host.wall_step_ms += int(fault.amount)
                return lambda: _step(host, -int(fault.amount))
            case "disk.slow":
                disk = self._disks[fault.target]
                disk.slow_us += int(fault.amount * 1_000)
                return lambda: _slow(disk, -int(fault.amount * 1_000))
            case "disk.lost" | "disk.wiped":
                assert process is not None
                process.kill()
                if fault.name == "disk.lost":
                    self._disks[fault.target].lose_journal()
                else:
                    self._disks[fault.target].lose_everything()
                    self.oracle.state_lost()
                return lambda: self._spawn(fault.target)
            case "net.partition" | "net.oneway":
                routes = self._routes(fault)
                for route in routes:
                    self.net.cut_route(route)
                return lambda: self._heal(routes)
            case "net.delay" | "net.loss":
                delay_us = int(fault.amount * 1_000) if fault.name == "net.delay" else 0
                trouble = Trouble(delay_us=delay_us, loss=fault.amount if fault.name == "net.loss" else 0.0)
                for route in self._routes(fault):
                    self.net.add_trouble(route, trouble)
                return lambda: self._untrouble(fault, trouble)
            case "net.reset":
                self._reset(fault)
                return lambda: None
            case _:
                raise ValueError(f"no fault {fault.name}")

    def _spawn_after_stop(self, name: str) -> None:
        old = self._processes.get(name)
        if old is not None and old.alive:  # it has not ended yet
            self.scheduler.at(self.scheduler.now_us + 100_000, self._spawn_after_stop, name)
        else:
            self._spawn(name)

    def _power_off(self, host: Host) -> Callable[[], None] | None:
        if not host.up:
            return None
        host.up = False
        for process in list(self._processes.values()):
            if process.host is host and process.alive:
                process.power_off()

        def power_on() -> None:
            host.up = True
            for name in self._names:
                if host_of(name, self.plan.config) == host.name:
                    self._spawn(name)

        return power_on

    def _hold(self, store: str, kind: HoldKind, *, migrate: bool = False) -> Callable[[], None] | None:
        leader = self.leader()
        if leader is None or leader.paused or self._draining.get(store):
            return None

        def held() -> None:
            if self._draining.get(store) is not hold:
                return
            if kind is HoldKind.CORDON or migrate:
                self.oracle.cordoned(store)
            else:
                self.oracle.drained(store)

        hold = self._draining[store] = object()
        if kind is HoldKind.DRAIN and not migrate:
            self.oracle.draining(store)
        try:
            leader.hold(store, kind, held, migrate=migrate)
        except KvopsError:
            del self._draining[store]  # it has never mounted, or another drain must be undone first
            return None
        return lambda: self._undrain(store)

    def drain_begins(self, store: str) -> Callable[[], None] | None:
        """What a store held has been copied as far as it could: what is left may go. What to call once that lasts."""
        drain = self._draining.get(store)
        if drain is None:
            return None  # it is being undone
        self.oracle.draining(store)
        return lambda: self.oracle.drained(store) if self._draining.get(store) is drain else None

    def _undrain(self, store: str) -> None:
        """Whoever leads by now is asked; as long as nobody does, again later."""
        self._draining.pop(store, None)
        self.oracle.undrained(store)
        leader = self.leader()
        if leader is not None and not leader.paused:
            try:
                leader.undrain(store)
                return
            except KvopsError:
                pass
        self.scheduler.at(self.scheduler.now_us + UNDRAIN_US, self._undrain, store)

    def _pause_etcd(self, fault: Fault) -> Callable[[], None] | None:
        names = etcd_names(self.plan.config)
        leader = self.etcd.leader or fault.target
        first = leader if fault.name == "etcd.leader" else fault.target
        count = 2 if fault.name == "etcd.quorum" else 1
        paused = [
            self._processes[name]
            for name in (first, *(name for name in names if name != first))
            if name in self._processes
        ][:count]
        for process in paused:
            process.pause()

        def resume() -> None:
            for process in paused:
                process.resume()

        return resume

    def _reset(self, fault: Fault) -> None:
        routes = set(self._routes(fault))
        for process in list(self._processes.values()):
            for end in list(process.ends):
                if end.route in routes and end.open and end.peer.open:
                    # Somebody in between sends a reset to both.
                    end._dropping = end.peer._dropping = True
                    end.close(abrupt=True)
                    end.on_close(end)

    def _heal(self, routes: list[int]) -> None:
        for route in routes:
            self.net.heal_route(route)

    def _untrouble(self, fault: Fault, trouble: Trouble) -> None:
        for route in self._routes(fault):
            self.net.remove_trouble(route, trouble)

    # A run.

    def _check(self) -> None:
        self.oracle.check()
        if not self.closing:
            self.scheduler.at(self.scheduler.now_us + CHECK_US, self._check)

    def run(self) -> None:
        """
        All of it, to the end.

        Raises:
            Violation: Something did not hold.
        """
        duration_us = self.plan.config.duration_ms * 1_000
        for fault in self.plan.faults:
            self.scheduler.at(fault.at_us, self.inject, fault)
        if self.plan.config.masters > 1:
            self.etcd.start()
        self.scheduler.at(CHECK_US, self._check)
        self.scheduler.run(duration_us)
        self._settle()

    def _settle(self) -> None:
        """No new faults; what lasts ends; a core of hosts must come to rest and serve."""
        self.closing = True
        self.say("run", "no new faults and calls")
        last_us = max((fault.at_us + fault.for_us for fault in self.plan.faults), default=0)
        core_hosts = {name for name in self._hosts if name not in self.plan.lost_for_good}
        for lost in self.plan.lost_for_good:
            for other in core_hosts:
                self.net.cut_route(self._route(lost, other))
                self.net.cut_route(self._route(other, lost))
            self.say("fault", f"{lost} is cut off for good")
        self.scheduler.run(max(self.scheduler.now_us, last_us) + SETTLE_STEP_US)
        for name in self._names:
            self._spawn(name)
        config = self.plan.config
        core = {name for name in store_names(config) if host_of(name, config) in core_hosts}
        limit_us = self.scheduler.now_us + SETTLE_US
        while why := self._unsettled(core):
            if self.scheduler.now_us >= limit_us:
                raise Violation("liveness", f"{SETTLE_US // 1_000_000} s after the last fault: {why}")
            self.scheduler.run(self.scheduler.now_us + SETTLE_STEP_US)
        self.say("run", "all is quiet")
        leader = self.leader()
        assert leader is not None
        self.oracle.check_quiet(leader, core)
        self._serve(core_hosts)

    def _unsettled(self, core: set[str]) -> str:
        leader = self.leader()
        return "no master leads" if leader is None else self.oracle.unsettled(leader, core)

    def _serve(self, core_hosts: set[str]) -> None:
        """Every client of the core is served again, at the latest once its breakers have tried."""
        clients = [
            one
            for one in self._processes.values()
            if isinstance(one, ClientProcess) and one.host.name in core_hosts
        ]
        waiting = {client.name for client in clients}
        limit_us = self.scheduler.now_us + SERVE_US
        turn = 0
        while waiting:
            if self.scheduler.now_us >= limit_us:
                raise Violation("liveness", f"{', '.join(sorted(waiting))}: no put and get works")
            for client in clients:
                if client.name in waiting:
                    client.spawn(client.probe, self._probe_keys[client.name][turn % 8], waiting)
            turn += 1
            self.scheduler.run(self.scheduler.now_us + 2_500_000)


def _slow(what: Process | Disk, by_us: int) -> None:
    what.slow_us += by_us


def _step(host: Host, by_ms: int) -> None:
    host.wall_step_ms += by_ms


def run(plan: Plan, *, recording: bool = False) -> Result:
    """Carry out a plan and judge it; the same plan gives the same result, trace and all."""
    with tempfile.TemporaryDirectory(prefix="kvops-sim-", dir=_fast_directory()) as directory:
        world = World(plan, Path(directory), recording=recording)
        invariant, violation = "", None
        collecting = gc.isenabled()
        gc.disable()  # one run leaves little: its cycles are collected between runs
        try:
            world.run()
        except Violation as found:
            invariant, violation = found.invariant, found.what
        except (AssertionError, KvopsError, LookupError, TypeError, ValueError) as error:
            invariant, violation = "accounts" if isinstance(error, AssertionError) else "crash", _where(error)
        finally:
            if collecting:
                gc.enable()
    at_us = world.scheduler.now_us
    if violation is not None:
        world.say("FAIL", f"{invariant}: {violation}")
    return Result(
        violation=violation,
        invariant=invariant,
        at_us=at_us,
        messages=world.net.messages,
        trace=world.net.trace.hexdigest(),
        simulated_us=at_us,
        outcomes={reason.value: count for reason, count in world.oracle.outcomes.items() if count},
        faults=world.injected,
        calls=world.oracle.calls,
        evicted=world.oracle.evicted,
        timeline=world.timeline,
    )


def _where(error: Exception) -> str:
    """What an assertion says, and where it stands."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    assert frame is not None
    code = frame.tb_frame.f_code
    place = f"{Path(code.co_filename).name}:{frame.tb_lineno} {code.co_name}"
    text = str(error).strip()
    return f"{type(error).__name__} at {place}{': ' if text else ''}{text}"


def _fast_directory() -> str | None:
    """Term files are synced: memory makes that quick."""
    shm = Path("/dev/shm")  # noqa: S108 (a file system, not a file)
    return str(shm) if shm.is_dir() else None


assert PART_BYTES < SEGMENT_BYTES // 2
