"""A clock that stands still while the master itself did: what writers' deadlines go by."""

from __future__ import annotations

from typing import Final

TICK_MS: Final = 100


class AwakeClock:
    """
    The time less our own pauses (a stopped process, a stalled machine), which are not held against anybody.

    It is told the time every TICK_MS; a tick that comes late is how it knows of a pause.
    """

    def __init__(self, *, now_ms: int) -> None:
        self._ticked_ms = now_ms
        self._paused_ms = 0

    def tick(self, now_ms: int) -> int:
        """The time, once a tick; returns how long we stood still until now, 0 for what is usual."""
        pause = now_ms - self._ticked_ms - TICK_MS
        self._ticked_ms = now_ms
        if pause <= TICK_MS:
            return 0
        self._paused_ms += pause
        return pause

    def read(self, now_ms: int) -> int:
        """The clock without our own pauses, the one under way included."""
        return now_ms - self._paused_ms - max(0, now_ms - self._ticked_ms - 2 * TICK_MS)

    def restart(self, now_ms: int) -> None:
        """Ticks begin now: until then there were to be none."""
        self._ticked_ms = now_ms
