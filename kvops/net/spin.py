"""Whether it pays to look again and again for the next frame before sleeping: learnt from whether it did."""

from __future__ import annotations

from typing import Final

SKIP_MIN: Final = 4
SKIP_MAX: Final = 1_024
GAP_S: Final = 500e-6  # between two looks: more means that somebody else had our core


class Spin:
    """
    Says before each wait whether to spin, and is told how that went.

    On an idle core a wake-up takes 50 to 200 µs, more than a whole lookup: a spin that is longer than the
    peer's wake-up lets both sides stay awake. Where other processes want the core, spinning keeps our own peer
    from running, or uses up our turn: then a call takes several ms instead of 20 µs. So a spin in vain, or one
    in which somebody else had our core, suspends spinning for a number of waits that doubles each time.
    """

    __slots__ = ("_skip", "_skip_next")

    def __init__(self) -> None:
        self._skip = 0
        self._skip_next = SKIP_MIN

    def pays(self) -> bool:
        """Whether to spin now; asked once a wait."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def learn(self, paid: bool) -> None:
        """Whether the spin met its frame before its time was over, with the core for itself."""
        if paid:
            self._skip_next = SKIP_MIN
        else:
            self._skip = self._skip_next
            self._skip_next = min(2 * self._skip_next, SKIP_MAX)
