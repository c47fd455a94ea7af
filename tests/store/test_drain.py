"""Holds and drains, on the real cores of one master and its stores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvops.errors import Refused, UsageError
from kvops.limits import BEAT_INTERVAL_MS, LEASE_TTL_MS, STORE_TTL_MS
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.awake import TICK_MS
from kvops.store.client_core import Located
from kvops.store.drain import MIGRATED_PER_ENTRY
from kvops.store.journal import Kind as JournalKind
from kvops.store.journal import recover_state
from kvops.store.journal_writer import JournalWriter
from kvops.store.master_core import MasterCore
from kvops.store.messages import PutStatus
from kvops.store.model import HoldKind, HoldState, StoreState
from kvops.store.outbox import JournalEntry
from kvops.store.snapshot import Snapshot
from kvops.store.sweep import COUNT_SLOTS, SWEEP_OBJECTS
from kvops.transfer.messages import NodeStatus
from tests.store.rig import Node, Rig, digests


@pytest.fixture
def rig() -> Rig:
    """A master with two stores, store-0 on host-store-0 and store-1 on host-store-1."""
    rig = Rig()
    rig.node()
    rig.node()
    rig.live(LEASE_TTL_MS)
    return rig


def writer(rig: Rig, node: Node) -> int:
    """A client whose objects go to this store first."""
    return rig.client(node.host)


def state(rig: Rig, target: str = "store-0") -> HoldState:
    return rig.holds_now()[target].state


def exists(rig: Rig, key: str) -> bool:
    return rig.core.exists(digests([key]), now_ms=rig.now_ms) == b"\1"


def test_from_the_reply_on_nothing_names_a_drained_store(rig: Rig) -> None:
    """Lookups, existence and puts treat what lies there as absent at once, whatever the sweep has done."""
    node, other = rig.nodes
    conn = writer(rig, node)
    rig.put(conn, "a", b"x" * 100)

    rig.drain("store-0")

    assert rig.lookup("a") == []
    assert not exists(rig, "a")
    ((status, places),) = rig.put_start(conn, [("a", 100)])
    assert status is PutStatus.GRANTED
    assert rig.node_of(places[0][3]) is other
    assert [info.state for info in rig.core.view().stores] == [StoreState.DRAINING, StoreState.READY]


def test_a_replica_elsewhere_is_kept(rig: Rig) -> None:
    """An object with a second replica stays readable from it, before and after the sweep."""
    node, other = rig.nodes
    rig.put(writer(rig, node), "a", b"x" * 100, replicas=2)

    rig.drain("store-0")
    before = rig.lookup("a")
    rig.live(3 * LEASE_TTL_MS)

    assert [rig.node_of(place[3]) for place in before] == [other]
    assert rig.read("a") == b"x" * 100
    assert (node.core.objects, other.core.objects) == (0, 1)
    rig.core.check()


def test_a_reader_finishes_and_is_not_renewed(rig: Rig) -> None:
    """What was looked up before lies there until the lease has ended; a touch no longer makes that later."""
    node = rig.nodes[0]
    conn = writer(rig, node)
    rig.put(conn, "a", b"x" * 100)
    (place,) = rig.lookup("a")

    rig.drain("store-0")
    rig.live(LEASE_TTL_MS - 100)
    rig.ask(conn, Kind.TOUCH, digests(["a"]))
    held = node.read(place)
    rig.live(500)

    assert held == b"x" * 100
    assert node.read(place) is None
    assert state(rig) is HoldState.DRAINED


def test_a_touch_says_what_was_not_renewed(rig: Rig) -> None:
    """A reader hears that a drained store's memory is lent no longer, and that another generation took its place."""
    here, there = (writer(rig, node) for node in rig.nodes)
    rig.put(here, "a", b"x" * 100)
    rig.put(there, "b", b"x" * 100)
    located = Located()
    keys = digests(["a", "absent", "b"])
    located.add(rig.core.lookup(keys, now_ms=rig.now_ms), 3)

    def renewed() -> bool:
        answer = rig.ask(here, Kind.TOUCH, keys)
        assert answer is not None
        return located.renewed(0, answer)

    before = renewed()
    rig.drain("store-0")
    drained = renewed()
    rig.put(there, "a", b"y" * 100)
    replaced = renewed()

    assert (before, drained, replaced) == (True, False, False)
    assert located.renewed(0, bytes(m.LOOKUP_HEAD.size))


def test_a_pool_that_nobody_reads_waits_for_no_lease(rig: Rig) -> None:
    """Without a lookup in the last second there is no lease: the sweep begins at once."""
    rig.put(writer(rig, rig.nodes[0]), "a", b"x" * 100)
    rig.live(2 * LEASE_TTL_MS)

    reply = rig.drain("store-0")
    rig.live(200)

    assert reply.holds[0].leases_left_ms == 0
    assert state(rig) is HoldState.DRAINED


def test_a_put_under_way_is_revoked(rig: Rig) -> None:
    """Its writer is told GONE, and its node refuses what still comes; a second put of the key goes elsewhere."""
    node, other = rig.nodes
    conn = writer(rig, node)
    ((_, places),) = rig.put_start(conn, [("a", 100)])
    ((_, late),) = rig.put_start(conn, [("b", 100)])
    assert node.write("a", places[0], b"x" * 100) is NodeStatus.OK

    rig.drain("store-0")

    ((status, again),) = rig.put_start(writer(rig, node), [("b", 100)])
    assert (status, rig.node_of(again[0][3])) == (PutStatus.GRANTED, other)
    assert rig.put_end(conn, "a", places[0][0]) is PutStatus.GONE
    rig.work()
    rig.flow()
    assert node.write("b", late[0], b"x" * 100) is not NodeStatus.OK
    assert node.core.used_bytes == 0
    rig.core.check()


def test_a_put_goes_on_with_its_other_replica(rig: Rig) -> None:
    """A put of two replicas of which one is drained away is stored with the other."""
    node, other = rig.nodes
    conn = writer(rig, node)
    ((_, places),) = rig.put_start(conn, [("a", 100)], replicas=2)
    for place in places:
        rig.node_of(place[3]).write("a", place, b"x" * 100)

    rig.drain("store-0")

    assert rig.put_end(conn, "a", places[0][0], 0b11) is PutStatus.STORED
    assert [rig.node_of(place[3]) for place in rig.lookup("a")] == [other]
    rig.live(LEASE_TTL_MS * 2)
    assert node.core.used_bytes == 0
    rig.core.check()


def test_the_sweep_counts_what_is_left(rig: Rig) -> None:
    """More objects than a slice takes are forgotten, the count says so, and master and node agree that none is left."""
    node = rig.nodes[0]
    conn = writer(rig, node)
    count = 3 * SWEEP_OBJECTS + 1
    for number in range(count):
        rig.put(conn, f"k{number}", b"x" * 64)
    assert count < COUNT_SLOTS

    reply = rig.drain("store-0", reason="INC-1", owner="alice@ops")
    early = rig.holds_now()["store-0"]
    rig.live(3 * LEASE_TTL_MS)
    late = rig.holds_now()["store-0"]

    assert reply.holds[0].objects_at_call == count
    assert (early.state, early.swept, early.left) == (HoldState.DRAINING, 0, -1)
    assert (late.state, late.swept, late.left, late.objects) == (HoldState.DRAINED, count, 0, 0)
    assert (late.reason, late.owner) == ("INC-1", "alice@ops")
    assert node.core.objects == node.core.used_bytes == 0


def test_undrain_before_the_sweep_gives_all_back(rig: Rig) -> None:
    """What has not been swept is readable again; what was put elsewhere meanwhile stays the newer one."""
    node, other = rig.nodes
    conn = writer(rig, node)
    rig.put(conn, "a", b"old a" * 20)
    rig.put(conn, "b", b"old b" * 20)
    rig.lookup("a")
    rig.drain("store-0")
    rig.put(conn, "b", b"new b" * 20)

    rig.undrain("store-0")
    rig.live(3 * LEASE_TTL_MS)

    assert rig.read("a") == b"old a" * 20
    assert rig.read("b") == b"new b" * 20
    assert (node.core.objects, other.core.objects) == (1, 1)
    assert rig.holds_now() == {}
    rig.core.check()


def test_undrain_after_the_sweep_gives_empty_memory_back(rig: Rig) -> None:
    """All of the store's memory can be written again, and nothing of what it held comes back."""
    node = rig.nodes[0]
    conn = writer(rig, node)
    rig.put(conn, "a", b"x" * 100)
    rig.drain("store-0")
    rig.live(3 * LEASE_TTL_MS)

    rig.undrain("store-0")

    assert rig.lookup("a") == []
    store = rig.core.stores.named("store-0")
    assert store is not None
    assert (store.state, store.allocator.free_bytes) == (StoreState.READY, node.size)
    assert rig.node_of(rig.put(conn, "a", b"y" * 100)[0][3]) is node


def test_a_restarted_master_finishes_the_drain(rig: Rig) -> None:
    """A master that dies between the flip and the sweep: the next one hides the store, sweeps it and counts."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    rig.lookup("a")
    rig.drain("store-0", reason="INC-1")

    rig.restart()
    hidden = rig.lookup("a")
    rig.live(500)
    still_hidden = rig.lookup("a")
    rig.live(3 * LEASE_TTL_MS)

    assert hidden == still_hidden == []
    hold = rig.holds_now()["store-0"]
    assert (hold.state, hold.left, hold.objects_at_call, hold.reason) == (HoldState.DRAINED, 0, 1, "INC-1")
    assert node.core.objects == 0


def test_a_hold_outlives_its_store(rig: Rig) -> None:
    """A drained store that comes back as a new process stays out of use until it is undrained."""
    rig.drain("store-0")
    rig.kill(rig.nodes[0])
    new = rig.node("store-0", host="host-store-0")
    rig.live(2 * LEASE_TTL_MS)

    ((_, places),) = rig.put_start(rig.client("host-store-0"), [("a", 100)])
    assert rig.node_of(places[0][3]) is not new
    assert state(rig) is HoldState.DRAINED
    rig.undrain("store-0")
    ((_, places),) = rig.put_start(rig.client("host-store-0"), [("b", 100)])
    assert rig.node_of(places[0][3]) is new


def test_a_store_that_dies_while_it_drains(rig: Rig) -> None:
    """The drain ends as lost with nothing left of it; the hold stays."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    rig.lookup("a")
    rig.drain("store-0")

    rig.ask(node.conn, Kind.UNMOUNT, b"")
    rig.kill(node)
    rig.live(STORE_TTL_MS)

    hold = rig.holds_now()["store-0"]
    assert (hold.state, hold.left, hold.stores) == (HoldState.LOST, 0, [])
    assert len(rig.core.index) == 0


def test_the_last_store_is_refused_unless_forced(rig: Rig) -> None:
    """A drain or a cordon that would leave nothing changes nothing and says which check says no."""
    rig.drain("store-0", force=[])
    for kind in (HoldKind.DRAIN, HoldKind.CORDON):
        with pytest.raises(Refused, match="no store would be left") as caught:
            rig.hold(kind, "store-1", force=[])
        assert "--force last-store" in caught.value.fix
    with pytest.raises(UsageError, match="no check is called quorum"):
        rig.drain("store-1", force=["quorum"])
    assert rig.core.view().stores[1].state is StoreState.READY

    rig.drain("store-1", force=["last-store"])

    assert rig.core.view().stores[1].state is StoreState.DRAINING


def test_a_repeated_drain_changes_nothing(rig: Rig) -> None:
    """It keeps number, reason and progress, also when the drain is over, and appends nothing to the journal."""
    first = rig.drain("store-0", reason="INC-1").holds[0]
    again = rig.drain("store-0", reason="INC-2")
    rig.live(2 * LEASE_TTL_MS)
    rig.core.outbox.journal.clear()
    last = rig.core.holds.hold(
        ["store-0"], HoldKind.DRAIN, reason="INC-3", owner="o", since="", now_ms=rig.now_ms
    )

    assert again.unchanged == last.unchanged == ["store-0"]
    assert again.holds[0].number == last.holds[0].number == first.number
    assert last.holds[0].reason == "INC-1"
    assert last.holds[0].state is HoldState.DRAINED
    assert rig.core.outbox.journal == []


def test_an_unknown_name_changes_nothing(rig: Rig) -> None:
    """One wrong name among several: nothing is held."""
    with pytest.raises(UsageError, match="no store or host is called store-7"):
        rig.drain("store-0", "store-7")
    with pytest.raises(UsageError, match="store-7"):
        rig.undrain("store-7")

    assert rig.holds_now() == {}


def test_a_dry_run_changes_nothing(rig: Rig) -> None:
    """It says what it would hold and what a check says, of the last store too."""
    rig.put(writer(rig, rig.nodes[0]), "a", b"x" * 100)

    would = rig.drain("store-0", "store-1", dry_run=True, force=[])

    assert [(hold.target, hold.objects) for hold in would.holds] == [("store-0", 1), ("store-1", 0)]
    assert [(check.name, check.ok) for check in would.checks] == [("last-store", False)]
    assert rig.holds_now() == {}
    assert rig.lookup("a")


def test_a_cordoned_store_is_read_and_not_written(rig: Rig) -> None:
    """Reads, touches and leases go on; no new object comes; undrain ends it; a drain makes it stricter."""
    node, other = rig.nodes
    conn = writer(rig, node)
    rig.put(conn, "a", b"x" * 100)

    rig.hold(HoldKind.CORDON, "store-0")

    assert rig.read("a") == b"x" * 100
    assert rig.node_of(rig.put(conn, "b", b"y" * 100)[0][3]) is other
    assert state(rig) is HoldState.CORDONED
    number = rig.holds_now()["store-0"].number
    assert rig.drain("store-0").holds[0].number == number
    assert rig.lookup("a") == []
    with pytest.raises(Refused, match="held by drain"):
        rig.hold(HoldKind.CORDON, "store-0")
    rig.undrain("store-0")
    assert rig.node_of(rig.put(conn, "c", b"z" * 100)[0][3]) is node


def test_a_host_is_all_its_stores_whenever_they_come() -> None:
    """A hold on a host holds its stores of now and later; one of them cannot be let go alone."""
    rig = Rig()
    rig.node("a/0", host="gpu-1")
    rig.node("a/1", host="gpu-1")
    rig.node("b", host="gpu-2")

    reply = rig.drain("gpu-1")
    rig.node("a/2", host="gpu-1")

    assert reply.holds[0].stores == ["a/0", "a/1"]
    assert {info.name: info.state for info in rig.core.view().stores} == {
        "a/0": StoreState.DRAINING,
        "a/1": StoreState.DRAINING,
        "a/2": StoreState.DRAINING,
        "b": StoreState.READY,
    }
    with pytest.raises(Refused, match="whole host gpu-1"):
        rig.undrain("a/0")
    rig.undrain("gpu-1")
    assert all(info.state is StoreState.READY for info in rig.core.view().stores if info.name != "a/2")


def test_one_numa_node_of_a_host_is_its_store(rig: Rig) -> None:
    """HOST/NUMA is the store there, under its own name."""
    assert rig.drain("host-store-1/0").holds[0].target == "store-1"
    with pytest.raises(UsageError):
        rig.drain("host-store-1/1")


def test_two_holds_on_one_store(rig: Rig) -> None:
    """A store under a drain of its own and one of its host is held until both are lifted, and both see the sweep."""
    rig.put(writer(rig, rig.nodes[0]), "a", b"x" * 100)
    rig.drain("store-0")
    rig.drain("host-store-0")
    rig.live(3 * LEASE_TTL_MS)
    both = [(hold.state, hold.left) for hold in rig.holds_now().values()]

    rig.undrain("host-store-0")  # and what is held on the host store by store

    assert both == [(HoldState.DRAINED, 0)] * 2
    assert rig.holds_now() == {}
    assert rig.core.view().stores[0].state is StoreState.READY


def test_numbers_are_never_given_twice(rig: Rig) -> None:
    """Targets of one request share a number; a lifted hold's is not used again, whoever is master."""
    first = rig.drain("store-0", "store-1")
    rig.undrain("store-0", "store-1")
    rig.restart()
    rig.live(500)

    second = rig.drain("store-0")

    assert [hold.number for hold in first.holds] == [1, 1]
    assert second.holds[0].number == 2


def test_ok_to_stop(rig: Rig) -> None:
    """One of two may go, both together may not, and none while another is away."""

    def answer(*names: str) -> dict[str, bool]:
        checks = rig.core.holds.ok_to_stop(names, now_ms=rig.now_ms).checks
        return {check.name: check.ok for check in checks}

    assert answer("store-0") == {"last-store": True, "others-ready": True}
    assert answer("store-0", "store-1") == {"last-store": False, "others-ready": True}
    rig.close_session(rig.nodes[1])
    assert answer("store-0") == {"last-store": False, "others-ready": False}


# How stores begin.


def test_an_empty_store_that_joins_a_full_pool_is_held_back() -> None:
    """It takes at most 2/N of others' new objects in its first minute though nobody else has room, its host's all."""
    rig = Rig()
    for _ in range(4):
        rig.node()
    rig.live(LEASE_TTL_MS)
    size = 60_000
    for node in list(rig.nodes):
        for number in range(17):
            ((_, places),) = rig.put_start(writer(rig, node), [(f"{node.name}/{number}", size)])
            for place in places:
                rig.node_of(place[3]).write(f"{node.name}/{number}", place, b"x" * size)
                rig.put_end(1, f"{node.name}/{number}", place[0])
    new = rig.node("store-new", host="host-new")

    def put(conn: int, key: str) -> Node:
        """Put a key, again and again while there is no room."""
        for _ in range(100):
            ((status, places),) = rig.put_start(conn, [(key, size)])
            if status is PutStatus.GRANTED:
                node = rig.node_of(places[0][3])
                node.write(key, places[0], b"x" * size)
                rig.put_end(conn, key, places[0][0])
                return node
            rig.live(100)
        raise AssertionError(f"no room for {key}")

    strangers = [rig.client(f"host-{letter}") for letter in "pqrst"]
    took = [put(strangers[number % 5], f"new/{number}") is new for number in range(25)]
    own = [put(rig.client("host-new"), f"own/{number}") is new for number in range(3)]

    assert 1 <= sum(took) <= 2 * len(took) / 5 + 1
    assert own == [True] * 3


def test_stores_of_a_fresh_pool_are_not_held_back(rig: Rig) -> None:
    """Where no other store holds anything there is nothing to protect."""
    new = rig.node("store-new", host="host-new")
    for number, host in enumerate(("host-a", "host-b", "host-c", "host-d", "host-e", "host-f")):
        rig.put(rig.client(host), f"k{number}", b"x")
    rig.put(rig.client("host-new"), "own", b"x")

    assert new.core.objects > 0


# What is remembered.


def test_holds_survive_in_the_journal_and_its_snapshot(tmp_path: Path, rig: Rig) -> None:
    """Holds come back from a journal as they were said last, lifted ones only as a number, also after a snapshot."""
    rig.drain("store-0", reason="INC-1", owner="alice@ops")
    rig.hold(HoldKind.CORDON, "store-1")
    rig.undrain("store-1")
    said = rig.core.holds.rows()
    journal = JournalWriter(tmp_path / "journal")
    for state in (HoldState.CORDONED, HoldState.LIFTED):
        hold = msgspec.structs.replace(said[0], target="store-9", state=state)
        journal.append(*JournalEntry(JournalKind.HOLDS, holds=(hold,)).encode())
    snapshot = Snapshot(journal, rig.core)
    while not snapshot.step():
        pass
    assert journal.close()

    recovery = recover_state(tmp_path / "journal")
    core = MasterCore(rig.settings, term=9, now_ms=rig.now_ms)
    core.restore(recovery, now_ms=rig.now_ms)

    assert core.holds.rows() == said
    assert [hold.target for hold in core.holds.every(now_ms=rig.now_ms)] == ["store-0"]


@pytest.mark.parametrize("change", ["restart", "fail_over"])
def test_a_receipt_outlives_its_master(change: str) -> None:
    """What a drain found, moved and left behind is the same after another master came, up to the last entry."""
    rig = Rig()
    node = rig.node()
    rig.node()
    rig.live(LEASE_TTL_MS)
    conn = writer(rig, node)
    for number in range(3):
        rig.put(conn, f"k{number}", b"x" * 100)
    rig.drain("store-0", migrate=True)
    store = rig.core.stores.named("store-0")
    assert store is not None
    for _ in range(MIGRATED_PER_ENTRY + 1):
        rig.core.holds.moved(store, 100)
    rig.route()
    rig.replicate()
    before = rig.holds_now()["store-0"]

    getattr(rig, change)()
    after = rig.holds_now()["store-0"]

    assert (before.objects_at_call, before.migrated) == (3, MIGRATED_PER_ENTRY + 1)
    assert (after.objects_at_call, after.bytes_at_call) == (3, before.bytes_at_call)
    assert (after.migrated, after.migrated_bytes) == (MIGRATED_PER_ENTRY, 100 * MIGRATED_PER_ENTRY)


def test_a_drain_is_one_journal_entry(rig: Rig) -> None:
    """All targets of a request are remembered together or not at all."""
    rig.core.holds.hold(
        ["store-0", "store-1"],
        HoldKind.DRAIN,
        reason="",
        owner="o",
        since="s",
        force=["last-store"],
        now_ms=rig.now_ms,
    )

    (entry,) = rig.core.outbox.journal
    assert [hold.target for hold in entry.holds] == ["store-0", "store-1"]


# How stores end.


def test_a_leaving_store_is_hidden_and_serves_its_readers(rig: Rig) -> None:
    """From its LEAVE on nothing names it; it is told how long readers need it, and is lost when it unmounts."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    (place,) = rig.lookup("a")

    answer = rig.ask(node.conn, Kind.LEAVE, b"")
    rig.beat(node)
    rig.flow()

    assert answer is not None
    assert m.LEAVE_REPLY.unpack(answer) == (LEASE_TTL_MS,)
    assert rig.lookup("a") == []
    assert node.read(place) == b"x" * 100
    assert rig.core.view().stores[0].state is StoreState.DRAINING
    rig.ask(node.conn, Kind.UNMOUNT, b"")
    assert rig.core.view().stores[0].state is StoreState.GONE


def test_a_store_leaves_at_once_where_nobody_reads(rig: Rig) -> None:
    """Without a lookup in the last second there is nobody to wait for."""
    rig.put(writer(rig, rig.nodes[0]), "a", b"x" * 100)
    rig.live(2 * LEASE_TTL_MS)

    assert rig.ask(rig.nodes[0].conn, Kind.LEAVE, b"") == m.LEAVE_REPLY.pack(0)


def test_a_silent_store_is_hidden_within_two_seconds(rig: Rig) -> None:
    """A host that vanishes right after a beat, its connection open: no lookup names it 2 s later."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    node.frozen = True

    rig.live(2_000)

    assert rig.lookup("a") == []


def test_a_dead_store_is_given_up_within_two_seconds(rig: Rig) -> None:
    """A closed connection hides a store at once, and 2 s later it is lost."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    rig.kill(node)
    at_once = rig.lookup("a")

    rig.live(2_000)

    assert at_once == []
    assert rig.core.stores.named("store-0") is None or (rig.core.view().stores[0].state is StoreState.GONE)


@pytest.mark.parametrize("heard_first", [True, False], ids=["beats first", "timer first"])
def test_a_masters_own_pause_is_nobodys_silence(rig: Rig, heard_first: bool) -> None:
    """A master that stood still for a minute suspects no store and pre-empts no put, whatever it does first."""
    node, other = rig.nodes
    rig.put(writer(rig, node), "a", b"x" * 100)
    conn = writer(rig, node)
    ((_, places),) = rig.put_start(conn, [("b", 100)])

    rig.now_ms += 60_000
    if heard_first:
        rig.beat(node)
        rig.flow()
    ((second, _),) = rig.put_start(writer(rig, other), [("b", 100)])
    rig.core.tick(now_ms=rig.now_ms)

    assert [info.state for info in rig.core.view().stores] == [StoreState.READY] * 2
    assert rig.lookup("a")
    assert second is PutStatus.IN_PROGRESS
    assert rig.node_of(places[0][3]).write("b", places[0], b"y" * 100) is NodeStatus.OK
    assert rig.put_end(conn, "b", places[0][0]) is PutStatus.STORED


def test_a_store_that_died_in_the_masters_pause_is_found_soon(rig: Rig) -> None:
    """The pause is not credited twice: who does not speak after it is hidden within 2 s."""
    node = rig.nodes[0]
    rig.put(writer(rig, node), "a", b"x" * 100)
    rig.now_ms += 60_000
    rig.beat(node)
    rig.flow()
    node.frozen = True

    rig.live(2_000 + BEAT_INTERVAL_MS - TICK_MS)

    assert rig.lookup("a") == []
