"""The catalogue: every fault there is, one area a file."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from kvops.chaos.model import entered

AREAS: Final = (
    "process",
    "net",
    "stream",
    "etcd",
    "master",
    "disk",
    "limits",
    "clock",
    "load",
    "fleet",
    "store",
)


def catalogue() -> dict[str, type]:
    """All faults by name, in the catalogue's order."""
    for area in AREAS:
        import_module(f"kvops.chaos.faults.{area}")
    return entered()
