"""The object index against a plain dict: whatever happens in whatever order, each key is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvops.errors import NoSpace, UsageError
from kvops.limits import LEASE_TTL_MS
from kvops.store.index import BUCKETS_MIN, FILL_MAX, ObjectIndex
from kvops.store.lease import ages_ms
from kvops.store.model import LOCATION, Digests, Locations

ROW = LOCATION.itemsize


def digests_of(count: int, *, seed: int = 1) -> Digests:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), dtype=np.uint64)


def locations_of(count: int, *, store: int = 1, first: int = 1) -> Locations:
    rows = np.zeros(count, dtype=LOCATION)
    rows["generation"] = np.arange(first, first + count)
    rows["offset"] = 64 * rows["generation"]
    rows["size"] = 100
    rows["store"] = store
    return rows


def filled(count: int, *, objects_max: int = 100_000) -> tuple[ObjectIndex, Digests, Locations]:
    index = ObjectIndex(objects_max=objects_max)
    digests, locations = digests_of(count), locations_of(count)
    index.insert(digests, locations, 0, 0, touched_ms=0)
    return index, digests, locations


@pytest.mark.parametrize("batch", [1, 2, 6, 7, 32, 1_000, 1_024, 1_025, 5_000])
def test_every_batch_size_finds_the_same(batch: int) -> None:
    """A lookup returns each key's own row, and zeros for strangers, whatever the number of keys in a call."""
    index, digests, locations = filled(5_000)
    asked, expected = digests[-batch:].copy(), locations[-batch:].copy()
    asked[::3], expected[::3] = digests_of(len(asked[::3]), seed=2), np.zeros((), dtype=LOCATION)

    rows = index.lookup(asked.tobytes(), now_ms32=7)

    assert rows == expected.tobytes()
    assert index.exists(asked.tobytes()) == (expected["store"] != 0).astype(np.uint8).tobytes()
    assert (index.find(asked) != 0).tolist() == (expected["store"] != 0).tolist()
    assert (index.lookups_total, index.hits_total) == (batch, np.count_nonzero(expected["store"]))


def test_growing_keeps_every_key() -> None:
    """All keys stay findable while the table doubles seven times, in single, small and large inserts."""
    index = ObjectIndex(objects_max=500_000)
    digests = digests_of(300_000)
    at = 0
    for size in [1] * 50 + [32] * 100 + [3_000] * 1_000:
        part = digests[at : at + size]
        if len(part):
            index.insert(part, locations_of(len(part), first=at + 1), 0, 0, touched_ms=0)
        at += size

    index.check()
    rows = np.frombuffer(index.lookup(digests.tobytes(), now_ms32=0), dtype=LOCATION)
    assert (rows["generation"] == np.arange(1, len(digests) + 1)).all()
    assert index.chained_count < len(digests) // 50
    assert index.memory_bytes() < 100 * len(digests)


def test_maintain_finishes_a_doubling() -> None:
    """Idle time can complete the growth that inserts began, slice by slice; then there is nothing left."""
    index, digests, _ = filled(FILL_MAX * BUCKETS_MIN)
    more = digests_of(32, seed=5)
    index.insert(more, locations_of(32), 0, 0, touched_ms=0)

    slices = 1
    while index.maintain(100):
        slices += 1

    assert 1 < slices <= 11
    assert not index.maintain(100)
    index.check()
    assert (index.find(np.concatenate([digests, more])) != 0).all()


def test_a_lookup_grants_leases_to_hits_only() -> None:
    """Each hit is leased from the lookup on; what was not asked for, and what only `exists` saw, is not."""
    index, digests, _ = filled(100)
    now = 5_000

    index.lookup(digests[:40].tobytes(), now_ms32=now)
    index.lookup(digests[40:41].tobytes(), now_ms32=now)
    index.exists(digests.tobytes())

    held = ages_ms(index.touched_ms[index.find(digests)], now + LEASE_TTL_MS - 1) < LEASE_TTL_MS
    assert held.tolist() == [True] * 41 + [False] * 59


@pytest.mark.parametrize("batch", [1, 50])
def test_a_hidden_store_is_missed_and_not_leased(batch: int) -> None:
    """Once a store is hidden no lookup names it or leases its memory; sweeps still find its objects."""
    index, digests, _ = filled(batch)
    other = digests_of(batch, seed=3)
    index.insert(other, locations_of(batch, store=2), 0, 0, touched_ms=0)

    index.set_hidden(1, True)

    assert index.lookup(digests.tobytes(), now_ms32=9_000) == bytes(ROW * batch)
    assert index.lookup(other.tobytes(), now_ms32=9_000) == locations_of(batch, store=2).tobytes()
    assert index.exists(digests.tobytes()) == bytes(batch)
    assert (index.touched_ms[index.find(digests)] == 0).all()
    assert index.hits_total == batch
    index.set_hidden(1, False)
    assert index.exists(digests.tobytes()) == b"\1" * batch


def test_colliding_keys_are_all_found() -> None:
    """Keys of one bucket that share a tag, have tag 0 or are too many are found, removed and found again."""
    index = ObjectIndex(objects_max=1_000)
    same_tag = [(5 << 32 | i << 12, i) for i in range(3)]
    tag_zero = [(i << 12, 100 + i) for i in range(3)]
    crowd = [(i << 32, 200 + i) for i in range(10, 40)]
    digests = np.array(same_tag + tag_zero + crowd, dtype=np.uint64)
    index.insert(digests, locations_of(len(digests)), 0, 0, touched_ms=0)
    index.check()
    assert index.chained_count > 20

    slots = index.find(digests)
    index.remove(slots[::2])

    index.check()
    assert (index.find(digests) != 0).tolist() == [i % 2 == 1 for i in range(len(digests))]
    index.remove(slots[1::2])
    index.check()
    assert (len(index), index.chained_count) == (0, 0)


def test_removed_keys_leave_no_location() -> None:
    """A removed key is a miss, its slot's store is 0 for sweeps, and its slot serves the next key."""
    index, digests, _ = filled(100)
    slots = index.find(digests)

    index.remove(slots)

    assert index.lookup(digests.tobytes(), now_ms32=1) == bytes(ROW * 100)
    assert not index.location["store"][slots].any()
    assert sorted(index.insert(digests, locations_of(100), 0, 0, touched_ms=0).tolist()) == sorted(
        slots.tolist()
    )
    assert index.slots_used == 101


def test_a_full_index_refuses_and_changes_nothing() -> None:
    """An insert beyond objects_max raises NoSpace before any of its keys is entered."""
    index, _, _ = filled(90, objects_max=100)

    with pytest.raises(NoSpace):
        index.insert(digests_of(11, seed=4), locations_of(11), 0, 0, touched_ms=0)

    assert len(index) == 90
    index.insert(digests_of(10, seed=4), locations_of(10), 0, 0, touched_ms=0)
    index.check()


def test_misuse_is_caught() -> None:
    """A slot removed twice, in one call or two, is a programmer's error; so is an impossible size."""
    index, digests, _ = filled(10)
    slot = index.find(digests[:1])

    with pytest.raises(AssertionError):
        index.remove(np.concatenate([slot, slot]))
    index.remove(slot)
    with pytest.raises(AssertionError):
        index.remove(slot)
    with pytest.raises(UsageError):
        ObjectIndex(objects_max=0)


def test_depth_tenant_and_digests_follow_the_key() -> None:
    """What was stored beside a key is read back under its slot."""
    index = ObjectIndex(objects_max=1_000)
    digests = digests_of(50)
    depth = np.arange(50, dtype=np.uint16)

    slots = index.insert(digests, locations_of(50), depth, 7, touched_ms=(1 << 32) - 1)

    assert (index.depth[slots] == depth).all()
    assert (index.tenant[slots] == 7).all()
    assert (index.digests(slots) == digests).all()
    assert (index.touched_ms[slots] == (1 << 32) - 1).all()


# Few buckets, tags and second words, so that every way of colliding is met often. No two agree in all of
# tag, bucket and second word (or, if a tag is 0, in the other two): those would be one key to the index.
KEYS = st.builds(
    lambda bucket, tag, above, hi: (tag << 32 | above << 10 | bucket, hi << 3 | above << 1 | (tag == 0)),
    bucket=st.sampled_from([0, 1, 513]),
    tag=st.integers(0, 12),
    above=st.integers(0, 3),
    hi=st.integers(0, 3),
)
BATCHES = st.lists(KEYS, min_size=1, max_size=24, unique=True)


class IndexMachine(RuleBasedStateMachine):
    """Index and leases beside a dict of key → (location, touched)."""

    def __init__(self) -> None:
        super().__init__()
        self.index = ObjectIndex(objects_max=20_000)
        self.model: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.hidden: set[int] = set()
        self.now = (1 << 32) - 5_000  # the clock's u32 wraps early in most runs
        self.generation = 0
        self.ballast = 0

    @property
    def now_ms32(self) -> int:
        return self.now & 0xFFFFFFFF

    def seen(self, key: tuple[int, int]) -> bytes:
        """The row a lookup must return."""
        row = self.model[key][0] if key in self.model else bytes(ROW)
        return bytes(ROW) if int(np.frombuffer(row, LOCATION)["store"][0]) in self.hidden else row

    @rule(keys=BATCHES, store=st.integers(1, 3), leased=st.booleans())
    def insert(self, keys: list[tuple[int, int]], store: int, leased: bool) -> None:
        keys = [key for key in keys if key not in self.model]
        rows = locations_of(len(keys), store=store, first=self.generation + 1)
        self.generation += len(keys)
        touched = self.now if leased else self.now - LEASE_TTL_MS
        digests = np.array(keys, dtype=np.uint64).reshape(-1, 2)
        slots = self.index.insert(digests, rows, 3, 4, touched_ms=touched & 0xFFFFFFFF)
        assert len(set(slots.tolist())) == len(keys)
        for key, row in zip(keys, rows, strict=True):
            self.model[key] = (row.tobytes(), touched)

    @rule(count=st.integers(500, 3_000))
    def grow(self, count: int) -> None:
        if self.ballast + count <= 15_000:
            digests = digests_of(self.ballast + count, seed=99)[self.ballast :]
            self.index.insert(digests, locations_of(count, store=9), 0, 0, touched_ms=0)
            self.ballast += count

    @rule(budget=st.integers(1, 500))
    def maintain(self, budget: int) -> None:
        self.index.maintain(budget)

    @rule(keys=BATCHES)
    def remove(self, keys: list[tuple[int, int]]) -> None:
        keys = [key for key in keys if key in self.model]
        self.index.remove(self.index.find(np.array(keys, dtype=np.uint64).reshape(-1, 2)))
        for key in keys:
            del self.model[key]

    @rule(keys=st.lists(KEYS, min_size=1, max_size=24))
    def lookup(self, keys: list[tuple[int, int]]) -> None:
        data = np.array(keys, dtype=np.uint64).tobytes()
        hits = self.index.hits_total
        assert self.index.lookup(data, now_ms32=self.now_ms32) == b"".join(map(self.seen, keys))
        assert self.index.hits_total - hits == sum(any(self.seen(key)) for key in keys)
        for key in keys:
            if any(self.seen(key)):
                self.model[key] = (self.model[key][0], self.now)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=24))
    def look_without_touching(self, keys: list[tuple[int, int]]) -> None:
        digests = np.array(keys, dtype=np.uint64)
        assert self.index.exists(digests.tobytes()) == bytes(any(self.seen(key)) for key in keys)
        found = self.index.find(digests).tolist()
        assert found == [self.index.find_one(digest.tobytes()) for digest in digests]
        assert [slot != 0 for slot in found] == [key in self.model for key in keys]

    @rule(ms=st.integers(0, 3_000))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(store=st.integers(1, 3))
    def hide_or_show(self, store: int) -> None:
        self.hidden ^= {store}
        self.index.set_hidden(store, store in self.hidden)

    @rule()
    def leases_agree(self) -> None:
        keys = list(self.model)
        slots = self.index.find(np.array(keys, dtype=np.uint64).reshape(-1, 2))
        expected = [self.now - self.model[key][1] < LEASE_TTL_MS for key in keys]
        ages = ages_ms(self.index.touched_ms[slots], self.now_ms32)
        assert (ages < LEASE_TTL_MS).tolist() == expected

    @rule()
    def is_whole(self) -> None:
        self.index.check()

    @invariant()
    def counts(self) -> None:
        assert len(self.index) == len(self.model) + self.ballast


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
