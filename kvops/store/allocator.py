"""
Which bytes of one segment are free.

Binned offset allocation: a free block is known by its start, its end and its size class; an allocated one
is not known at all, its owner hands offset and size back. Allocating takes a block from the smallest
class that certainly fits, splits it and puts the rest back; freeing joins the block with free neighbours.
Each is a fixed number of dictionary operations.

Two things differ from the textbook:

- A class starts at every size that was ever asked for, up to a bound. With fixed classes a freed block of
  65,664 bytes lies below the class that a request for 65,664 bytes searches: a pool of equal pages could
  not reuse its own holes.
- Every table is cut by region of the segment. A table of a million entries resizes in one pause of tens
  of milliseconds, one of a region's in a fraction of one; and taking the lowest region first keeps holes
  together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import chain, islice, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.limits import ALIGN_BYTES

REGION_BITS: Final = 27  # 128 MiB: 2,000 pages of 64 KiB
MANTISSA_BITS: Final = 3  # fixed classes: eight to each power of two
SEGMENT_BYTES_MAX: Final = 1 << 46
SIZES_EXACT_MAX: Final = 256  # further sizes share the classes there are
FALLBACK_COUNT_MAX: Final = 64  # blocks looked at one by one, where some may fit, before giving up


def _fixed_classes() -> Iterator[int]:
    """Lower bounds of the classes, ascending, in bytes: 1–8 granules, then eight steps to each doubling."""
    steps = 1 << MANTISSA_BITS
    yield from (ALIGN_BYTES * granules for granules in range(1, steps))
    unit = ALIGN_BYTES
    while unit * steps <= SEGMENT_BYTES_MAX:
        yield from (unit * (steps + step) for step in range(steps))
        unit *= 2


class _Class:
    """Free blocks of one size class, by region."""

    __slots__ = ("blocks", "regions")

    def __init__(self) -> None:
        self.regions = 0  # bit set: regions that have one
        self.blocks: dict[int, dict[int, None]] = {}  # region → starts; last in, first out


class Allocator:
    """Free space of one segment. Offsets and sizes are in bytes, multiples of 64; no clock, lock or I/O."""

    __slots__ = (
        "_bounds",
        "_classes",
        "_exact_left",
        "_high",
        "_low",
        "_occupied",
        "_order",
        "_tables",
        "capacity_bytes",
        "free_bytes",
    )

    def __init__(self) -> None:
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._bounds = list(_fixed_classes())
        self._classes = [_Class() for _ in self._bounds]
        self._occupied = 0  # bit set: classes that have a block
        self._exact_left = SIZES_EXACT_MAX
        self._tables: list[dict[int, int]] = []  # [region] start → size; end + 1 → start
        self._low = self._high = 0  # envelope of all ranges
        self._order: list[int] | None = None  # starts, ascending; kept only while reserving

    @property
    def used_bytes(self) -> int:
        """What is allocated, padding included."""
        return self.capacity_bytes - self.free_bytes

    def add_range(self, offset: int, size: int) -> None:
        """Make newly populated memory allocatable; it touches no range that was added before."""
        end = offset + size
        assert 0 <= offset < end <= SEGMENT_BYTES_MAX, "a range of the segment"
        assert not (offset | size) % ALIGN_BYTES, "ranges are made of granules"
        while len(self._tables) <= end >> REGION_BITS:
            self._tables.append({})
        self._low = min(self._low, offset) if self.capacity_bytes else offset
        self._high = max(self._high, end)
        self.capacity_bytes += size
        self.free(offset, size)

    def allocate(self, size: int) -> int | None:
        """
        Take ``size`` bytes out of the free space.

        Returns:
            Their offset, or None when no block is large enough, whatever the sum of all.
        """
        assert 0 < size <= SEGMENT_BYTES_MAX, "an object has a header, and a bound"
        assert not size % ALIGN_BYTES, "sizes are footprints"
        self._order = None
        bounds = self._bounds
        index = bisect_left(bounds, size)
        if bounds[index] != size and self._exact_left:
            self._add_class(index, size)
        higher = self._occupied >> index  # every block in these classes fits
        if not higher:
            return self._allocate_below(index - 1, size)
        index += (higher & -higher).bit_length() - 1
        of_class = self._classes[index]
        regions = of_class.regions
        region = (regions & -regions).bit_length() - 1
        blocks = of_class.blocks[region]
        offset = blocks.popitem()[0]
        table = self._tables[region]
        block = table.pop(offset)
        rest_at = offset + size
        rest = block - size
        if rest >= bounds[index] and rest_at >> REGION_BITS == region:
            # What is left of a large block stays where it was: no class to look up, no table to drop.
            blocks[rest_at] = None
            table[rest_at] = rest
            end = offset + block
            self._tables[end >> REGION_BITS][end + 1] = rest_at
            self.free_bytes -= size
            return offset
        if not blocks:
            self._forget(index, of_class, region)
        self._split(offset, block, size)
        return offset

    def free(self, offset: int, size: int) -> None:
        """
        Give back what ``allocate`` or ``reserve`` granted: the same offset and size.

        Freeing twice is caught where it shows at a block's edges, not inside one that was joined since.
        """
        end = offset + size
        assert self._low <= offset < end <= self._high, "freed memory lies in the segment"
        table = self._tables[offset >> REGION_BITS]
        after_table = self._tables[end >> REGION_BITS]
        assert offset not in table, "freed twice"
        assert end + 1 not in after_table, "freed twice"
        assert self.free_bytes + size <= self.capacity_bytes, "freed twice"
        self.free_bytes += size
        start = table.pop(offset + 1, offset)  # of the neighbour before
        if start != offset:
            self._take_out(start, offset - start)
        after = after_table.pop(end, 0)
        if after:
            self._take_out(end, after)
            end += after
            after_table = self._tables[end >> REGION_BITS]
        after_table[end + 1] = start
        self._put_in(start, end - start)
        if self._order is not None:
            self._reorder(start, offset, size)

    def reserve(self, offset: int, size: int) -> bool:
        """
        Take a known range out of the free space: an object that was found again after a restart.

        Cheapest in ascending order and before the first ``allocate``.

        Returns:
            False, and nothing changed, unless all of it was free.
        """
        if (
            size <= 0
            or (offset | size) % ALIGN_BYTES
            or not self._low <= offset < offset + size <= self._high
        ):
            return False  # comes from a journal or a node: may be anything
        if self._order is None:
            self._order = sorted(start for start, _ in self.blocks())
        order = self._order
        position = bisect_right(order, offset) - 1
        if position < 0:
            return False
        start = order[position]
        block = self._tables[start >> REGION_BITS][start]
        if offset + size > start + block:
            return False
        self._take_out(start, block)
        if start < offset:
            self._put_in(start, offset - start)
            self._tables[offset >> REGION_BITS][offset + 1] = start
            position += 1
        else:
            del self._tables[start >> REGION_BITS][start]
            del order[position]
        end, rest = start + block, start + block - offset - size
        if rest:
            self._put_in(offset + size, rest)
            self._tables[end >> REGION_BITS][end + 1] = offset + size
            order.insert(position, offset + size)
        else:
            del self._tables[end >> REGION_BITS][end + 1]
        self.free_bytes -= size
        return True

    def reserve_batch(self, offsets: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """
        ``reserve`` for many ranges; neighbours without a gap cost as much as one.

        Returns:
            Which of them were reserved, in the order given. Of two that overlap, the lower one is, or, where
            both start alike, the first.
        """
        granted = np.zeros(len(offsets), np.bool_)
        if not len(offsets):
            return granted
        by_offset = np.argsort(offsets, kind="stable")
        starts, lengths = offsets[by_offset], sizes[by_offset]
        breaks = np.flatnonzero(starts[:-1] + lengths[:-1] != starts[1:]) + 1
        firsts = [0, *breaks.tolist()]
        lasts = [*breaks.tolist(), len(starts)]
        for first, last in zip(firsts, lasts, strict=True):
            if self.reserve(int(starts[first]), int(lengths[first:last].sum())) and lengths[first:last].all():
                granted[by_offset[first:last]] = True
                continue
            for row in range(first, last):
                granted[by_offset[row]] = self.reserve(int(starts[row]), int(lengths[row]))
        return granted

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Offset and size of every free block, unordered."""
        for table in self._tables:
            yield from ((start, size) for start, size in table.items() if not start & 1)

    def check(self) -> None:
        """Assert every invariant, in time proportional to the free blocks; for tests."""
        free = sorted(self.blocks())
        assert sum(size for _, size in free) == self.free_bytes
        assert all(a + size < b for (a, size), (b, _) in pairwise(free)), "overlap, or not joined"
        ends = {end - 1: start for table in self._tables for end, start in table.items() if end & 1}
        assert ends == {start + size: start for start, size in free}
        assert all(key >> REGION_BITS == region for region, table in enumerate(self._tables) for key in table)
        assert self._bounds == sorted(set(self._bounds))
        assert len(self._bounds) == len(self._classes)
        binned = []
        for index, (bound, of_class) in enumerate(zip(self._bounds, self._classes, strict=True)):
            assert bool(self._occupied >> index & 1) == bool(of_class.regions)
            assert of_class.regions == sum(1 << region for region in of_class.blocks)
            for region, starts in of_class.blocks.items():
                assert starts, "an empty table is dropped"
                for start in starts:
                    assert start >> REGION_BITS == region
                    assert self._tables[region][start] >= bound, "every block fits its class"
                    binned.append(start)
        assert sorted(binned) == [start for start, _ in free]
        assert self._order is None or self._order == [start for start, _ in free]

    def _add_class(self, index: int, size: int) -> None:
        """Let a class begin at ``size``; blocks that belong there now stay one lower, where they fit too."""
        self._bounds.insert(index, size)
        self._classes.insert(index, _Class())
        low = (1 << index) - 1
        self._occupied = self._occupied & low | (self._occupied & ~low) << 1
        self._exact_left -= 1

    def _allocate_below(self, index: int, size: int) -> int | None:
        """Look for a block that happens to fit in the class below the one that certainly would."""
        left = FALLBACK_COUNT_MAX
        # A block from before a class was added may lie lower, but never below its fixed class, an eighth
        # wide.
        while index >= 0 and left and self._bounds[index] * 8 >= size * 7:
            for offset in islice(chain.from_iterable(self._classes[index].blocks.values()), left):
                left -= 1
                block = self._tables[offset >> REGION_BITS][offset]
                if block >= size:
                    self._take_out(offset, block)
                    del self._tables[offset >> REGION_BITS][offset]
                    self._split(offset, block, size)
                    return offset
            index -= 1
        return None

    def _split(self, offset: int, block: int, size: int) -> None:
        """Book ``size`` bytes of a block as used of which only the end is still in a table."""
        self.free_bytes -= size
        end = offset + block
        if block > size:
            self._put_in(offset + size, block - size)
            self._tables[end >> REGION_BITS][end + 1] = offset + size
        else:
            del self._tables[end >> REGION_BITS][end + 1]

    def _put_in(self, start: int, size: int) -> None:
        region = start >> REGION_BITS
        self._tables[region][start] = size
        index = bisect_right(self._bounds, size) - 1
        of_class = self._classes[index]
        blocks = of_class.blocks.get(region)
        if blocks is None:
            of_class.blocks[region] = {start: None}
            of_class.regions |= 1 << region
            self._occupied |= 1 << index
        else:
            blocks[start] = None

    def _take_out(self, start: int, size: int) -> None:
        """Remove a block from its class; its entries in ``_tables`` are the caller's."""
        region = start >> REGION_BITS
        index = bisect_right(self._bounds, size) - 1
        while True:
            of_class = self._classes[index]
            blocks = of_class.blocks.get(region)
            if blocks is not None and start in blocks:
                break
            index -= 1  # put in before a class was added above it
        del blocks[start]
        if not blocks:
            self._forget(index, of_class, region)

    def _forget(self, index: int, of_class: _Class, region: int) -> None:
        """Drop the empty table of a region; a dictionary keeps its largest size until it goes."""
        del of_class.blocks[region]
        of_class.regions ^= 1 << region
        if not of_class.regions:
            self._occupied ^= 1 << index

    def _reorder(self, start: int, offset: int, size: int) -> None:
        """Keep ``_order`` right after a free: the joined block begins at ``start``."""
        order = self._order
        assert order is not None
        after = bisect_left(order, offset)
        if after < len(order) and order[after] == offset + size:
            del order[after]
        if start == offset:
            insort(order, start)
