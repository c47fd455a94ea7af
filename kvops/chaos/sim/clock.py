"""Virtual time: the events that are still to come, in order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., None]


class Violation(Exception):
    """Something that must always hold does not; ends the run."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
        self.what = what


class Scheduler:
    """Calls to be made at times in microseconds; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_us = 0
        self._heap: list[tuple[int, int, Call, tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, when_us: int, call: Call, *args: Any) -> None:
        """Call then, or as soon as possible."""
        self._sequence += 1
        if when_us < self.now_us:
            when_us = self.now_us
        heappush(self._heap, (when_us, self._sequence, call, args))

    def run(self, until_us: int) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until_us:
            self.now_us, _, call, args = heappop(heap)
            call(*args)
        self.now_us = until_us


class Host:
    """
    One machine's clocks.

    Args:
        name: Of the machine.
        index: Among all.
        rate: Of its boot-time clock; 1.0 is right.
        boot_ms: What that clock shows at time 0.
    """

    def __init__(self, name: str, index: int, *, rate: float, boot_ms: int) -> None:
        self.name = name
        self.index = index
        self.rate = rate
        self.up = True
        self.wall_step_ms = 0  # what an administrator, or NTP, has added to the wall clock
        self._boot_ms = boot_ms

    def boot_ms(self, now_us: int) -> int:
        """CLOCK_BOOTTIME: never goes back, never stepped, a little fast or slow."""
        return self._boot_ms + int(now_us * self.rate) // 1_000

    def wall_ms(self, now_us: int) -> int:
        """CLOCK_REALTIME: may be stepped either way. No core reads it; a mutation does."""
        return self.boot_ms(now_us) + self.wall_step_ms
