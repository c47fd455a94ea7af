"""
A store node's memory: a sealed memfd that clients of the same host map read-only.

It is populated in parallel, chunk by chunk from the front; only what is populated may be allocated.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final

from kvops.errors import Refused
from kvops.store.pages import address_of, populate

POPULATE_BYTES: Final = 64 << 20  # one call of the kernel; the node can serve after the first
THREADS_MAX: Final = 16
F_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl.h; missing from Python's fcntl before 3.13


class Segment:
    """Memory of a fixed size, shared by descriptor."""

    def __init__(self, size_bytes: int, *, name: str) -> None:
        """
        Reserve the address space; no memory is taken yet.

        Raises:
            Refused: The kernel gives none.
        """
        self.size_bytes = size_bytes
        self.populated_bytes = 0
        try:
            self.fd = os.memfd_create(f"kvops-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise Refused(
                f"cannot reserve a segment of {size_bytes} B: {error}", fix="lower --segment-size"
            ) from error
        # After our own mapping: the seal forbids every later writable one.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.memory = memoryview(self._map)
        self._address = address_of(self._map)
        self._lock = threading.Lock()
        self._next = 0
        self._done: set[int] = set()
        self._closed = False

    def populate(self, *, threads: int = 0, on_failure: Callable[[Refused], None]) -> list[threading.Thread]:
        """
        Take the memory, in threads of its own; ``populated_bytes`` grows from the front.

        Args:
            threads: As many as CPUs by default.
            on_failure: Called in such a thread when the kernel has no more memory.
        """
        count = threads or min(len(os.sched_getaffinity(0)), THREADS_MAX)
        workers = [
            threading.Thread(target=self._populate, args=(on_failure,), name=f"populate-{i}", daemon=True)
            for i in range(count)
        ]
        for worker in workers:
            worker.start()
        return workers

    def populate_first(self) -> None:
        """
        Take the first chunk, at once.

        Raises:
            Refused: The kernel has no memory.
        """
        self._take(self._claim())

    def _claim(self) -> int:
        with self._lock:
            start, self._next = self._next, min(self._next + POPULATE_BYTES, self.size_bytes)
            return start

    def _populate(self, on_failure: Callable[[Refused], None]) -> None:
        try:
            while not self._closed and (start := self._claim()) < self.size_bytes:
                self._take(start)
        except Refused as error:
            on_failure(error)

    def _take(self, start: int) -> None:
        length = min(POPULATE_BYTES, self.size_bytes - start)
        try:
            populated = populate(self._address + start, length)
        except OSError as error:
            raise Refused(
                f"the kernel gave {self.populated_bytes} B of a segment of {self.size_bytes} B: {error.strerror}",
                fix="lower --segment-size, or raise the memory limit of its cgroup",
            ) from error
        if not populated:
            for page in range(start, start + length, mmap.PAGESIZE):
                self.memory[page] = 0
        with self._lock:
            self._done.add(start)
            while self.populated_bytes in self._done:
                self._done.remove(self.populated_bytes)
                self.populated_bytes = min(self.populated_bytes + POPULATE_BYTES, self.size_bytes)

    def close(self) -> None:
        """Stop populating and give the descriptor back; the memory goes with the last mapping."""
        self._closed = True
        os.close(self.fd)
