"""What a master makes of the slots that a node announces."""

from __future__ import annotations

import numpy as np

from kvops.limits import CHUNK_BYTES
from kvops.net import wire
from kvops.net.auth import Hello
from kvops.net.wire import Kind
from kvops.store import messages as m
from kvops.store.keys import NAMESPACE_DEFAULT, index_digests
from kvops.store.master_core import MasterCore, MasterSettings
from kvops.store.model import LOCATION, Digests

FOOTPRINT = 192
CONN = 1


def digests(*names: str) -> Digests:
    return np.frombuffer(index_digests(NAMESPACE_DEFAULT, names), np.uint64).reshape(-1, 2)


def slots(*rows: tuple[str, int, int]) -> bytes:
    """Key, generation and place (in footprints) of each."""
    table = np.zeros(len(rows), m.SLOT_ROW)
    table["digest"] = digests(*(name for name, _, _ in rows))
    table["generation"] = [generation for _, generation, _ in rows]
    table["offset"] = [place * FOOTPRINT for _, _, place in rows]
    table["size"], table["chunk"] = 64, CHUNK_BYTES
    return table.tobytes()


def mount(core: MasterCore, name: str = "store-0", conn: int = CONN) -> None:
    core.connected(
        conn,
        Hello(
            role="store", group="g", name=name, host=name, numa_node=0, pid=1, boot_id="b", nonce=bytes(16)
        ),
    )
    body = m.Mount(
        name=name,
        host=name,
        numa_node=0,
        incarnation=conn,
        boot_id="b",
        pid=1,
        address="127.0.0.1:1",
        unix_path="",
        http_address="",
        capacity_bytes=100 * FOOTPRINT,
        populated_bytes=100 * FOOTPRINT,
        highest_generation=0,
        objects=0,
        transports=["tcp"],
    )
    core.handle(conn, Kind.MOUNT, 1, wire.encode(body), now_ms=0)


def announce(core: MasterCore, body: bytes, conn: int = CONN) -> list[int]:
    """Generations that the node is told to forget."""
    answer = core.handle(conn, Kind.SLOTS, 1, body, now_ms=0)
    assert answer is not None
    core.handle(conn, Kind.SLOTS, 1, b"", now_ms=0)
    return [generation for generation, _ in np.frombuffer(answer, m.FREE_ROW).tolist()]


def generations(core: MasterCore, *names: str) -> list[int]:
    answer = core.lookup(digests(*names).tobytes(), now_ms=0)
    found = np.frombuffer(answer, LOCATION, len(names), m.LOOKUP_HEAD.size)
    return [int(generation) for generation in found["generation"]]


def new_core() -> MasterCore:
    return MasterCore(MasterSettings(group="g", objects_max=1_000), term=1, now_ms=0)


def test_unknown_objects_are_adopted_and_their_memory_is_taken() -> None:
    """A master without a journal learns every object from the nodes, and gives none of their memory away."""
    core = new_core()
    mount(core)

    forgotten = announce(core, slots(("a", 1, 0), ("b", 2, 1), ("c", 3, 5)))

    assert forgotten == []
    assert generations(core, "a", "b", "c", "d") == [1, 2, 3, 0]
    assert core.used_bytes() == 3 * FOOTPRINT


def test_objects_of_the_journal_are_confirmed_and_those_not_announced_are_swept() -> None:
    """What the journal had and the node still holds stays as it is; what the node does not hold is gone."""
    core = new_core()
    mount(core)
    announce(core, slots(("kept", 1, 0), ("lost", 2, 1)))
    journalled = core.outbox.journal[-1].rows
    restarted = new_core()
    mount(restarted)
    location = np.array(journalled["location"])
    restarted.index.insert(digests("kept", "lost"), location, 0, 0, touched_ms=0)

    announce(restarted, slots(("kept", 1, 0), ("new", 3, 4)))
    for now in range(1_000):
        restarted.work(now_ms=now)

    assert generations(restarted, "kept", "lost", "new") == [1, 0, 3]
    assert len(restarted.index) == 2


def test_of_two_stores_with_one_key_the_newer_object_stays() -> None:
    """Two nodes hold different objects of one key after a partition: the newer wins, whoever announces first."""
    core = new_core()
    mount(core)
    mount(core, "store-1", 2)
    announce(core, slots(("key", 7, 0)))

    announce(core, slots(("other", 8, 0), ("key", 9, 1)), 2)

    assert generations(core, "key", "other") == [9, 8]


def test_memory_announced_twice_is_forgotten_by_the_node() -> None:
    """Two slots that overlap cannot both be right: the node is told to clear the later one."""
    core = new_core()
    mount(core)

    forgotten = announce(core, slots(("a", 1, 0), ("b", 2, 0), ("beyond", 3, 100)))

    assert sorted(forgotten) == [2, 3]
    assert generations(core, "a", "b", "beyond") == [1, 0, 0]


def test_nothing_is_evicted_because_a_store_still_announces() -> None:
    """A pool that is nearly empty keeps all its objects while a node that came back tells what it holds."""
    core = new_core()
    mount(core)
    core.handle(CONN, Kind.SLOTS, 1, slots(("a", 1, 0), ("b", 2, 1)), now_ms=0)

    for now_ms in range(0, 5_000, 10):
        core.work(now_ms=now_ms)

    assert core.outbox.counters.evicted == 0
    assert generations(core, "a", "b") == [1, 2]
