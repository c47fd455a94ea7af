"""The clock of leases and deadlines: it counts through suspends, and no administrator sets it."""

from __future__ import annotations

import time


def boot_ms() -> int:
    """Milliseconds of CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
