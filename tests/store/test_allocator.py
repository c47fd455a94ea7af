"""Free space of a segment: never two owners for a byte, never a byte lost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvops.limits import KIB, MIB
from kvops.store.allocator import REGION_BITS, SIZES_EXACT_MAX, Allocator
from kvops.transfer.layout import footprint_bytes

G = 64  # a granule
REGION = 1 << REGION_BITS


def allocator(granules: int, *, offset: int = 0) -> Allocator:
    made = Allocator()
    made.add_range(offset, granules * G)
    return made


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator beside a plain set of free granules."""

    held = Bundle("held")

    @initialize(at=st.sampled_from([0, REGION - 20 * G, REGION - 64 * G, 3 * REGION - G]))
    def start(self, at: int) -> None:
        self.allocator = Allocator()
        self.end = at
        self.capacity = 0
        self.free: set[int] = set()

    def fits(self, size: int) -> bool:
        run = 0
        previous = -2
        for granule in sorted(self.free):
            run = run + 1 if granule == previous + 1 else 1
            previous = granule
            if run * G >= size:
                return True
        return False

    def granules(self, offset: int, size: int) -> set[int]:
        return set(range(offset // G, (offset + size) // G))

    @rule(gap=st.sampled_from([0, 0, 1, 5]), granules=st.integers(1, 60))
    def add_range(self, gap: int, granules: int) -> None:
        offset = self.end + gap * G
        self.allocator.add_range(offset, granules * G)
        self.end = offset + granules * G
        self.capacity += granules * G
        self.free |= self.granules(offset, granules * G)

    @rule(target=held, granules=st.one_of(st.sampled_from([1, 17, 18]), st.integers(1, 40)))
    def allocate(self, granules: int) -> object:
        size = granules * G
        offset = self.allocator.allocate(size)
        if offset is None:
            # With few blocks the search below the certain class sees all of them: None means none fits.
            assert not self.fits(size)
            return multiple()
        assert self.granules(offset, size) <= self.free, "given to two owners"
        self.free -= self.granules(offset, size)
        return (offset, size)

    @rule(block=consumes(held))
    def give_back(self, block: tuple[int, int]) -> None:
        self.allocator.free(*block)
        self.free |= self.granules(*block)

    @rule(target=held, at=st.integers(-5, 130), granules=st.integers(1, 20))
    def reserve(self, at: int, granules: int) -> object:
        offset, size = max(0, self.end - at * G), granules * G
        granted = self.allocator.reserve(offset, size)
        assert granted == (self.granules(offset, size) <= self.free)
        if not granted:
            return multiple()
        self.free -= self.granules(offset, size)
        return (offset, size)

    @rule(target=held, rows=st.lists(st.tuples(st.integers(0, 130), st.integers(1, 9)), max_size=6))
    def reserve_batch(self, rows: list[tuple[int, int]]) -> object:
        blocks = [(max(0, self.end - at * G), granules * G) for at, granules in rows]
        offsets = np.array([offset for offset, _ in blocks], np.uint64)
        sizes = np.array([size for _, size in blocks], np.uint64)
        granted = self.allocator.reserve_batch(offsets, sizes)
        for row in sorted(range(len(blocks)), key=lambda row: blocks[row][0]):
            assert granted[row] == (self.granules(*blocks[row]) <= self.free)
            if granted[row]:
                self.free -= self.granules(*blocks[row])
        return multiple(*(block for block, ours in zip(blocks, granted, strict=True) if ours))

    @invariant()
    def accounts(self) -> None:
        self.allocator.check()
        assert self.allocator.free_bytes == len(self.free) * G
        assert self.allocator.capacity_bytes == self.capacity
        assert self.allocator.used_bytes == self.capacity - len(self.free) * G
        listed: set[int] = set()
        for block in self.allocator.blocks():
            listed |= self.granules(*block)
        assert listed == self.free


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, deadline=None)


def test_equal_pages_reuse_their_own_holes() -> None:
    """A full pool of equal pages takes a new page into any one page's hole, whatever the size's class."""
    page = footprint_bytes(64 * KIB, 64 * KIB)
    pool = Allocator()
    pool.add_range(0, 1000 * page)
    pages = [pool.allocate(page) for _ in range(1000)]
    assert pool.free_bytes == 0

    for offset in pages[::7]:
        assert offset is not None
        pool.free(offset, page)
        assert pool.allocate(page) == offset

    assert pool.allocate(page) is None


def test_a_block_from_before_its_class_is_found() -> None:
    """A hole made before its size was ever asked for serves the first request for just that size."""
    pool = allocator(1100)
    first = pool.allocate(1030 * G)
    wall = pool.allocate(70 * G)
    assert first == 0
    assert wall is not None
    pool.free(0, 1030 * G)

    assert pool.allocate(1029 * G) == 0
    pool.check()


def test_all_memory_can_be_used() -> None:
    """Memory that was cut into pieces of many sizes joins again to one block when all of it is free."""
    pool = Allocator()
    pool.add_range(0, 3 * REGION)
    rng = random.Random(7)
    held = []
    while (offset := pool.allocate(size := rng.randrange(1, 40_000) * G)) is not None:
        held.append((offset, size))
    rng.shuffle(held)

    for block in held:
        pool.free(*block)

    pool.check()
    assert list(pool.blocks()) == [(0, 3 * REGION)]
    assert pool.allocate(3 * REGION) == 0


def test_low_addresses_are_filled_first() -> None:
    """Holes in low regions are used before memory further up, so that the free rest stays in one piece."""
    pool = Allocator()
    pool.add_range(0, 2 * REGION)
    held = [pool.allocate(MIB) for _ in range(200)]
    pool.free(MIB * 5, MIB)
    pool.free(MIB * 150, MIB)

    assert held[150] == MIB * 150
    assert pool.allocate(MIB) == MIB * 5


def test_sizes_are_bounded() -> None:
    """Any number of different sizes makes only a bounded number of classes."""
    pool = allocator(200_000)
    classes = len(pool._bounds)

    for granules in range(1, 4 * SIZES_EXACT_MAX):
        offset = pool.allocate(granules * G)
        assert offset is not None
        pool.free(offset, granules * G)

    pool.check()
    assert len(pool._bounds) <= classes + SIZES_EXACT_MAX


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 2 * G), (8 * G, 2 * G), (0, 10 * G), (10 * G, G)],
    ids=["start", "end", "all", "beyond"],
)
def test_freeing_what_is_free_is_caught(offset: int, size: int) -> None:
    """Memory freed twice, or never owned, is a programmer's error and changes nothing."""
    pool = allocator(10)
    assert pool.allocate(4 * G) == 0
    pool.free(0, 4 * G)

    with pytest.raises(AssertionError):
        pool.free(offset, size)

    pool.check()
    assert pool.free_bytes == 10 * G


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 0), (0, -G), (1, G), (0, G + 1), (-G, G), (9 * G, 2 * G), (1 << 60, G)],
)
def test_reserving_nonsense_is_refused(offset: int, size: int) -> None:
    """A row of a damaged journal reserves nothing and raises nothing."""
    pool = allocator(10)

    assert not pool.reserve(offset, size)
    assert pool.free_bytes == 10 * G
    pool.check()


def test_reserving_a_recovered_pool() -> None:
    """A node's announced objects are carved out again, and the gaps between them can be allocated."""
    page = footprint_bytes(64 * KIB, 64 * KIB)
    pool = Allocator()
    pool.add_range(0, 5_000 * page)
    rows = np.delete(np.arange(5_000, dtype=np.uint64), np.arange(0, 5_000, 10))
    np.random.default_rng(1).shuffle(rows)

    granted = pool.reserve_batch(rows * page, np.full(len(rows), page, np.uint64))

    pool.check()
    assert granted.all()
    assert pool.free_bytes == 500 * page
    assert sorted(pool.allocate(page) or 0 for _ in range(500)) == [
        index * page for index in range(0, 5_000, 10)
    ]
    assert pool.allocate(G) is None
