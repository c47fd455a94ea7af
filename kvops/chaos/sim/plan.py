"""What one run does: a workload and faults, drawn from a seed, that can be made smaller and run again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kvops.limits import LEASE_TTL_MS, PART_CHUNK_BYTES

SIZES: Final = (100, 100, 300, 1_000, 1_000, 3_000)
PART_BYTES: Final = 2 * PART_CHUNK_BYTES + 77
SEGMENT_BYTES: Final = 24 << 10
FAULTS_MAX: Final = 100_000
LEADER: Final = "leader"
"""As a fault's target: whichever master leads when it begins, or its host."""

FAULTS: Final = {
    "process.kill": "SIGKILL; a supervisor starts it again after a while",
    "process.pause": "SIGSTOP with its sockets open, then SIGCONT",
    "process.restart": "SIGTERM, then started again",
    "process.slow": "every frame it sends is late",
    "net.partition": "one host is cut off from some or all others",
    "net.oneway": "… in one direction only",
    "net.delay": "a link is slow, and varies",
    "net.loss": "segments are lost: streams stall for retransmissions",
    "net.reset": "all streams between two hosts are reset",
    "host.power": "a host loses power: nobody is told, unsynced bytes are torn off its files",
    "clock.skew": "its wall clock jumps, forwards or back",
    "store.drain_under_load": "a store is drained, and undrained after a while",
    "store.migrate": "a store is drained once its objects are copied elsewhere, and undrained after a while",
    "store.cordon": "a store gets no new objects for a while",
    "disk.slow": "every write of a master's disk takes long",
    "disk.lost": "a master is killed, and its journal is gone",
    "etcd.member": "a member of etcd is paused",
    "etcd.leader": "etcd's leader is paused",
    "etcd.quorum": "two of etcd's three members are paused",
    "disk.wiped": "a master is killed, and its whole state directory is gone, the term too",
}
"""Fault names, as the rest of ``kvops chaos`` spells them."""

FAULTS_DEFAULT: Final = tuple(name for name in FAULTS if name != "disk.wiped")
"""
What a run draws from unless told otherwise. A master that has lost its term grants generations again until a store
that has seen them mounts; a pool of one master does not promise to survive that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How large a run is."""

    masters: int = 1  # from two on, elected in an etcd of three members
    ttl_s: int = 1  # of a leader's lease there
    stores: int = 4
    clients: int = 6
    duration_ms: int = 10_000
    ops_per_s: float = 6.0  # of one client
    faults_per_s: float = 1.0
    faults: tuple[str, ...] = FAULTS_DEFAULT  # that may be drawn
    roles: tuple[str, ...] = (
        "leader",
        "master",
        "store",
        "store",
        "client",
        "etcd",
    )  # that faults are aimed at
    workers: int = 2  # threads of one client
    crowding: float = 1.3  # bytes of all keys, in capacities
    stalls: float = 0.06  # of all calls: the engine stands still in the middle
    removes: float = 0.12  # … are removes
    sizes: tuple[int, ...] = SIZES  # of objects, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of an engine."""

    id: int
    client: int
    worker: int
    at_us: int
    kind: str  # get, put, part, fetch, remove, exists
    keys: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    replicas: int = 1
    ttl_ms: int = 0
    soft_pin: bool = False
    hard_pin: bool = False
    depth: int = 0
    part: tuple[int, int] | None = None  # offset and length of the object
    length: int = 0  # of the part
    deadline_ms: int = 200
    stall_ms: int = 0  # the engine does nothing for so long, in the middle
    stall_inside: bool = False  # … of a copy, rather than before it

    def of(self, keys: list[str]) -> Op:
        """The same for some of its keys."""
        sizes = dict(zip(self.keys, self.sizes, strict=True))
        return replace(self, keys=tuple(keys), sizes=tuple(sizes[key] for key in keys))

    def __str__(self) -> str:
        """A word on a timeline."""
        part = f" part {self.part[0]}+{self.length}" if self.part else ""
        stall = f" stalls {self.stall_ms} ms" if self.stall_ms else ""
        return f"op {self.id} {self.kind} {','.join(self.keys)}{part}{stall}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, from a time on for a while."""

    at_us: int
    name: str
    target: str  # a process or a host
    for_us: int
    others: tuple[str, ...] = ()  # hosts at the other end of links
    amount: float = 0.0

    def __str__(self) -> str:
        """A word on a timeline."""
        amount = f" {self.amount:g}" if self.amount else ""
        others = f" from {','.join(self.others)}" if self.others else ""
        return f"{self.name} {self.target}{others}{amount} for {self.for_us // 1_000} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that happens in a run, but for the luck of single frames, which ``seed`` decides."""

    seed: int
    config: Config
    ops: tuple[Op, ...]
    faults: tuple[Fault, ...]
    lost_for_good: tuple[str, ...] = ()  # hosts outside the core: they stay cut off when the faults stop


def store_names(config: Config) -> list[str]:
    """Every store."""
    return [f"store-{index}" for index in range(config.stores)]


def master_names(config: Config) -> list[str]:
    """Every master."""
    return [f"master-{index}" for index in range(config.masters)]


def etcd_names(config: Config) -> list[str]:
    """Every member of etcd, if there is one."""
    return [f"etcd-{index}" for index in range(3)] if config.masters > 1 else []


def client_names(config: Config) -> list[str]:
    """Every client."""
    return [f"client-{index}" for index in range(config.clients)]


def host_of(name: str, config: Config) -> str:
    """The machine a process runs on: a client shares one with a store."""
    if name == LEADER:
        return name
    role, _, number = name.rpartition("-")
    return f"node-{int(number) % config.stores}" if role in ("client", "store") else f"{role}-host-{number}"


def draw(seed: int, config: Config) -> Plan:
    """The plan of a seed."""
    rng = Random(seed)
    ops = _draw_ops(rng, config)
    faults = _draw_faults(rng, config)
    lost: tuple[str, ...] = ()
    if config.stores > 2 and faults and rng.random() < 0.3:
        lost = (host_of(rng.choice(store_names(config)), config),)
    return Plan(
        seed=rng.getrandbits(48), config=config, ops=tuple(ops), faults=tuple(faults), lost_for_good=lost
    )


def _draw_ops(rng: Random, config: Config) -> list[Op]:
    # More than fits, so that memory is reused all the time; a few keys are far more popular than the rest.
    capacity = config.stores * SEGMENT_BYTES
    keys = [f"k{number}" for number in range(max(4, int(config.crowding * capacity / 1_000)))]
    shared = [f"p{number}" for number in range(2)]
    sizes = {key: rng.choice(config.sizes) for key in keys}
    duration_us = config.duration_ms * 1_000
    ops: list[Op] = []
    for client in range(config.clients):
        at_us = 0
        while True:
            at_us += int(rng.expovariate(config.ops_per_s) * 1_000_000) + 1
            if at_us >= duration_us:
                break
            worker = rng.randrange(config.workers)
            ops += _draw_op(rng, config, client, worker, at_us, keys, shared, sizes)
    ops.sort(key=lambda op: op.at_us)
    for number, op in enumerate(ops):
        object.__setattr__(op, "id", number)  # nobody else has it yet: a copy would be most of a plan's cost
    return ops


def _draw_op(
    rng: Random,
    config: Config,
    client: int,
    worker: int,
    at_us: int,
    keys: list[str],
    shared: list[str],
    sizes: dict[str, int],
) -> list[Op]:
    def pick() -> str:
        return keys[int(len(keys) * rng.random() ** 2.5)]

    roll = rng.random()
    if roll < 0.03:
        # Three ranks write one object, each its range, the last one everything once more.
        key, chunk = rng.choice(shared), PART_CHUNK_BYTES
        ranges = [(0, chunk), (chunk, chunk), (2 * chunk, PART_BYTES - 2 * chunk), (0, PART_BYTES)]
        return [
            Op(
                id=0,
                client=rng.randrange(config.clients),
                worker=rng.randrange(config.workers),
                at_us=at_us + rng.randrange(30_000),
                kind="part",
                keys=(key,),
                sizes=(PART_BYTES,),
                part=(start, PART_BYTES),
                length=length,
                deadline_ms=500,
            )
            for start, length in ranges[: rng.choice((2, 3, 3, 3, 4))]
        ]
    removes = rng.random() < config.removes
    kind = "remove" if removes else "get" if roll < 0.4 else "fetch" if roll < 0.7 else "put"
    if kind == "get" and rng.random() < 0.1:
        kind = "exists"
    count = 1 if kind == "remove" else rng.choice((1, 1, 1, 2, 4))
    chosen = list(dict.fromkeys(pick() for _ in range(count)))
    if kind in ("get", "remove") and rng.random() < 0.1:
        chosen = [rng.choice(shared)]
    stall_ms, deadline_ms = 0, rng.choice((50, 200, 200, 200, 1_000))
    if rng.random() < config.stalls:
        stall_ms = rng.choice((20, 300, LEASE_TTL_MS, LEASE_TTL_MS + 400, 2_500))
        deadline_ms = rng.choice((500, 3_000, 5_000))
    return [
        Op(
            id=0,
            client=client,
            worker=worker,
            at_us=at_us,
            kind=kind,
            keys=tuple(chosen),
            sizes=tuple(sizes.get(key, PART_BYTES) for key in chosen),
            replicas=rng.choice((1, 1, 1, 1, 2)) if config.stores > 1 else 1,
            ttl_ms=rng.choice((0, 0, 0, 0, 0, 0, 300, 2_500)),
            soft_pin=rng.random() < 0.05,
            hard_pin=rng.random() < 0.01,
            depth=rng.randrange(4),
            deadline_ms=deadline_ms,
            stall_ms=stall_ms,
            stall_inside=rng.random() < 0.5,
        )
    ]


def _draw_faults(rng: Random, config: Config) -> list[Fault]:
    faults: list[Fault] = []
    duration_us = config.duration_ms * 1_000
    at_us = 0
    while config.faults and config.faults_per_s > 0 and len(faults) < FAULTS_MAX:
        at_us += int(rng.expovariate(config.faults_per_s) * 1_000_000) + 1
        if at_us >= duration_us:
            break
        faults.append(_draw_fault(rng, config, at_us))
    return faults


def _draw_fault(rng: Random, config: Config, at_us: int) -> Fault:
    names = [name for name in config.faults if config.masters > 1 or not name.startswith("etcd.")]
    name = rng.choice(names)
    masters, stores, clients = master_names(config), store_names(config), client_names(config)
    etcd = etcd_names(config)
    groups = {
        "leader": [LEADER],
        "master": masters,
        "store": stores,
        "client": clients,
        "etcd": etcd or stores,
    }
    target = rng.choice(groups[rng.choice(config.roles)])
    for_ms = rng.choice((30, 300, 300, 1_200, 1_200, 2_500, 5_000))
    amount = 0.0
    others: tuple[str, ...] = ()
    hosts = sorted({host_of(one, config) for one in (*masters, *stores, *clients, *etcd)})
    if name.startswith("disk."):
        target = rng.choice(masters)
        amount = rng.choice((20, 200, 1_000)) if name == "disk.slow" else 0.0
    elif name.startswith("store."):
        target = rng.choice(stores)
        for_ms = rng.choice((300, 2_500, 5_000, 5_000))
    elif name == "process.slow":
        amount = rng.choice((1, 5, 50, 300))
    elif name == "clock.skew":
        target = host_of(target, config)
        amount = rng.choice((-86_400_000, -5_000, -800, 800, 5_000, 86_400_000))
    elif name == "host.power":
        target = host_of(target, config)
    elif name.startswith("etcd."):
        target = rng.choice(etcd)
    elif name.startswith("net."):
        target = host_of(target, config)
        rest = [host for host in hosts if host != target]
        others = tuple(rest if rng.random() < 0.4 else sorted(rng.sample(rest, rng.randint(1, len(rest)))))
        if etcd and rng.random() < 0.25:
            others = tuple(host_of(one, config) for one in etcd if host_of(one, config) != target)
        if name == "net.delay":
            amount = rng.choice((1, 10, 100, 500))
        elif name == "net.loss":
            amount = rng.choice((0.02, 0.1, 0.4))
        elif name == "net.oneway":
            amount = rng.choice((-1.0, 1.0))  # what the target sends, or what it is sent
    return Fault(
        at_us=at_us, name=name, target=target, for_us=for_ms * 1_000, others=tuple(others), amount=amount
    )
