"""Drains, undrains and ends of real stores, beside clients that read and write."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvops import PutOptions
from kvops.errors import KvopsError
from kvops.files import read_secret
from kvops.limits import LEASE_MARGIN_MS, LEASE_TTL_MS, STORE_TTL_MS
from kvops.store.control import ControlClient
from kvops.store.model import HoldState, Reason, StoreState
from tests.pool import LocalPool, Member
from tests.store.test_pool import page, read, spread
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process

SIZE = 4_096


@pytest.fixture(scope="module")
def running() -> Iterator[LocalPool]:
    pool = LocalPool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture
def pool(running: LocalPool) -> Iterator[LocalPool]:
    """A pool in order; holds and what a test did to its members are undone afterwards."""
    yield running
    if not running.master.alive or running.master.stopped:
        running.heal_master()
    with control(running) as client:
        held = [hold.target for hold in client.holds().holds]
        if held:
            client.undrain(held)
    running.heal()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Keys of one test begin with this."""
    return f"{request.node.name}/"


def control(pool: LocalPool) -> ControlClient:
    """The master's control service."""
    return ControlClient(pool.master.addresses["control"], read_secret(pool.secret_file), timeout_s=WAIT_S)


def hold_state(client: ControlClient, target: str) -> HoldState | None:
    """How far a target's hold has come."""
    return next((hold.state for hold in client.holds().holds if hold.target == target), None)


def wait_drained(client: ControlClient, target: str) -> None:
    until(lambda: hold_state(client, target) is HoldState.DRAINED, f"{target} is drained")


def test_nothing_names_a_store_after_its_drain(pool: LocalPool, prefix: str) -> None:
    """Clients read and write all the while: after each reply no lookup names the store, and no byte is wrong."""
    where = spread(pool, prefix, per_store=20, size=SIZE)
    keys = list(where)
    victim = pool.stores[1]
    stop = threading.Event()
    troubles: list[str] = []
    reads = [0]

    def reader() -> None:
        client = pool.connect(host="host-9", name="reader")
        while not stop.is_set():
            reads[0] += sum(outcome.ok for outcome in read(client, keys, SIZE))

    def writer() -> None:
        client = pool.connect(host=victim.config["host"], name="writer")
        number = 0
        while not stop.is_set():
            number += 1
            key = f"{prefix}new/{number}"
            if client.put(key, page(key, SIZE)).ok and client.get(key) not in (page(key, SIZE), None):
                troubles.append(f"{key} has other bytes")

    threads = [threading.Thread(target=work) for work in (reader, writer)]
    looker = pool.connect(name="looker")
    for thread in threads:
        thread.start()
    try:
        with control(pool) as client:
            for _ in range(5):
                reply = client.drain([victim.name], reason="test")
                assert reply.holds[0].state in (HoldState.DRAINING, HoldState.DRAINED)
                ids = {info.id for info in looker.stores() if info.name == victim.name}
                for _ in range(20):
                    assert not ids & set(looker.locate(keys)["store"].tolist())
                fresh = f"{prefix}after/{time.monotonic_ns()}"
                put = looker.put(fresh, page(fresh, SIZE))
                assert put.ok
                assert pool.store_of(looker, fresh) is not victim
                client.undrain([victim.name])
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)

    assert not any(thread.is_alive() for thread in threads)
    assert troubles == []
    assert reads[0] > 0


def test_a_drain_sweeps_and_undrain_gives_the_memory_back(pool: LocalPool, prefix: str) -> None:
    """The node itself holds nothing after the drain, other stores' objects stay, and it takes new ones afterwards."""
    where = spread(pool, prefix, per_store=30, size=SIZE)
    victim = pool.stores[2]
    mine = [key for key, name in where.items() if name == victim.name]
    others = [key for key in where if key not in mine]
    with control(pool) as client:
        client.drain([victim.name])
        wait_drained(client, victim.name)
        (hold,) = client.holds().holds
        assert (hold.swept >= len(mine), hold.left, hold.objects) == (True, 0, 0)
        reader = pool.connect()
        assert not any(outcome.ok for outcome in read(reader, mine, SIZE))
        assert {outcome.reason for outcome in read(reader, others, SIZE)} == {Reason.HIT}
        assert victim.process is not None
        info = next(info for info in client.status().stores if info.pid == victim.process.pid)
        assert (info.state, info.objects) == (StoreState.DRAINING, 0)

        client.undrain([victim.name])

        local = pool.connect(host=victim.config["host"])
        key = f"{prefix}again"
        assert local.put(key, page(key, SIZE)).ok
        assert pool.store_of(local, key) is victim


def test_a_master_killed_after_its_reply_remembers_the_hold(pool: LocalPool, prefix: str) -> None:
    """SIGKILL right after the answer: the next master hides the store from the start, and finishes the sweep."""
    where = spread(pool, prefix, per_store=20, size=SIZE)
    victim = pool.stores[0]
    mine = [key for key, name in where.items() if name == victim.name]
    with control(pool) as client:
        client.drain([victim.name], reason="INC-1")
        pool.master.send(signal.SIGKILL)

    pool.heal_master()

    with control(pool) as client:
        assert hold_state(client, victim.name) in (HoldState.DRAINING, HoldState.DRAINED)
        wait_drained(client, victim.name)
        (hold,) = client.holds().holds
        assert (hold.left, hold.reason, hold.stores) == (0, "INC-1", [victim.name])
        until(
            lambda: [one.state for one in client.status().stores].count(StoreState.READY) == 2,
            "the other two are back",
        )
        reader = pool.connect()
        assert not any(outcome.ok for outcome in read(reader, mine, SIZE))
        assert {
            outcome.reason for outcome in read(reader, [key for key in where if key not in mine], SIZE)
        } == {Reason.HIT}


def test_a_drained_store_stays_out_when_it_is_restarted(pool: LocalPool, prefix: str) -> None:
    """A new process of a drained store mounts and is not used."""
    victim = pool.stores[1]
    with control(pool) as client:
        client.drain([victim.name])
        wait_drained(client, victim.name)
        victim.send(signal.SIGKILL)
        pool.start(victim)
        until(
            lambda: any(
                info.pid == victim.process.pid and info.state is StoreState.DRAINING  # type: ignore[union-attr]
                for info in client.status().stores
            ),
            "it is mounted again",
        )
        local = pool.connect(host=victim.config["host"])
        key = f"{prefix}k"
        assert local.put(key, page(key, SIZE)).ok
        assert pool.store_of(local, key) is not victim


def ends(member: Member) -> int:
    """Wait for a process's end; its exit code."""
    assert member.process is not None
    return member.process.wait(WAIT_S)


def test_sigterm_hides_a_store_and_serves_its_readers(pool: LocalPool, prefix: str) -> None:
    """A reader that was told of the store before reads on by its connection; nobody is told of it afterwards."""
    where = spread(pool, prefix, per_store=10, size=SIZE)
    victim = pool.stores[1]
    mine = [key for key, name in where.items() if name == victim.name]
    reader = pool.connect(host="host-9", transports=["tcp"])
    assert {outcome.reason for outcome in read(reader, mine, SIZE)} == {Reason.HIT}
    looker = pool.connect(name="looker")

    with control(pool) as client:
        assert victim.process is not None
        (store_id,) = {info.id for info in client.status().stores if info.pid == victim.process.pid}
        leased = time.monotonic()
        looker.locate(mine)  # leases: it has to stay for their time
        victim.send(signal.SIGTERM)
        until(
            lambda: [
                event
                for event in client.events()
                if event.event == "store.leaving" and event.detail.get("id") == store_id
            ],
            "it is hidden",
        )
        assert not looker.locate(mine)["store"].any()

    assert ends(victim) == 0
    assert time.monotonic() - leased >= (LEASE_TTL_MS - LEASE_MARGIN_MS) / 1_000, "its readers' leases last"
    rest = [key for key in where if key not in mine]
    assert {outcome.reason for outcome in read(reader, rest, SIZE)} == {Reason.HIT}


def test_sigterm_without_a_master_proceeds(pool: LocalPool) -> None:
    """A store that cannot reach its master, or whose master stands still, ends all the same."""
    pool.master.send(signal.SIGSTOP)
    pool.stores[0].send(signal.SIGTERM)
    assert ends(pool.stores[0]) == 0
    pool.master.send(signal.SIGKILL)
    pool.stores[1].send(signal.SIGTERM)
    assert ends(pool.stores[1]) == 0


def test_a_master_that_stood_still_gives_nobody_up(pool: LocalPool, prefix: str) -> None:
    """A stop of the master that is longer than its patience with stores costs no store and no object."""
    where = spread(pool, prefix, per_store=5, size=SIZE)
    pids = {store.process.pid for store in pool.stores if store.process is not None}
    with control(pool) as client:
        before = {info.id for info in client.status().stores if info.pid in pids}
    pool.master.send(signal.SIGSTOP)
    threading.Event().wait(STORE_TTL_MS / 1_000 + 0.5)  # it is the length of the stop that matters
    pool.master.send(signal.SIGCONT)

    pool.wait_ready(*pool.stores)

    with control(pool) as client:
        stores = client.status().stores
        lost = [event for event in client.events() if event.event == "store.lost"]
    assert {info.id for info in stores if info.pid in pids} == before
    assert not [event for event in lost if event.detail.get("id") in before]
    reader = pool.connect()

    def whole() -> bool:
        try:
            return all(outcome.ok for outcome in read(reader, list(where), SIZE))
        except KvopsError:
            return False

    until(whole, "every object is readable")


def wait_moved(client: ControlClient, target: str) -> None:
    until(lambda: hold_state(client, target) is HoldState.DRAINED, f"{target} is empty")


def test_migration_without_a_moment_of_absence(pool: LocalPool, prefix: str) -> None:
    """Every object of a store stays readable, byte for byte, while it moves elsewhere and the store is drained."""
    where = spread(pool, prefix, per_store=60, size=SIZE)
    victim = pool.stores[1]
    mine = [key for key, name in where.items() if name == victim.name]
    writer = pool.connect(host=victim.config["host"])
    pins = PutOptions(hard_pin=True, tenant=7, ttl_ms=600_000)
    pinned, part = f"{prefix}pinned", f"{prefix}part"
    assert writer.put(pinned, page(pinned, 100), options=pins).ok
    assert writer.put_part(part, page(part, SIZE), offset=0, total_size=SIZE).ok
    stop = threading.Event()
    missed: list[str] = []
    rounds = [0]

    def reader() -> None:
        client = pool.connect(host="host-9", name="reader")
        while not stop.is_set():
            outcomes = read(client, mine, SIZE)
            missed.extend(
                f"{key}: {outcome.reason}"
                for key, outcome in zip(mine, outcomes, strict=True)
                if not outcome.ok
            )
            rounds[0] += 1

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        with control(pool) as client:
            began = client.drain([victim.name], migrate=True, reason="move")
            wait_moved(client, victim.name)
            (hold,) = client.holds().holds
    finally:
        stop.set()
        thread.join(WAIT_S)

    assert began.holds[0].state is HoldState.MIGRATING
    assert missed == []
    assert rounds[0] > 0
    assert (hold.unmoved, hold.left, hold.objects) == (0, 0, 0)
    assert hold.migrated >= len(mine) + 2
    looker = pool.connect()
    assert all(pool.store_of(looker, key) is not victim for key in [*mine, pinned, part])
    stat = looker.stat(pinned)
    assert stat is not None
    assert stat["hard_pin"]
    assert stat["tenant"] == 7
    assert 0 < stat["ttl_left_ms"] <= 600_000
    assert looker.get(part) == page(part, SIZE)


def test_a_removed_object_does_not_come_back_with_a_migration(pool: LocalPool, prefix: str) -> None:
    """What is removed while it moves, or has moved, is gone."""
    where = spread(pool, prefix, per_store=100, size=SIZE)
    victim = pool.stores[0]
    mine = [key for key, name in where.items() if name == victim.name]
    remover = pool.connect()
    with control(pool) as client:
        client.drain([victim.name], migrate=True)
        gone = mine[::2]
        for key in gone:
            assert remover.remove(key).ok
        wait_moved(client, victim.name)

    looker = pool.connect()
    assert not any(looker.batch_exists(gone))
    assert all(looker.batch_exists([key for key in mine if key not in gone]))


def test_what_does_not_fit_is_reported(pool: LocalPool, prefix: str) -> None:
    """Into a pool without room for all of it the hottest objects move; the rest is counted, and drained."""
    size = 1 << 20
    for store in pool.stores:
        client = pool.connect(host=store.config["host"])
        for number in range(24):
            key = f"{prefix}{store.name}/{number}"
            until(lambda key=key, client=client: client.put(key, page(key, size)).ok, "room is made")
    victim = pool.stores[2]
    mine = [f"{prefix}{victim.name}/{number}" for number in range(24)]
    looker = pool.connect()
    hot = [key for key in mine[-3:] if looker.stat(key) is not None]
    looker.touch(hot)

    with control(pool) as client:
        client.drain([victim.name], migrate=True)
        wait_moved(client, victim.name)
        (hold,) = client.holds().holds

    assert hot
    assert hold.unmoved > 0
    assert hold.migrated >= len(hot)
    assert all(looker.batch_exists(hot))
