"""Whether it pays to look again and again for the next frame before sleeping: learnt from whether it did."""

from __future__ import annotations

from typing import Final

SKIP_MIN: Final = 16
SKIP_MAX: Final = 1_024


class Spin:
    """
    Says before each wait whether to spin, and is told how that went.

    On an idle core a wake-up costs some 50 µs, more than a whole lookup, and spinning halves a call. Where
    other processes want the core, spinning keeps our own peer from running, or uses up our turn: then a call
    takes several ms instead of 20 µs. So a spin in vain suspends spinning for a number of waits that doubles
    each time, and one that met its frame in time brings it back.
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

    def learn(self, met: bool) -> None:
        """Whether the spin met its frame before its time was over."""
        if met:
            self._skip_next = SKIP_MIN
        else:
            self._skip = self._skip_next
            self._skip_next = min(2 * self._skip_next, SKIP_MAX)
