"""Until when readers may hold each slot's memory, told from the index's array of last touches."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

MS32_MASK: Final = 0xFFFF_FFFF
AGE_MS_MAX: Final = 1 << 30  # 12 days; older touches are moved up to it long before u32 wraps, after 49 days


def ages_ms(touched_ms: NDArray[np.uint32], now_ms32: int) -> NDArray[np.uint32]:
    """Milliseconds since each touch, right across the clock's wrap as long as none is 2**32 ms old."""
    return np.subtract(np.uint32(now_ms32), touched_ms, dtype=np.uint32)


class AgeClamp:
    """
    Keeps the ages of touches below the clock's wrap, a window of slots at a time.

    A lease lasts from an object's last touch for the lease TTL, so the longest of all readers' holds. A touch is
    also the object's recency: whoever wants recency without a lease touches at now minus the TTL. No clock inside:
    callers pass milliseconds modulo 2**32, of a clock that never goes back.
    """

    def __init__(self, touched_ms: NDArray[np.uint32]) -> None:
        self._touched_ms = touched_ms
        self._hand = 0

    def step(self, *, now_ms32: int, slots_used: int, budget: int) -> bool:
        """
        Keep the next ``budget`` slots' ages below the clock's wrap; true at the end of a round over all.

        A round a week is plenty. Without any, an object untouched for 49 days would look leased.
        """
        first = self._hand if self._hand < slots_used else 0
        last = min(first + budget, slots_used)
        window = self._touched_ms[first:last]
        window[ages_ms(window, now_ms32) > AGE_MS_MAX] = (now_ms32 - AGE_MS_MAX) & MS32_MASK
        self._hand = last
        return last == slots_used
