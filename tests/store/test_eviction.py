"""Eviction takes the least recently used of the whole pool, and nothing that anybody holds."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvops.limits import LEASE_TTL_MS
from kvops.store.eviction import Evictor
from kvops.store.index import ObjectIndex
from kvops.store.model import LOCATION, ObjectFlag, Slots

NOW = 100_000
STEPS_MAX = 10_000


def pool(
    ages_ms: list[int] | NDArray[np.int64],
    *,
    flags: list[int] | int = 0,
    depth: list[int] | int = 0,
    store: list[int] | int = 1,
    now_ms32: int = NOW,
) -> tuple[ObjectIndex, Slots]:
    """An index with one object an age, and their slots."""
    count = len(ages_ms)
    index = ObjectIndex(objects_max=count + 10)
    digests = np.random.default_rng(1).integers(0, 1 << 64, (count, 2), dtype=np.uint64)
    rows = np.zeros(count, dtype=LOCATION)
    rows["store"] = store
    rows["flags"] = flags
    slots = index.insert(digests, rows, depth, 0, touched_ms=0)
    index.touched_ms[slots] = (now_ms32 - np.asarray(ages_ms)) % (1 << 32)
    return index, slots


def evict_all(index: ObjectIndex, evictor: Evictor, *, count_max: int = 10, now_ms32: int = NOW) -> list[int]:
    """Victims in the order in which they were removed, until nothing can be evicted."""
    victims: list[int] = []
    for _ in range(STEPS_MAX):
        slots = evictor.step(now_ms32=now_ms32, count_max=count_max)
        assert len(slots) <= count_max
        index.remove(slots)
        victims += slots.tolist()
        if evictor.exhausted:
            assert not len(slots)
            return victims
    raise AssertionError("never exhausted")


def test_the_oldest_go_first() -> None:
    """A pool's victims are its oldest, oldest first, wherever they lie."""
    ages = np.random.default_rng(2).permutation(3_000) + LEASE_TTL_MS
    index, slots = pool(ages)

    victims = Evictor(index).step(now_ms32=NOW, count_max=30)

    assert victims.tolist() == slots[np.argsort(ages)[::-1][:30]].tolist()


def test_a_large_pool_loses_its_oldest_two_percent_first() -> None:
    """Where the threshold rests on a sample, the first victims are of the oldest three percent."""
    count = 50_000
    ages = np.random.default_rng(3).permutation(count) + LEASE_TTL_MS
    index, slots = pool(ages)
    age_of = dict(zip(slots.tolist(), ages.tolist(), strict=True))
    evictor = Evictor(index)

    victims: list[int] = []
    while len(victims) < count // 100:
        found = evictor.step(now_ms32=NOW, count_max=100)
        index.remove(found)
        victims += found.tolist()

    assert min(age_of[slot] for slot in victims) > LEASE_TTL_MS + 0.97 * count


def test_of_one_request_the_deepest_go_first() -> None:
    """Pages that were touched together leave from the end of their chain: what stays is a useful prefix."""
    depth = np.random.default_rng(4).permutation(200)
    index, slots = pool([5_000] * 200, depth=depth.tolist())

    victims = Evictor(index).step(now_ms32=NOW, count_max=50)

    assert victims.tolist() == slots[np.argsort(depth)[::-1][:50]].tolist()


def test_soft_pins_go_last_and_hard_pins_never() -> None:
    """Whatever its age, a soft pin outlives everything unpinned, and a hard pin outlives everything."""
    soft, hard = int(ObjectFlag.SOFT_PIN), int(ObjectFlag.HARD_PIN)
    flags = [soft, hard, soft | hard, 0, soft, int(ObjectFlag.HAS_TTL)]
    index, slots = pool([9_000, 8_000, 7_000, 6_000, 5_000, 4_000], flags=flags)

    victims = evict_all(index, Evictor(index), count_max=1)

    assert victims == slots[[3, 5, 0, 4]].tolist()


def test_leased_objects_stay_until_the_lease_ends() -> None:
    """Nothing leased is taken; the evictor says that nothing is left, and goes on when leases have ended."""
    index, slots = pool([0, LEASE_TTL_MS - 1, LEASE_TTL_MS])
    evictor = Evictor(index)

    assert evict_all(index, evictor) == [slots[2]]
    assert evict_all(index, evictor, now_ms32=NOW + 1) == [slots[1]]
    assert evict_all(index, evictor, now_ms32=NOW + LEASE_TTL_MS) == [slots[0]]
    assert evict_all(index, evictor, now_ms32=NOW + LEASE_TTL_MS) == []


def test_a_lease_granted_during_a_round_is_respected() -> None:
    """An object that is looked up after the sample found it old is not taken in that round."""
    index, slots = pool(np.arange(1_000) + 5_000)
    evictor = Evictor(index)
    index.remove(evictor.step(now_ms32=NOW, count_max=5))
    index.touched_ms[slots[900:]] = NOW

    victims = evictor.step(now_ms32=NOW, count_max=20)

    assert not np.isin(victims, slots[900:]).any()


def test_hidden_stores_are_left_alone() -> None:
    """Objects on a hidden store are no victims: freeing them would make room nowhere."""
    index, slots = pool([9_000, 8_000, 7_000], store=[1, 2, 1])
    index.set_hidden(1, True)

    assert evict_all(index, Evictor(index)) == [slots[1]]


def test_an_empty_pool_is_exhausted() -> None:
    """Without objects the evictor says at once that there is nothing to take."""
    index = ObjectIndex(objects_max=10)

    assert evict_all(index, Evictor(index)) == []


def test_a_step_is_bounded_and_the_next_goes_on() -> None:
    """Small steps over a pool where one object in thousands may go return empty until they meet it."""
    ages = np.zeros(20_000, dtype=np.int64)
    ages[17_000] = 5_000
    index, slots = pool(ages)
    evictor = Evictor(index, window_slots=512, step_slots=512)

    steps = 0
    found = evictor.step(now_ms32=NOW, count_max=10)
    while not len(found):
        assert not evictor.exhausted
        found = evictor.step(now_ms32=NOW, count_max=10)
        steps += 1

    assert found.tolist() == [slots[17_000]]
    assert 17_000 // 512 <= steps <= 3 * 20_000 // 512


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exactly_what_may_go_goes_once(data: st.DataObject) -> None:
    """Until it is exhausted the evictor returns each unleased, unpinned object once, and nothing else."""
    count = data.draw(st.integers(0, 300))
    seed = data.draw(st.integers(0, 1_000))
    window = data.draw(st.sampled_from([1, 7, 100, 4_096]))
    now = data.draw(st.sampled_from([NOW, 5, (1 << 32) - 1]))
    count_max = data.draw(st.integers(1, 50))
    rng = np.random.default_rng(seed)
    ages = rng.integers(0, 4, count) * (LEASE_TTL_MS // 2)
    flags = rng.integers(0, 8, count)
    index, slots = pool(ages, flags=flags.tolist(), depth=rng.integers(0, 4, count).tolist(), now_ms32=now)
    if count:
        index.remove(slots[::7])
    evictor = Evictor(index, window_slots=window, step_slots=data.draw(st.integers(window, 5_000)))

    victims = evict_all(index, evictor, count_max=count_max, now_ms32=now)

    may_go = (ages >= LEASE_TTL_MS) & (flags & ObjectFlag.HARD_PIN == 0)
    may_go[::7] = False
    assert sorted(victims) == sorted(slots[may_go].tolist())
    soft = {int(slot) for slot in slots[(flags & ObjectFlag.SOFT_PIN) != 0]}
    order = [slot in soft for slot in victims]
    assert order == sorted(order)


def requests(count: int, *, seed: int) -> list[list[int]]:
    """Prefix chains of conversations that come back with a longer prompt, and of a few shared documents."""
    rng = np.random.default_rng(seed)
    talks: list[list[int]] = []
    fresh = 0
    result = []
    for _ in range(count):
        if talks and rng.random() < 0.7:
            at = len(talks) - 1 - min(int(rng.exponential(40)), len(talks) - 1)
        else:
            document = int(rng.zipf(1.4)) % 200
            talks.append([-(document * 100 + page) - 1 for page in range(document % 30)])
            at = len(talks) - 1
        grown = int(rng.integers(1, 25))
        talks[at] = talks[at] + list(range(fresh, fresh + grown))
        fresh += grown
        result.append(talks[at])
    return result


def hit_ratio_lru(chains: list[list[int]], capacity: int) -> float:
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        hits += next((at for at, page in enumerate(chain) if page not in resident), len(chain))
        for page in reversed(chain):  # the deepest are the oldest of their request
            resident[page] = None
            resident.move_to_end(page)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits / sum(map(len, chains))


def hit_ratio_swept(chains: list[list[int]], capacity: int) -> float:
    digest_of = np.random.default_rng(5).integers(0, 1 << 64, (60_000, 2), dtype=np.uint64)
    index = ObjectIndex(objects_max=capacity)
    evictor = Evictor(index)
    hits = 0
    for at, chain in enumerate(chains):
        now = 10_000 + 250 * at
        digests = digest_of[np.array(chain)]
        rows = np.frombuffer(index.lookup(digests.tobytes(), now_ms32=now), dtype=LOCATION)
        absent = (rows["store"] == 0).nonzero()[0]
        hits += int(absent[0]) if len(absent) else len(chain)
        while len(index) + len(absent) > capacity:
            index.remove(evictor.step(now_ms32=now, count_max=len(index) + len(absent) - capacity))
        new = np.zeros(len(absent), dtype=LOCATION)
        new["store"] = 1
        index.insert(digests[absent], new, absent, 0, touched_ms=now - LEASE_TTL_MS)
    return hits / sum(map(len, chains))


@pytest.mark.parametrize("capacity", [1_500, 6_000, 12_000])
def test_hits_are_those_of_exact_lru(capacity: int) -> None:
    """On growing prefix chains the sweep loses less than a hundredth of hit ratio against exact LRU."""
    chains = requests(2_500, seed=6)
    assert max(max(chain) for chain in chains) < 40_000

    exact = hit_ratio_lru(chains, capacity)
    swept = hit_ratio_swept(chains, capacity)

    assert 0.1 < exact < 0.9
    assert abs(swept - exact) < 0.01
