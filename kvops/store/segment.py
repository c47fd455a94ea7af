"""
A store node's memory: a sealed memfd that clients of the same host map read-only.

It is populated in parallel, chunk by chunk from the front; only what is populated may be allocated. Measured on
two shared CPUs, Linux 6.18, by ``kvops bench start``'s means: pages of 4 KiB come at 1.2 GB/s whatever the number of
threads and the chunk (8 to 512 MiB), pages of 2 MiB and 1 GiB at 8 GB/s, transparent huge pages at 15. Giving
back takes 0.3 s a GiB in pages of 4 KiB, 3 ms in huge ones; punching holes in 1, 2 or 4 threads takes as long (the
file's lock lets one in), the seal forbids it besides, so the memory goes with the process.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from kvops.errors import Refused
from kvops.limits import MIB
from kvops.store.numa import bind_memory
from kvops.store.pages import address_of, advise_huge, populate
from kvops.store.topology import huge_fix

FIRST_BYTES: Final = 4 * MIB  # enough to be mounted with, 4 ms even when cold
POPULATE_BYTES: Final = (
    64 * MIB
)  # one call of the kernel: 50 ms of 4 KiB pages, so that waiting for the GIL is noise
THREADS_MAX: Final = 16
F_SEAL_FUTURE_WRITE: Final = 0x10  # fcntl.h; missing from Python's fcntl before 3.13
MFD_HUGE_SHIFT: Final = 26  # memfd_create(2): log2 of the page size stands there


class Segment:
    """Memory of a fixed size, shared by descriptor."""

    def __init__(
        self, size_bytes: int, *, name: str, page_bytes: int = 0, numa_node: int | None = None
    ) -> None:
        """
        Reserve the address space; no memory is taken yet, huge pages are set aside.

        Args:
            size_bytes: Whole pages.
            name: As /proc/<pid>/maps shows it.
            page_bytes: One of HUGE_PAGE_BYTES; 0 for the kernel's usual pages, transparent huge ones if it may.
            numa_node: Where all of it must come from; None: wherever the kernel likes.

        Raises:
            Refused: The kernel gives none, or not on that node.
        """
        self.size_bytes = size_bytes
        self.page_bytes = page_bytes or mmap.PAGESIZE
        self.populated_bytes = 0
        self.populate_s = (
            0.0  # how long it took, once all of it is populated; less what was waited in between
        )
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if page_bytes:
            assert size_bytes % page_bytes == 0, "the configuration lets no other size pass"
            flags |= os.MFD_HUGETLB | (page_bytes.bit_length() - 1) << MFD_HUGE_SHIFT
        self._huge_bytes = page_bytes
        try:
            self.fd = os.memfd_create(f"kvops-{name}", flags)
        except OSError as error:
            raise self._not_given(error) from error
        try:
            os.ftruncate(self.fd, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self.address = address_of(self._map)
            if numa_node is not None:
                bind_memory(self.address, size_bytes, numa_node)
            if not page_bytes:
                advise_huge(self.address, size_bytes)
            # After our own mapping: the seal forbids every later writable one.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise self._not_given(error) from error
        except Refused:
            os.close(self.fd)
            raise
        self.memory = memoryview(self._map)
        self._lock = threading.Lock()
        self._next = 0
        self._done: dict[int, int] = {}  # chunks behind a gap: where each begins and ends
        self._first_s = 0.0
        self._began_s = time.monotonic()
        self._closed = False

    def _not_given(self, error: OSError | ValueError) -> Refused:
        if not self._huge_bytes:
            return Refused(
                f"cannot reserve a segment of {self.size_bytes} B: {error}", fix="lower --segment-size"
            )
        count = self.size_bytes // self._huge_bytes
        why = (
            "so many are not free"
            if isinstance(error, OSError) and error.errno == errno.ENOMEM
            else "the kernel has none of this size"
            if isinstance(error, OSError) and error.errno in (errno.ENODEV, errno.EINVAL)
            else str(error)
        )
        return Refused(
            f"a segment of {self.size_bytes} B needs {count} huge pages of {self._huge_bytes // MIB} MiB: {why}",
            fix=huge_fix(self._huge_bytes, count),
        )

    def populate(
        self,
        *,
        threads: int = 0,
        on_failure: Callable[[Refused], None],
        on_done: Callable[[], None] = lambda: None,
    ) -> list[threading.Thread]:
        """
        Take the memory, in threads of its own; ``populated_bytes`` grows from the front.

        Args:
            threads: As many as CPUs by default.
            on_failure: Called in such a thread when the kernel has no more memory.
            on_done: Called in such a thread once all of it is there.
        """
        self._began_s = time.monotonic() - self._first_s
        count = threads or min(len(os.sched_getaffinity(0)), THREADS_MAX)
        workers = [
            threading.Thread(
                target=self._populate, args=(on_failure, on_done), name=f"populate-{i}", daemon=True
            )
            for i in range(count)
        ]
        for worker in workers:
            worker.start()
        return workers

    def populate_first(self) -> None:
        """
        Take the first piece, at once.

        Raises:
            Refused: The kernel has no memory.
        """
        began = time.monotonic()
        self._take(*self._claim(FIRST_BYTES))
        self._first_s = time.monotonic() - began

    def _claim(self, wanted: int) -> tuple[int, int]:
        """From where to where the caller shall populate; nothing when all of it is claimed."""
        with self._lock:
            start = self._next
            self._next = min(start + max(wanted, self._huge_bytes), self.size_bytes)
            return start, self._next

    def _populate(self, on_failure: Callable[[Refused], None], on_done: Callable[[], None]) -> None:
        try:
            while not self._closed:
                start, end = self._claim(POPULATE_BYTES)
                if start == end:
                    return
                if self._take(start, end):
                    on_done()
        except Refused as error:
            on_failure(error)

    def _take(self, start: int, end: int) -> bool:
        """Populate a claimed range; whether it was the last that was missing."""
        try:
            populated = populate(self.address + start, end - start)
        except OSError as error:
            # EFAULT: no page of this size is left where the policy allows one, madvise(2).
            fix = "lower --segment-size, or raise the memory limit of its cgroup"
            if self._huge_bytes:
                fix = huge_fix(self._huge_bytes, (self.size_bytes - start) // self._huge_bytes)
            raise Refused(
                f"the kernel gave {self.populated_bytes} B of a segment of {self.size_bytes} B: {error.strerror}",
                fix=fix,
            ) from error
        if not populated:
            for page in range(start, end, self.page_bytes):
                self.memory[page] = 0
        with self._lock:
            self._done[start] = end
            while (upto := self._done.pop(self.populated_bytes, None)) is not None:
                self.populated_bytes = upto
            whole = self.populated_bytes == self.size_bytes
            if whole:
                self.populate_s = time.monotonic() - self._began_s
            return whole

    def close(self) -> None:
        """Stop populating and give the descriptor back; the memory goes with the last mapping."""
        self._closed = True
        os.close(self.fd)
