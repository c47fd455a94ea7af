"""Whether to look again and again for the next frame before sleeping: as long as nobody else wants the core."""

from __future__ import annotations

from typing import Final

SKIP_MIN: Final = 16
SKIP_MAX: Final = 1_024
GAP_S: Final = 500e-6  # between two looks: more means that somebody else had our core


class Spin:
    """
    Says before each wait whether to spin, and is told how that went.

    On an idle core a wake-up takes 50 to 200 µs, more than a whole lookup, and a spin costs nobody anything,
    in vain or not. Where other processes want the core, spinning keeps our own peer from running, or uses up
    our turn: then a call takes several ms instead of 20 µs. A gap between two looks shows it, and suspends
    spinning for a number of waits that doubles each time.
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

    def learn(self, alone: bool) -> None:
        """Whether we had the core for ourselves during the spin."""
        if alone:
            self._skip_next = SKIP_MIN
        else:
            self._skip = self._skip_next
            self._skip_next = min(2 * self._skip_next, SKIP_MAX)
