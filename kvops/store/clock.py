"""The clock of leases and deadlines, and the boot it counts from: no suspend stops it, no administrator sets it."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path


def boot_ms() -> int:
    """Milliseconds of CLOCK_BOOTTIME."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@cache
def boot_id() -> str:
    """What tells one boot of one machine from all others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
