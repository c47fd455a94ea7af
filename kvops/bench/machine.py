"""The machine a figure was measured on: no figure means anything without it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvops import __version__

_PACKAGES: Final = ("numpy", "xxhash", "uvloop", "msgspec")


def parse_cpu_model(cpuinfo: str) -> str:
    """The processor's name in the text of /proc/cpuinfo; the architecture where it has none."""
    for line in cpuinfo.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.machine()


def parse_memory_bytes(meminfo: str) -> int:
    """The machine's memory in the text of /proc/meminfo; 0 where it does not say."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return 0


def machine() -> dict[str, Any]:
    """What the figures depend on, and how busy the machine was before the first of them."""
    return {
        "cpu": parse_cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": parse_memory_bytes(Path("/proc/meminfo").read_text()),
        "kernel": platform.release(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "kvops": __version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
