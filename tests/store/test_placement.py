"""Where objects go: near their writer first, spread by host, and never a flood onto a new store."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.store import placement
from kvops.store.allocator import Allocator
from kvops.store.model import PlacementPolicy, StoreId
from kvops.store.placement import RAMP_MS, Candidate, Placement, Ramp, Writer, choose, local_first


def pool(hosts: int, nodes: int = 2) -> list[Candidate]:
    """``hosts`` × ``nodes`` stores, mixed up as a master may hold them."""
    stores = [
        Candidate(StoreId(1 + host * nodes + node), f"host-{host}", node, f"store-{host}-{node}")
        for node in range(nodes)
        for host in range(hosts)
    ]
    return stores[::-1]


def test_own_numa_node_then_own_host_then_others() -> None:
    """A writer's first store is its NUMA node's, its second its host's other; every store appears once."""
    stores = pool(4)

    order = local_first(Writer("host-2", 1), stores)

    assert [store.name for store in order[:2]] == ["store-2-1", "store-2-0"]
    assert sorted(order, key=lambda store: store.id) == sorted(stores, key=lambda store: store.id)


def test_a_hosts_stores_stay_together() -> None:
    """Pages that spill over fill one other host before the next, so that one dead host costs one share."""
    for host in range(20):
        order = local_first(Writer(f"engine-{host}", 0), pool(6, 4))

        changes = sum(before.host != after.host for before, after in pairwise(order))

        assert changes == 5


def test_order_does_not_depend_on_how_stores_are_listed() -> None:
    """Two masters with the same stores give a writer the same order."""
    writer = Writer("host-1", 0)

    assert local_first(writer, pool(5)) == local_first(writer, pool(5)[::-1])


def test_writers_spill_to_different_hosts() -> None:
    """The hosts that writers spill to first are spread about evenly over the pool."""
    first = Counter(local_first(Writer(f"engine-{index}", 0), pool(10))[0].host for index in range(1000))

    assert len(first) == 10
    assert max(first.values()) < 2 * 1000 / 10


@given(st.integers(2, 8), st.integers(0, 7), st.text(max_size=8))
def test_a_host_that_leaves_moves_nothing_else(hosts: int, gone: int, writer_host: str) -> None:
    """The order of the hosts that stay is the same as before."""
    writer = Writer(writer_host, 0)
    before = local_first(writer, pool(hosts))

    after = local_first(writer, [store for store in pool(hosts) if store.host != f"host-{gone}"])

    assert after == tuple(store for store in before if store.host != f"host-{gone}")


def test_an_order_is_kept_until_the_epoch_changes() -> None:
    """A writer's order is computed once an epoch; a new epoch sees the stores there are now."""
    placed = Placement(PlacementPolicy.LOCAL_FIRST)
    writer = Writer("host-0", 0)
    first = placed.order(writer, pool(3), epoch=1)

    assert placed.order(writer, pool(3), epoch=1) is first
    assert len(placed.order(writer, pool(2), epoch=2)) == 4


def test_remembered_writers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that come and go do not fill the master's memory, and still get their order."""
    monkeypatch.setattr(placement, "WRITERS_CACHED_MAX", 10)
    placed = Placement(PlacementPolicy.LOCAL_FIRST)

    orders = [placed.order(Writer(f"w{index}", 0), pool(2), epoch=1) for index in range(100)]

    assert len(placed._orders) <= 10
    assert orders[0] == placed.order(Writer("w0", 0), pool(2), epoch=1)


def test_random_is_seeded_and_even() -> None:
    """``random`` replays with its seed, and offers objects to all stores alike, wherever the writer is."""
    stores = pool(4, 1)
    writer = Writer("host-0", 0)
    one, two = (Placement(PlacementPolicy.RANDOM, seed=3) for _ in range(2))

    firsts = [one.order(writer, stores, epoch=1)[0].id for _ in range(400)]

    assert firsts == [two.order(writer, stores, epoch=1)[0].id for _ in range(400)]
    assert min(Counter(firsts).values()) > 60


PAGE = 64


def allocators(places: dict[int, int]) -> dict[StoreId, Allocator]:
    """Stores with room for so many pages each."""
    made = {}
    for store, count in places.items():
        made[StoreId(store)] = allocator = Allocator()
        if count:
            allocator.add_range(0, count * PAGE)
    return made


@given(
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.integers(1, 4),
    st.integers(0, 2),
)
def test_replicas_lie_on_distinct_hosts_or_nowhere(places: list[int], replicas: int, host: int) -> None:
    """Each replica takes the first store with room of another host; too few hosts, and nothing is taken."""
    stores = pool(3)
    before = {store.id: places[store.id - 1] for store in stores}
    room = allocators(before)
    order = local_first(Writer(f"host-{host}", 0), stores)
    hosts_with_room = list(dict.fromkeys(store.host for store in order if before[store.id]))

    chosen = choose(order, room, footprint=PAGE, replicas=replicas)

    left = {store: allocator.free_bytes // PAGE for store, allocator in room.items()}

    if len(hosts_with_room) < replicas:
        assert chosen is None
        assert left == before
    else:
        assert chosen is not None
        by_id = {store.id: store for store in stores}
        assert [by_id[store].host for store, _ in chosen] == hosts_with_room[:replicas]
        for store, _ in chosen:
            assert left[store] == before[store] - 1


def test_a_joining_store_is_not_flooded() -> None:
    """A new store in a full pool takes at most twice its fair share, but all writes of its own host."""
    stores = pool(10, 1)
    joined = next(store for store in stores if store.host == "host-7")
    ramp = Ramp()
    ramp.join(joined.id, now_ms=0)
    away, home = Writer("host-0", 0), Writer("host-7", 0)
    room = allocators(
        {store.id: 10_000 if store.id == joined.id else 0 for store in stores}
    )  # all others are full

    def put(writer: Writer) -> bool:
        chosen = choose(
            local_first(writer, stores),
            room,
            footprint=PAGE,
            admits=lambda store: ramp.admits(store, writer, store_count=len(stores)),
        )
        ramp.note([store for store, _ in chosen or []])
        return chosen is not None

    taken = sum(put(away) for _ in range(1000))
    assert 190 <= taken <= 201
    assert all(put(home) for _ in range(100))

    ramp.expire(now_ms=RAMP_MS - 1)
    assert ramp.active
    ramp.expire(now_ms=RAMP_MS)
    assert not ramp.active
    assert all(put(away) for _ in range(100))


@given(st.integers(1, 12))
def test_a_pool_of_new_stores_takes_every_object(hosts: int) -> None:
    """Where every store is new, every object finds a place from the first on."""
    stores = pool(hosts, 1)
    ramp = Ramp()
    for store in stores:
        ramp.join(store.id, now_ms=0)
    writer = Writer("elsewhere", 0)
    room = allocators({store.id: 200 for store in stores})

    for _ in range(200):
        chosen = choose(
            local_first(writer, stores),
            room,
            footprint=PAGE,
            admits=lambda store: ramp.admits(store, writer, store_count=hosts),
        )
        assert chosen is not None
        ramp.note([store for store, _ in chosen])

    ramp.leave(stores[0].id)
    assert ramp.active == (hosts > 1)
