"""
Which objects leave when the pool is full: the least recently used of the whole pool, to within two percent.

Recency is compared over the whole pool: the least recently used of small shards loses a third of the hits.
Exact order over millions of objects would cost more than it gains. So a *threshold sweep*: a sample says
which rank the oldest two percent of the pool have in common, and a hand walks once over all slots, window by
window, and picks what reaches it. Then nothing that old is left, and the next sample is taken.

    rank = how long ago it was touched, then depth in its prefix chain: of one request the deepest go first

Leased and hard-pinned objects are never picked, soft-pinned ones only when nothing else is left; nor are
objects on hidden stores, whose memory nobody could use.
"""

from __future__ import annotations

from math import ceil
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops.limits import LEASE_TTL_MS
from kvops.store.index import ObjectIndex
from kvops.store.lease import MS32_MASK, ages_ms
from kvops.store.model import ObjectFlag, Slots

SAMPLE_SLOTS: Final = 4_096  # their oldest two percent are 82, which puts the threshold between 1.8 and 2.2 %
OLDEST_RATIO: Final = 0.02  # of the pool goes in one round
WINDOW_SLOTS: Final = 4_096  # 80 victims on average
STEP_SLOTS: Final = 16_384  # looked at in one step, 0.1 to 0.3 ms

_DEPTH_BITS: Final = 16
_NONE: Final[Slots] = np.empty(0, dtype=np.int64)
_NO_RANKS: Final[NDArray[np.uint64]] = np.empty(0, dtype=np.uint64)


class Evictor:
    """
    Picks victims; the caller removes them before it asks for more, and frees their memory.

    Args:
        index: Whose objects; only read.
        lease_ttl_ms: What was touched less than this ago is leased.
        window_slots: How many slots one look covers.
        step_slots: How many slots one step looks at; with 512 for both a step stays near 15 µs.
        seed: Of the places that samples visit.
    """

    def __init__(
        self,
        index: ObjectIndex,
        *,
        lease_ttl_ms: int = LEASE_TTL_MS,
        window_slots: int = WINDOW_SLOTS,
        step_slots: int = STEP_SLOTS,
        seed: int = 0,
    ) -> None:
        assert 0 < window_slots <= step_slots
        self.exhausted = False
        """The last step found that nothing can be evicted now: all is leased, pinned, hidden or gone."""
        self._index = index
        self._store = index.location["store"]
        self._flags = index.location["flags"]
        self._lease_ttl_ms = lease_ttl_ms
        self._window_slots = window_slots
        self._step_slots = step_slots

        # Places in the pool from 0 to 1 that every sample visits, turned by another angle each time.
        self._places = np.random.default_rng(seed).random(SAMPLE_SLOTS)
        self._angle = 0.0
        self._sample: NDArray[np.uint64] = _NO_RANKS  # ranks of what the sample found so far
        self._sample_next = 0

        self._hand = 1
        self._round_left = 0  # slots until its end; 0: sampling for the next
        self._round_found = 0
        self._threshold_ms32 = 0  # the last touch of the youngest object that goes in this round …
        self._threshold_depth = 0  # … and its depth
        self._whatever = False  # this round takes all that can be evicted, because the sample met nothing
        self._soft_pinned_too = False

    def step(self, *, now_ms32: int, count_max: int) -> Slots:
        """
        The next victims, oldest first, at most ``count_max``.

        Looks at a bounded number of slots, so it may return few or none while others could still be found:
        only ``exhausted`` says that there are none.
        """
        self.exhausted = False
        slots, ranks = _NONE, _NO_RANKS
        budget = self._step_slots
        while budget > 0 and len(slots) < count_max and not self.exhausted:
            if not self._round_left:
                if len(slots):
                    break  # the next round would meet them again
                budget -= self._take_sample(now_ms32, count_max, budget)
                continue
            window = min(self._window_slots, budget)
            budget -= window
            more, more_ranks = self._look(now_ms32, count_max - len(slots), window)
            if len(slots):
                more, more_ranks = np.concatenate([slots, more]), np.concatenate([ranks, more_ranks])
            slots, ranks = more, more_ranks
        return slots[np.argsort(ranks)[::-1]]

    def _look(self, now_ms32: int, count_max: int, window: int) -> tuple[Slots, NDArray[np.uint64]]:
        """Victims of one window, and their ranks; stays there if it holds more than ``count_max``."""
        if self._hand >= self._index.slots_used:
            self._hand = 1
        first = self._hand
        last = min(first + min(window, self._round_left), self._index.slots_used)
        age_min = max((now_ms32 - self._threshold_ms32) & MS32_MASK, self._lease_ttl_ms)
        old = (ages_ms(self._index.touched_ms[first:last], now_ms32) >= age_min).nonzero()[0] + first
        slots, ranks = self._evictable(old, now_ms32)
        if not self._whatever:
            reached = ranks >= (age_min << _DEPTH_BITS | self._threshold_depth)
            slots, ranks = slots[reached], ranks[reached]
        if len(slots) > count_max:
            oldest = np.argsort(ranks)[-count_max:]
            slots, ranks = slots[oldest], ranks[oldest]
        else:
            self._hand = last
            self._round_left -= last - first
        self._round_found += len(slots)
        if not self._round_left:
            self._end_round()
        return slots, ranks

    def _end_round(self) -> None:
        if self._whatever and not self._round_found:
            self.exhausted = self._soft_pinned_too
            self._soft_pinned_too = not self._soft_pinned_too
        else:
            self._soft_pinned_too = False

    def _take_sample(self, now_ms32: int, count_max: int, budget: int) -> int:
        """Sample on; the last slice starts the next round. Returns how many slots it looked at."""
        population = self._index.slots_used - 1
        if population <= SAMPLE_SLOTS:
            size, slots = population, np.arange(1, population + 1)
        else:
            size = SAMPLE_SLOTS
            places = self._places[self._sample_next : self._sample_next + min(budget, self._window_slots)]
            slots = ((places + self._angle) % 1.0 * population).astype(np.int64) + 1
        _, ranks = self._evictable(slots, now_ms32)
        ranks = ranks[ranks >= self._lease_ttl_ms << _DEPTH_BITS]
        self._sample = np.concatenate([self._sample, ranks])
        self._sample_next += len(slots)
        if self._sample_next >= size:
            self._start_round(now_ms32, count_max, population, size)
        return max(1, len(slots))

    def _start_round(self, now_ms32: int, count_max: int, population: int, sampled: int) -> None:
        met = len(self._sample)
        self._whatever = met == 0
        if met:
            # As many as are asked for, at least, where two percent of a small pool are fewer.
            oldest = min(met, ceil(max(OLDEST_RATIO * met, count_max * sampled / population)))
            rank = int(np.partition(self._sample, met - oldest)[met - oldest])
            self._threshold_ms32 = (now_ms32 - (rank >> _DEPTH_BITS)) & MS32_MASK
            self._threshold_depth = rank & ((1 << _DEPTH_BITS) - 1)
        else:
            self._threshold_ms32 = now_ms32
        self._angle = (self._angle + 0.618) % 1.0  # the golden ratio: angles stay apart
        self._sample = _NO_RANKS
        self._sample_next = 0
        self._round_found = 0
        self._round_left = population
        if not population:
            self.exhausted = True

    def _evictable(self, slots: Slots, now_ms32: int) -> tuple[Slots, NDArray[np.uint64]]:
        """Those of the slots whose object may go, and their ranks; leases are the caller's to see."""
        store = self._store[slots]
        pinned = ObjectFlag.HARD_PIN if self._soft_pinned_too else ObjectFlag.HARD_PIN | ObjectFlag.SOFT_PIN
        may_go = (self._flags[slots] & pinned) == 0
        may_go &= store != 0
        if self._index.hidden_count:
            may_go &= ~self._index.hidden[store]
        slots = slots[may_go]
        ranks = ages_ms(self._index.touched_ms[slots], now_ms32).astype(np.uint64)
        ranks <<= np.uint64(_DEPTH_BITS)
        ranks |= self._index.depth[slots]
        return slots, ranks
