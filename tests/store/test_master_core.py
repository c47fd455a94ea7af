"""The master's logic, message by message."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import KvopsError, WireError
from kvops.limits import (
    CHUNK_BYTES,
    KEYS_PER_FRAME_MAX,
    LEASE_TTL_MS,
    PUT_TTL_MS,
    PUTS_PER_FRAME_MAX,
    REPLICAS_MAX,
    STORE_TTL_MS,
    TTL_MS_MAX,
)
from kvops.net import wire
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.messages import PutStatus, RemoveStatus
from kvops.store.model import ObjectFlag, StoreState
from kvops.store.put_watch import ORPHAN_MS
from kvops.store.removes import REMOVE_WAIT_MS
from kvops.transfer.layout import footprint_bytes
from kvops.transfer.messages import NodeStatus
from tests.store.rig import Node, Rig, digests, end_row, hello, put_rows

DATA = b"x" * 1_000
OTHER = b"y" * 2_000
HOUR_MS = 3_600_000


def state_of(rig: Rig, node: Node) -> StoreState:
    store = rig.core.stores.named(node.name)
    assert store is not None
    return store.state


def free_bytes(rig: Rig) -> int:
    return rig.core.stores.free_bytes()


# A put's life.


def test_readable_after_put_end_only() -> None:
    """A key in PROCESSING is a miss; from its put_end on it is found."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    ((_, (place,)),) = rig.put_start(client, [("a", len(DATA))])
    assert node.write("a", place, DATA) is NodeStatus.OK
    assert rig.lookup("a") == []

    assert rig.put_end(client, "a", place[0]) is PutStatus.STORED

    assert rig.lookup("a") == [place]
    assert rig.read("a") == DATA
    rig.core.check()


def test_existing_key_is_not_stored_again() -> None:
    """A put of a readable key says EXISTS and takes no memory; of one that is being written, IN_PROGRESS."""
    rig = Rig()
    rig.node()
    one, two = rig.client(), rig.client()
    rig.put(one, "a", DATA)
    rig.put_start(one, [("b", 10)])
    free = free_bytes(rig)

    answer = rig.put_start(two, [("a", 500), ("b", 10)])

    assert answer == [(PutStatus.EXISTS, []), (PutStatus.IN_PROGRESS, [])]
    assert free_bytes(rig) == free


def test_key_named_twice_in_one_put() -> None:
    """Of a key that one batch names twice the first is granted; also when a hidden store holds it."""
    rig = Rig()
    node, client = rig.node(), rig.client("host-store-0")
    rig.node()
    rig.put(client, "a", DATA)
    rig.close_session(node)

    answer = rig.put_start(client, [("a", 10), ("a", 10)])

    assert [status for status, _ in answer] == [PutStatus.GRANTED, PutStatus.IN_PROGRESS]
    rig.core.check()


def test_put_end_may_be_repeated() -> None:
    """A put_end whose answer was lost says STORED again; one of another generation says GONE."""
    rig = Rig()
    rig.node()
    client = rig.client()
    (place,) = rig.put(client, "a", DATA)

    assert rig.put_end(client, "a", place[0]) is PutStatus.STORED
    assert rig.put_end(client, "a", place[0] + 1) is PutStatus.GONE
    assert rig.put_end(client, "never", place[0]) is PutStatus.GONE


def test_put_outlives_its_connection() -> None:
    """A connection of the writer may close between put_start and put_end: others do the rest."""
    rig = Rig()
    node, first, second = rig.node(), rig.client(), rig.client()
    ((_, (place,)),) = rig.put_start(first, [("a", len(DATA))])
    rig.leave(first)
    rig.live(1_000)
    assert node.write("a", place, DATA) is NodeStatus.OK

    assert rig.put_end(second, "a", place[0]) is PutStatus.STORED


def test_dead_writer_is_preempted_at_once() -> None:
    """Who wants to put a key whose writer's connection is gone need not wait."""
    rig = Rig()
    node, first, second = rig.node(), rig.client(), rig.client()
    ((_, (old,)),) = rig.put_start(first, [("a", len(DATA))])
    rig.leave(first)

    ((status, (new,)),) = rig.put_start(second, [("a", len(OTHER))])
    rig.flow()

    assert status is PutStatus.GRANTED
    assert node.write("a", old, DATA) is NodeStatus.STALE
    assert node.write("a", new, OTHER) is NodeStatus.OK
    assert rig.put_end(second, "a", old[0]) is PutStatus.GONE
    assert rig.put_end(second, "a", new[0]) is PutStatus.STORED
    rig.core.check()


def test_dead_writers_memory_comes_back() -> None:
    """Without another writer the memory of an unfinished put is free again soon after its connection ended."""
    rig = Rig()
    rig.node()
    free, client = free_bytes(rig), rig.client()
    rig.put_start(client, [("a", 10_000)])
    rig.leave(client)

    rig.live(ORPHAN_MS + 200)

    assert free_bytes(rig) == free
    rig.core.check()


def test_stalled_writer_is_preempted() -> None:
    """A writer that holds a key without end loses it, although its connection lives."""
    rig = Rig()
    node, first, second = rig.node(), rig.client(), rig.client()
    ((_, (old,)),) = rig.put_start(first, [("a", len(DATA))])
    rig.live(PUT_TTL_MS + 200)

    ((status, _),) = rig.put_start(second, [("a", len(DATA))])

    assert status is PutStatus.GRANTED
    assert node.write("a", old, DATA) is NodeStatus.STALE
    assert rig.put_end(first, "a", old[0]) is PutStatus.GONE
    rig.core.check()


def test_revoked_put_gives_its_memory_back() -> None:
    """A revoked put is over: its memory is free once the node knows, a late write is refused."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    free = free_bytes(rig)
    ((_, (place,)),) = rig.put_start(client, [("a", len(DATA))])

    assert rig.ask(client, Kind.PUT_REVOKE, end_row("a", place[0])) == bytes([PutStatus.REVOKED])
    assert free_bytes(rig) < free
    rig.flow()

    assert free_bytes(rig) == free
    assert node.write("a", place, DATA) is NodeStatus.STALE
    rig.core.check()


def test_parts_join_one_put() -> None:
    """Every rank of an object in parts gets the same place; another shape does not join."""
    rig = Rig()
    rig.node()
    one, two = rig.client(), rig.client()

    first = rig.put_start(one, [("a", 8_192)], flags=ObjectFlag.PARTS)
    second = rig.put_start(two, [("a", 8_192)], flags=ObjectFlag.PARTS)
    third = rig.put_start(two, [("a", 4_096)], flags=ObjectFlag.PARTS)

    assert first == second
    assert third[0][0] is PutStatus.IN_PROGRESS


def test_rank_that_left_has_written_its_part() -> None:
    """A rank may hang up after its part: the next one joins the same put."""
    rig = Rig()
    node, one, two = rig.node(), rig.client(), rig.client()
    data = bytes(range(256)) * 32
    ((_, (place,)),) = rig.put_start(one, [("a", 8_192)], flags=ObjectFlag.PARTS)
    node.write("a", place, data, 0, 4_096)
    rig.leave(one)

    assert rig.put_start(two, [("a", 8_192)], flags=ObjectFlag.PARTS) == [(PutStatus.GRANTED, [place])]
    node.write("a", place, data, 4_096, 4_096)
    assert rig.put_end(two, "a", place[0]) is PutStatus.STORED
    assert rig.read("a") == data


def test_replicas_lie_on_distinct_hosts() -> None:
    """Replicas go to distinct hosts or nowhere; what was not written is released."""
    rig = Rig()
    rig.node("a1", host="a"), rig.node("a2", host="a"), rig.node("b1", host="b")
    client = rig.client()
    free = free_bytes(rig)

    places = rig.put(client, "k", DATA, replicas=2)
    assert {rig.node_of(place[3]).host for place in places} == {"a", "b"}
    assert rig.put_start(client, [("l", 10)], replicas=3) == [(PutStatus.NO_SPACE, [])]

    ((_, half),) = rig.put_start(client, [("m", len(DATA))], replicas=2)
    assert rig.put_end(client, "m", half[0][0], 0b10) is PutStatus.STORED
    rig.flow()
    assert rig.lookup("m") == [(*half[1][:4], 0)]
    assert free_bytes(rig) == free - 3 * footprint_bytes(len(DATA), CHUNK_BYTES)
    rig.core.check()


# Leases.


def test_removed_memory_stays_while_leased() -> None:
    """A removed key is hidden at once; its memory is given to nobody before the last reader's lease ends."""
    rig = Rig()
    rig.node()
    free, client = free_bytes(rig), rig.client()
    rig.put(client, "a", DATA)
    rig.lookup("a")
    rig.tick(300)

    assert rig.remove(client, "a") is None
    rig.flow()
    assert list(rig.replies[client]) == [bytes([RemoveStatus.REMOVED])]
    assert rig.lookup("a") == []
    rig.live(LEASE_TTL_MS - 400)
    assert free_bytes(rig) < free
    rig.live(200)

    assert free_bytes(rig) == free
    rig.core.check()


def test_ttl_ends_an_object() -> None:
    """An object with a TTL is found until then, and its memory comes back."""
    rig = Rig()
    rig.node()
    free, client = free_bytes(rig), rig.client()
    rig.put(client, "a", DATA, ttl_ms=5_000)
    rig.live(4_900)
    assert rig.lookup("a")
    rig.now_ms += 100
    assert rig.lookup("a") == []

    rig.live(2 * LEASE_TTL_MS)

    assert free_bytes(rig) == free
    rig.core.check()


@pytest.mark.parametrize("replicas", [1, 2])
def test_ttl_outlives_the_master(replicas: int) -> None:
    """A restarted master knows until when an object was to live, and lets it live so long."""
    rig = Rig()
    rig.node()
    rig.node()
    client = rig.client()
    rig.put(client, "a", DATA, ttl_ms=5_000, replicas=replicas)
    rig.put(client, "b", DATA)
    rig.live(1_000)

    rig.restart(down_ms=500)
    rig.live(2_000)
    assert len(rig.lookup("a")) == replicas
    rig.live(1_500)

    assert rig.lookup("a") == []
    assert rig.lookup("b")
    rig.live(2 * LEASE_TTL_MS)
    rig.core.check()


def test_ttl_that_nobody_knows_any_more() -> None:
    """A master that lost its journal rather forgets an object with a TTL than keeps it for ever."""
    rig = Rig()
    rig.node()
    client = rig.client()
    rig.put(client, "a", DATA, ttl_ms=HOUR_MS)
    rig.put(client, "b", DATA)

    rig.restart(journal=False)
    rig.live(3 * LEASE_TTL_MS)

    assert rig.lookup("a") == []
    assert rig.lookup("b")
    rig.core.check()


def test_objects_that_go_before_their_time_are_forgotten() -> None:
    """Of an object with a TTL of days that is removed, evicted or replaced at once, nothing is kept for days."""
    rig = Rig()
    rig.node()
    client = rig.client()

    for _ in range(20):
        rig.put(client, "key", b"x" * 100, ttl_ms=TTL_MS_MAX)
        rig.remove(client, "key")
        rig.flow()

    rig.core.check()
    rig.put(client, "key", b"x" * 100, ttl_ms=TTL_MS_MAX)
    assert rig.lookup("key")


def test_restarted_master_waits_for_its_predecessors_leases() -> None:
    """Memory a reader may hold by a lease of the master before is not given away after a quick restart."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    rig.put(client, "a", DATA)
    rig.lookup("a")
    leased_until = rig.now_ms + LEASE_TTL_MS
    rig.remove(client, "a")
    rig.flow()

    rig.restart(down_ms=100)
    client = rig.client()
    while rig.now_ms < leased_until:
        rig.live(100)
        if rig.now_ms < leased_until:
            assert [status for status, _ in rig.put_start(client, [("b", 10)])] == [PutStatus.NO_SPACE]
    rig.live(100)

    assert [status for status, _ in rig.put_start(client, [("b", 10)])] == [PutStatus.GRANTED]
    assert state_of(rig, node) is StoreState.READY


# Eviction.


def test_full_pool_makes_room() -> None:
    """A put that finds no room is granted a little later; the least recently used objects have left."""
    rig = Rig()
    rig.node(size=1 << 20)
    client = rig.client()
    count = 0
    while rig.put_start(client, [(f"k{count}", 60_000)])[0][0] is PutStatus.GRANTED:
        rig.ask(
            client,
            Kind.PUT_REVOKE,
            end_row(f"k{count}", rig.core.puts.get(digests([f"k{count}"])).generation),
        )  # type: ignore[union-attr]
        rig.flow()
        rig.put(client, f"k{count}", b"k" * 60_000)
        count += 1
        rig.tick(10)
    rig.live(2_000)

    assert rig.put_start(client, [("new", 60_000)])[0][0] is PutStatus.GRANTED
    assert rig.lookup("k0") == []
    assert rig.lookup(f"k{count - 1}")
    rig.core.check()


def test_put_that_never_fits_evicts_nothing() -> None:
    """An object larger than any store, or with more replicas than hosts, is no reason to empty the pool."""
    rig = Rig()
    rig.node(size=1 << 20)
    client = rig.client()
    keys = [f"k{i}" for i in range(8)]
    for key in keys:
        rig.put(client, key, DATA)
    for _ in range(20):
        assert rig.put_start(client, [("huge", 2 << 20)]) == [(PutStatus.NO_SPACE, [])]
        assert rig.put_start(client, [("spread", 500_000)], replicas=2) == [(PutStatus.NO_SPACE, [])]
        rig.live(500)

    assert all(rig.lookup(key) for key in keys)


def test_nothing_is_evicted_while_stores_announce() -> None:
    """A restarted master with a nearly empty pool evicts nothing while it learns what is free."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    keys = [f"k{i}" for i in range(8)]
    for key in keys:
        rig.put(client, key, DATA)
    rig.restart()
    rig.open_session(node)
    rig.step_to_master(node)
    rig.now_ms += 2 * LEASE_TTL_MS

    rig.work()
    rig.live(1_000)

    assert all(rig.lookup(key) for key in keys)


# Stores that come and go.


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "slot tables"])
def test_restarted_master_has_every_object_again(journal: bool) -> None:
    """From its journal, or from the stores' slot tables, a new master finds every COMPLETE object."""
    rig = Rig()
    nodes = [rig.node() for _ in range(3)]
    client = rig.client()
    contents = {f"k{i}": bytes([i]) * (100 + i) for i in range(20)}
    for key, data in contents.items():
        rig.put(client, key, data, replicas=1 + len(key) % 2)

    rig.restart(journal=journal)
    rig.live(2_000)

    assert {key: rig.read(key) for key in contents} == contents
    assert all(state_of(rig, node) is StoreState.READY for node in nodes)
    rig.core.check()


def test_store_that_comes_back_keeps_its_objects() -> None:
    """A store that was lost for its silence and comes back with the same memory brings its objects along."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    rig.put(client, "a", DATA)
    node.frozen = True
    rig.live(3 * STORE_TTL_MS)
    assert rig.lookup("a") == []
    rig.close_session(node)
    node.frozen = False

    rig.live(1_000)

    assert rig.read("a") == DATA
    rig.core.check()


def test_new_incarnation_has_none_of_the_old_objects() -> None:
    """A restarted store is another one: what the old process held is a miss at once."""
    rig = Rig()
    node, client = rig.node("s"), rig.client()
    rig.put(client, "a", DATA)
    rig.kill(node)
    rig.node("s")

    assert rig.lookup("a") == []
    rig.live(1_000)
    assert len(rig.core.index) == 0
    assert len(rig.core.stores) == 1
    rig.core.check()


def test_announcement_starts_over_after_a_break() -> None:
    """A connection that breaks in mid-announcement loses no object and gives no memory away twice."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    contents = {f"k{i}": bytes([i]) * (100 + i) for i in range(9)}
    for key, data in contents.items():
        rig.put(client, key, data)
    rig.restart(journal=False)
    rig.open_session(node)
    for _ in range(3):  # mounted, and two frames of slots
        rig.step_to_master(node)
        rig.step_to_node(node)
    rig.close_session(node)
    rig.open_session(node)
    rig.step_to_master(node)
    assert state_of(rig, node) is StoreState.ANNOUNCING

    rig.live(2_000)

    assert {key: rig.read(key) for key in contents} == contents
    rig.core.check()


def test_store_suspected_during_its_sweep_recovers() -> None:
    """A store that hiccups right after its announcement is READY again with its next beat."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    for i in range(200):
        rig.put(client, f"k{i}", DATA)
    rig.restart()
    rig.now_ms += 2 * LEASE_TTL_MS
    rig.open_session(node)
    rig.flow()
    rig.core.work(now_ms=rig.now_ms)  # one slice of its sweep
    rig.beat(node, lag_ms=STORE_TTL_MS)
    rig.flow()
    assert state_of(rig, node) is StoreState.SUSPECTED
    rig.beat(node)
    rig.flow()

    assert state_of(rig, node) is StoreState.READY
    assert rig.lookup("k199")


def test_store_lost_during_its_sweep() -> None:
    """A store that dies right after its announcement is forgotten once, with everything it held."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    for i in range(200):
        rig.put(client, f"k{i}", DATA)
    rig.restart()
    rig.now_ms += 2 * LEASE_TTL_MS
    rig.open_session(node)
    rig.flow()
    rig.core.work(now_ms=rig.now_ms)
    rig.kill(node)
    rig.node(node.name)

    rig.live(1_000)

    assert len(rig.core.stores) == 1
    assert len(rig.core.index) == 0
    assert rig.lookup("k199") == []


def test_removed_before_its_store_announced_it() -> None:
    """What is removed between a master's restart and its store's return stays removed, its memory counted once."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    rig.put(client, "a", DATA)
    rig.put(client, "b", DATA)
    rig.restart()
    client = rig.client()
    assert rig.remove(client, "a") is None

    rig.live(3_000)

    assert rig.lookup("a") == []
    assert rig.read("b") == DATA
    assert node.core.objects == 1
    rig.core.check()


def test_remove_reaches_a_store_that_is_away() -> None:
    """A remove whose store does not answer says HIDDEN, and holds when the store comes back from the dead."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    rig.put(client, "a", DATA)
    rig.close_session(node)
    node.frozen = True

    assert rig.remove(client, "a") is None
    rig.live(REMOVE_WAIT_MS + 100)
    assert list(rig.replies[client]) == [bytes([RemoveStatus.HIDDEN])]
    rig.live(3 * STORE_TTL_MS)
    node.frozen = False
    rig.live(2_000)

    assert rig.lookup("a") == []
    assert node.core.objects == 0
    rig.core.check()


def test_remove_of_a_lost_stores_key_holds() -> None:
    """A key that is removed while the store that held it counts as lost does not come back with it."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    rig.put(client, "a", DATA)
    node.frozen = True
    rig.live(3 * STORE_TTL_MS)
    rig.close_session(node)
    assert rig.remove(client, "a") is RemoveStatus.ABSENT
    node.frozen = False

    rig.live(2_000)

    assert rig.lookup("a") == []
    assert node.core.objects == 0


def test_remove_spares_the_put_under_way() -> None:
    """A put that was under way when its key was removed is no part of that: its object comes back with its store."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    ((_, (place,)),) = rig.put_start(client, [("a", len(DATA))])
    assert rig.remove(client, "a") is RemoveStatus.ABSENT
    assert node.write("a", place, DATA) is NodeStatus.OK
    assert rig.put_end(client, "a", place[0]) is PutStatus.STORED
    node.frozen = True
    rig.live(3 * STORE_TTL_MS)
    rig.close_session(node)
    node.frozen = False

    rig.live(1_000)

    assert rig.read("a") == DATA


def test_hidden_object_stays_until_its_successor_is_whole() -> None:
    """A put of a key whose store is away does not cost the old object when it fails."""
    rig = Rig()
    node, other, client = rig.node(), rig.node(), rig.client("host-store-0")
    rig.put(client, "a", DATA)
    rig.close_session(node)
    ((status, (place,)),) = rig.put_start(client, [("a", len(OTHER))])
    assert status is PutStatus.GRANTED
    assert rig.node_of(place[3]) is other
    rig.ask(client, Kind.PUT_REVOKE, end_row("a", place[0]))

    rig.live(500)

    assert rig.read("a") == DATA
    rig.core.check()


def test_successor_replaces_a_hidden_object() -> None:
    """A put of a key whose store is away is what is read from then on, also when that store is back."""
    rig = Rig()
    node, client = rig.node(), rig.client("host-store-0")
    rig.node()
    rig.put(client, "a", DATA)
    rig.close_session(node)
    rig.put(client, "a", OTHER)

    rig.live(2_000)

    assert rig.read("a") == OTHER
    assert node.core.objects == 0
    rig.core.check()


def test_late_writer_of_another_master() -> None:
    """A put that a master before granted cannot complete behind the back of the next one."""
    rig = Rig()
    node, client = rig.node(), rig.client()
    data = bytes(8_192)
    ((_, (place,)),) = rig.put_start(client, [("a", 8_192)], flags=ObjectFlag.PARTS)
    node.write("a", place, data, 0, 4_096)
    rig.restart()
    rig.open_session(node)
    rig.step_to_master(node)
    rig.step_to_node(node)  # mounted; the announcement begins

    assert node.write("a", place, data, 4_096, 4_096) is NodeStatus.STALE
    rig.live(2_000)
    assert node.core.objects == 0
    assert node.core.used_bytes == 0


@pytest.mark.parametrize(
    "odd",
    [
        {"capacity_bytes": -64},
        {"capacity_bytes": 1 << 60},
        {"capacity_bytes": (1 << 20) + 1},
        {"populated_bytes": -64},
        {"populated_bytes": (1 << 20) + 64},
        {"populated_bytes": 65},
        {"incarnation": 0},
        {"highest_generation": -1},
    ],
    ids=str,
)
def test_mount_that_cannot_be_is_refused(odd: dict[str, int]) -> None:
    """A store that offers what no store can have is sent away before anything is entered."""
    rig = Rig()
    node = rig.node(mounted=False)
    conn = 99
    rig.core.connected(conn, hello("store", node.name, node.host))

    with pytest.raises(WireError):
        rig.ask(conn, Kind.MOUNT, wire.encode(msgspec.structs.replace(node.mount(), **odd)))

    assert len(rig.core.stores) == 0
    rig.open_session(node)
    rig.flow()
    assert state_of(rig, node) is StoreState.READY


@pytest.mark.parametrize("populated", [-64, 65, (1 << 20) + 64])
def test_beat_that_cannot_be_is_refused(populated: int) -> None:
    """Nor does a beat give memory that the store does not have."""
    rig = Rig()
    node = rig.node()
    beat = m.Beat(populated_bytes=populated, objects=0, used_bytes=0, loop_lag_ms=0)

    with pytest.raises(WireError):
        rig.ask(node.conn, Kind.BEAT, wire.encode(beat))

    rig.core.check()


def test_mount_of_a_later_term_is_refused() -> None:
    """A master that lost its state grants nothing to a store that has seen a later term."""
    rig = Rig()
    node = rig.node(mounted=False)
    node.core.raise_floor(7 << 40)
    rig.open_session(node)

    with pytest.raises(KvopsError, match="term"):
        rig.core.handle(node.conn, *node.to_master[0][:1], 1, node.to_master[0][1], now_ms=rig.now_ms)


# What others may not send.


def test_client_cannot_speak_for_a_store() -> None:
    """A store's frames are refused from a client, each with the frame's name."""
    rig = Rig()
    client = rig.client()

    for kind in (Kind.MOUNT, Kind.SLOTS, Kind.BEAT, Kind.UNMOUNT, wire.reply(Kind.FREE)):
        with pytest.raises(WireError, match="store"):
            rig.ask(client, kind, b"")


@given(kind=st.integers(0, 300), body=st.binary(max_size=200))
def test_any_bytes_are_answered_or_refused(kind: int, body: bytes) -> None:
    """Whatever a client sends, it gets an answer or a WireError, and nothing changes under others."""
    rig = _shared
    client = rig.client()
    try:
        rig.ask(client, kind, body)
    except WireError:
        pass
    rig.leave(client)

    assert rig.read("a") == DATA
    rig.core.check()


_shared = Rig()
_shared.node()
_shared.put(_shared.client(), "a", DATA)


def test_large_batches_are_refused() -> None:
    """A batch that would hold up the loop, or whose answer fits no frame, is a WireError."""
    rig = Rig()
    client = rig.client()

    with pytest.raises(WireError, match="more than"):
        rig.ask(client, Kind.PUT_START, put_rows([("x", 1)] * (PUTS_PER_FRAME_MAX + 1)))
    with pytest.raises(WireError, match="replicas"):
        rig.ask(client, Kind.PUT_START, put_rows([("x", 1)], replicas=REPLICAS_MAX + 1))
    with pytest.raises(WireError, match="smaller"):
        rig.core.lookup(digests(["x"]) * (KEYS_PER_FRAME_MAX + 1), now_ms=rig.now_ms)
