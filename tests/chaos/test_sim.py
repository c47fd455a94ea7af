"""The simulator: correct code passes every seed, what is broken on purpose is caught, a failure replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random

import pytest

from kvops.chaos.sim.campaign import run_seeds
from kvops.chaos.sim.clock import Host, Scheduler
from kvops.chaos.sim.disk import Disk, JournalModel
from kvops.chaos.sim.net import Network
from kvops.chaos.sim.plan import FAULTS_DEFAULT, Config, draw
from kvops.chaos.sim.shrink import shrink
from kvops.chaos.sim.world import run
from tests.chaos.mutants import MUTANTS
from tests.store.test_journal_writer import MOUNTED, stored
from tests.waiting import WAIT_S

SHORT = Config(stores=3, clients=4, duration_ms=2_500, ops_per_s=5, faults_per_s=1.2)
SEEDS = 500
SLICES = 25

CRASHES = Config(
    stores=3, clients=4, duration_ms=5_000, ops_per_s=12, stalls=0.2, faults=("process.kill", "host.power")
)
CUTS = Config(
    stores=3,
    clients=4,
    duration_ms=5_000,
    ops_per_s=12,
    stalls=0.2,
    faults_per_s=2,
    faults=("process.kill", "net.partition", "net.oneway"),
)
AWAY = Config(
    stores=3,
    clients=4,
    duration_ms=10_000,
    ops_per_s=10,
    crowding=0.5,
    removes=0.3,
    faults_per_s=1,
    faults=("net.partition",),
    roles=("store",),
)
STALLS = Config(
    stores=1, clients=8, workers=4, duration_ms=6_000, ops_per_s=20, stalls=0.4, sizes=(1_000,), faults=()
)
CROWD = Config(stores=2, clients=6, duration_ms=3_000, ops_per_s=20, crowding=3, faults_per_s=0.2)
CLOCKS = Config(stores=3, clients=4, duration_ms=5_000, faults_per_s=2, faults=("clock.skew",))
PARTS = Config(stores=2, clients=6, duration_ms=5_000, ops_per_s=10)

ELECTIONS = Config(
    masters=3, stores=2, clients=3, duration_ms=6_000, ops_per_s=10, crowding=0.5, faults_per_s=2, faults=()
)
LAGS = replace(
    ELECTIONS,
    ops_per_s=40,
    faults_per_s=8,
    faults=("net.partition", "net.oneway", "process.kill"),
    roles=("leader",),
)
ISOLATED = replace(ELECTIONS, faults=("net.partition", "net.oneway"), roles=("leader",))
BEHIND = replace(
    ELECTIONS,
    ops_per_s=20,
    faults_per_s=4,
    faults=("net.partition", "process.kill"),
    roles=("leader", "master"),
)
SHORT_ELECTIONS = Config(masters=3, stores=3, clients=3, duration_ms=3_000, faults_per_s=1.5)

DRAINS = Config(
    stores=3,
    clients=4,
    duration_ms=6_000,
    ops_per_s=12,
    faults_per_s=2.5,
    faults=("store.drain_under_load", "process.kill"),
    roles=("leader",),
)
LEAVES = Config(
    stores=3,
    clients=4,
    duration_ms=5_000,
    ops_per_s=12,
    faults_per_s=2,
    faults=("process.restart",),
    roles=("store",),
)
CORDONS = Config(
    stores=3,
    clients=4,
    duration_ms=5_000,
    ops_per_s=12,
    faults_per_s=2,
    faults=("store.cordon", "store.migrate"),
)
MOVES = Config(
    stores=3,
    clients=6,
    duration_ms=6_000,
    ops_per_s=20,
    crowding=0.4,
    removes=0.5,
    faults_per_s=4,
    faults=("store.migrate", "net.delay"),
    roles=("store",),
)

CASES = {
    "no-generation-check": STALLS,
    "no-chunk-digests": STALLS,
    "slots-not-cleared": CROWD,
    "memory-reused-early": CROWD,
    "no-term-fencing": CRASHES,
    "term-not-raised": CRASHES,
    "wrong-incarnation": CRASHES,
    "whole-without-all-parts": PARTS,
    "evicts-leased": CROWD,
    "adopts-removed": AWAY,
    "acknowledged-before-written": CUTS,
    "wall-clock": CLOCKS,
    "drain-forgets-hold": DRAINS,
    "acknowledged-before-replicated": LAGS,
    "leased-before-replicated": BEHIND,
    "leads-past-its-lease": ISOLATED,
    "laggards-campaign": BEHIND,
    "term-not-raised-in-etcd": BEHIND,
    "leaves-before-readers-end": LEAVES,
    "cordon-ignored": CORDONS,
    "copies-whatever-became-of-it": MOVES,
}
"""Where each mutation shows soonest."""
CATCH_SEEDS = 25


@pytest.mark.parametrize("part", range(SLICES))
def test_the_correct_code_passes(part: int) -> None:
    """No seed breaks a rule, whatever its faults; then everything comes to rest and serves."""
    seeds = range(part * SEEDS // SLICES, (part + 1) * SEEDS // SLICES)

    broken = [
        (seed, result.invariant, result.violation)
        for seed, result in run_seeds(seeds, SHORT)
        if result.violation is not None
    ]

    assert not broken


@pytest.mark.parametrize("part", range(8))
def test_three_masters_pass(part: int) -> None:
    """Nor does one with elections, standbys and an etcd that fails as well."""
    broken = [
        (seed, result.invariant, result.violation)
        for seed, result in run_seeds(range(part * 10, (part + 1) * 10), SHORT_ELECTIONS)
        if result.violation is not None
    ]

    assert not broken


def test_every_mutation_has_a_case() -> None:
    """A mutation that nothing runs proves nothing."""
    assert CASES.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", CASES)
def test_mutations_are_caught(name: str) -> None:
    """Code that is broken on purpose breaks a rule within a few seeds, which the correct code passes."""
    config = CASES[name]

    caught = next(
        (seed for seed, result in run_seeds(range(CATCH_SEEDS), config, mutate=name) if result.violation),
        None,
    )

    assert caught is not None
    assert run(draw(caught, config)).violation is None


def test_a_seed_replays_exactly() -> None:
    """The same seed gives the same messages at the same times, in another process with other hashes too."""
    code = (
        "from kvops.chaos.sim.plan import Config, draw\nfrom kvops.chaos.sim.world import run\n"
        "r = run(draw(7, Config(masters=3, duration_ms=4000)))\nprint(r.trace, r.messages, r.at_us)"
    )
    root = Path(__file__).parents[2]

    here = run(draw(7, Config(masters=3, duration_ms=4_000)))
    there = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]

    assert there == [[here.trace, str(here.messages), str(here.at_us)]] * 2


def test_a_seed_replays_an_hour_later() -> None:
    """The machine's clock has no part in a run: terms of a single master, too, are the simulator's own."""
    code = (
        "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n"
        "from kvops.chaos.sim.plan import Config, draw\nfrom kvops.chaos.sim.world import run\n"
        "print(run(draw(3, Config(masters=1, duration_ms=3000))).trace)"
    )

    later = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert later.stdout.split() == [run(draw(3, Config(masters=1, duration_ms=3_000))).trace]


def test_seeds_differ() -> None:
    """Another seed is another history."""
    config = Config(duration_ms=2_000)

    assert len({run(draw(seed, config)).trace for seed in range(3)}) == 3


def test_all_faults_are_drawn_and_the_pool_works_between_them() -> None:
    """A campaign that injects nothing, or in which nothing is read, evicted or refused, would prove nothing."""
    wanted = {"HIT", "STORED", "EXISTS", "MISS", "TIMEOUT", "MASTER_DOWN", "STALE", "STORE_DOWN"}
    faults: set[str] = set()
    outcomes: set[str] = set()
    evicted = 0
    alone = run_seeds(range(60), Config(duration_ms=6_000, faults_per_s=1.5))
    for _, result in chain(run_seeds(range(10), SHORT_ELECTIONS), alone):
        faults |= result.faults.keys()
        outcomes |= result.outcomes.keys()
        evicted += result.evicted
        if faults == set(FAULTS_DEFAULT) and outcomes >= wanted and evicted:
            break

    assert faults == set(FAULTS_DEFAULT)
    assert outcomes >= wanted
    assert evicted


def test_shrinking_leaves_what_it_takes() -> None:
    """A failing run becomes smaller, breaks the same rule, and tells how."""
    with MUTANTS["memory-reused-early"]():
        plans = (draw(seed, CROWD) for seed in range(CATCH_SEEDS))
        plan, first = next((plan, result) for plan in plans if (result := run(plan)).invariant == "leases")

        smaller, result, runs = shrink(plan, first, runs_max=80, time_s_max=4 * WAIT_S)
        again = run(smaller)

    assert result.invariant == "leases"
    assert len(smaller.ops) < len(plan.ops) / 2
    assert "FAIL" in result.timeline[-1]
    assert again.trace == result.trace
    assert runs <= 80


class _Owner:
    """Calls what its timers are for, on a scheduler of its own."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()

    def timer(self, after_us: int, call: object, *args: object) -> None:
        self.scheduler.at(self.scheduler.now_us + after_us, call, *args)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
def test_a_torn_journal_recovers_to_a_whole_batch(seed: int, tmp_path: Path) -> None:
    """Whatever a kill or a power loss leaves of the last write, recovery gives the batches before it, in order."""
    rng = Random(seed)
    disk, owner = Disk(tmp_path / "master", rng), _Owner()
    journal = JournalModel(disk, owner, next_sequence=0)  # type: ignore[arg-type]
    journal.append(*MOUNTED)
    for number in range(20):
        journal.append(*stored({number: number}))
        owner.scheduler.run(owner.scheduler.now_us + rng.randrange(3_000))
    journal.killed()
    if seed % 2:
        disk.lose_power()

    numbers = sorted(disk.recover().rows["location"]["generation"].tolist())

    assert numbers == list(range(len(numbers)))


def test_streams_keep_their_order_and_lose_nothing_until_reset() -> None:
    """Frames of a stream arrive once and in order through delay and a cut that heals."""
    scheduler = Scheduler()
    net = Network(scheduler, Random(1))
    hosts = [Host(name, at, rate=1.0, boot_ms=0) for at, name in enumerate("ab")]
    for host in hosts:
        net.add_host(host)

    class Peer:
        alive, paused, slow_us = True, False, 0

        def __init__(self, host: Host) -> None:
            self.host, self.ends, self.got = host, {}, []

        def accept(self, end: object, kind: int, request: int, body: bytes, payload: object) -> None:
            end.on_frame = lambda end, kind, request, body, payload: self.got.append(request)  # type: ignore[attr-defined]

    caller, listener = Peer(hosts[0]), Peer(hosts[1])
    net.listen("there", listener)  # type: ignore[arg-type]
    end = net.connect(caller, "there", b"", 1)  # type: ignore[arg-type]
    for number in range(50):
        if number == 20:
            net.cut_route(end.route)
        end.send(16, number)
        scheduler.run(scheduler.now_us + 50)
    before = list(listener.got)
    net.heal_route(end.route)
    scheduler.run(scheduler.now_us + 10_000_000)

    assert before == list(range(len(before)))
    assert len(before) <= 20
    assert listener.got == list(range(50))
