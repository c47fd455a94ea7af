"""The simulator: correct code passes every seed, what is broken on purpose is caught, a failure replays exactly."""

from __future__ import annotations

import os
import subprocess
import sys
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

SHORT = Config(stores=3, clients=4, duration_ms=2_500, ops_per_s=5, faults_per_s=1.2)
SEEDS = 500
SLICES = 10

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
    faults_per_s=0.6,
    faults=("net.partition",),
)
STALLS = Config(
    stores=1, clients=8, workers=4, duration_ms=6_000, ops_per_s=20, stalls=0.4, sizes=(1_000,), faults=()
)
CROWD = Config(stores=2, clients=6, duration_ms=3_000, ops_per_s=20, crowding=3, faults_per_s=0.2)
CLOCKS = Config(stores=3, clients=4, duration_ms=5_000, faults_per_s=2, faults=("clock.step",))
PARTS = Config(stores=2, clients=6, duration_ms=5_000, ops_per_s=10)

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
        "r = run(draw(7, Config(duration_ms=4000)))\nprint(r.trace, r.messages, r.at_us)"
    )
    root = Path(__file__).parents[2]

    here = run(draw(7, Config(duration_ms=4_000)))
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


def test_seeds_differ() -> None:
    """Another seed is another history."""
    config = Config(duration_ms=2_000)

    assert len({run(draw(seed, config)).trace for seed in range(3)}) == 3


def test_all_faults_are_drawn_and_the_pool_works_between_them() -> None:
    """A campaign that injects nothing, or in which nothing is read, evicted or refused, would prove nothing."""
    faults: set[str] = set()
    outcomes: set[str] = set()
    evicted = 0
    for _, result in run_seeds(range(40), Config(duration_ms=6_000, faults_per_s=1.5)):
        faults |= result.faults.keys()
        outcomes |= result.outcomes.keys()
        evicted += result.evicted
        if faults == set(FAULTS_DEFAULT) and outcomes >= {"HIT", "STORED", "STALE", "STORE_DOWN"} and evicted:
            break

    assert faults == set(FAULTS_DEFAULT)
    assert outcomes >= {"HIT", "STORED", "EXISTS", "MISS", "TIMEOUT", "MASTER_DOWN", "STALE", "STORE_DOWN"}
    assert evicted


def test_shrinking_leaves_what_it_takes() -> None:
    """A failing run becomes smaller, breaks the same rule, and tells how."""
    with MUTANTS["memory-reused-early"]():
        plans = (draw(seed, CROWD) for seed in range(CATCH_SEEDS))
        plan, first = next((plan, result) for plan in plans if (result := run(plan)).invariant == "leases")

        smaller, result, runs = shrink(plan, first, runs_max=80, time_s_max=20)
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
    """Whatever a kill or a power loss leaves of the last write, recovery gives the notes before it, in order."""
    rng = Random(seed)
    disk, owner = Disk(tmp_path / "master", rng), _Owner()
    journal = JournalModel(disk, owner, next_sequence=0)  # type: ignore[arg-type]
    for number in range(20):
        journal.append_note({"number": number})
        owner.scheduler.run(owner.scheduler.now_us + rng.randrange(3_000))
    journal.killed()
    if seed % 2:
        disk.lose_power()

    numbers = [note["number"] for note in disk.recover().notes]

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
