"""Huge pages for one test at a time on this machine, given back whatever happens."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")  # of 2 MiB
LOCK_TIMEOUT_S: Final = 120.0
_LOOK_S: Final = 0.1


def free() -> int:
    """Pages that nobody has."""
    return int((POOL / "free_hugepages").read_text())


@contextmanager
def reserved(count: int) -> Iterator[int]:
    """
    So many pages more than before; skips where there can be none.

    The kernel's own file is the lock: test runs beside this one would give back each other's pages.
    """
    path = POOL / "nr_hugepages"
    if os.geteuid() or not os.access(path, os.W_OK):
        pytest.skip("huge pages cannot be reserved: run as root, with /sys writable")
    with path.open("r+") as file:
        pause = threading.Event()
        left_s = LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left_s <= 0:
                    pytest.skip("another test run holds the huge pages: run it alone")
                left_s -= _LOOK_S
                pause.wait(_LOOK_S)
        before = int(path.read_text())
        path.write_text(str(before + count))
        try:
            if int(path.read_text()) < before + count:
                pytest.skip(f"the kernel has no {2 * count} MiB in huge pages: free some memory")
            yield count
        finally:
            path.write_text(str(before))
