"""A store's memory: how it comes, in which order it may be used, and what is said when it does not come."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.errors import Refused
from kvops.limits import GIB, MIB
from kvops.store.segment import FIRST_BYTES, POPULATE_BYTES, Segment
from tests import huge


def resident_bytes(segment: Segment) -> int:
    """Memory that the segment's file has, as the file system counts it."""
    return os.fstat(segment.fd).st_blocks * 512


def fill(segment: Segment, threads: int) -> list[str]:
    """Populate all of it; what was said."""
    said: list[str] = []
    for worker in segment.populate(
        threads=threads, on_failure=lambda error: said.append(error.what), on_done=lambda: said.append("done")
    ):
        worker.join(60)
    return said


def test_the_first_piece_comes_alone() -> None:
    """A store that has its first piece has taken no more than that, whatever its size."""
    segment = Segment(64 * GIB, name="t")
    try:
        segment.populate_first()

        assert segment.populated_bytes == FIRST_BYTES == resident_bytes(segment)
        assert segment.populate_s == 0
    finally:
        segment.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [MIB, FIRST_BYTES, POPULATE_BYTES + FIRST_BYTES + 4096])
def test_all_of_it_comes(size: int, threads: int) -> None:
    """Every page is there in the end, and that is told once, whoever of the threads was last."""
    segment = Segment(size, name="t")
    try:
        segment.populate_first()
        whole = segment.populated_bytes == size
        said = fill(segment, threads)

        assert said == ([] if whole else ["done"])
        assert segment.populated_bytes == size == resident_bytes(segment)
        assert segment.populate_s > 0
    finally:
        segment.close()


def test_what_may_be_used_is_there_from_the_front() -> None:
    """However the threads overtake each other, what counts as populated has no gap."""
    segment = Segment(3 * POPULATE_BYTES, name="t")
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            populated = segment.populated_bytes  # read first: more may come meanwhile, never less
            seen.append((populated, resident_bytes(segment)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        fill(segment, 3)
    finally:
        ended.set()
        watcher.join()
        segment.close()

    assert all(populated <= resident for populated, resident in seen)
    assert [populated for populated, _ in seen] == sorted(populated for populated, _ in seen)


def test_a_reader_cannot_write() -> None:
    """Whoever gets the descriptor maps it read-only, of usual pages and (below) of huge ones."""
    segment = Segment(MIB, name="t")
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(segment.fd, MIB, mmap.MAP_SHARED, mmap.PROT_WRITE)
        mmap.mmap(segment.fd, MIB, mmap.MAP_SHARED, mmap.PROT_READ).close()
    finally:
        segment.close()


def memfds() -> list[str]:
    """Segments that this process holds open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [name for link in links if "kvops-t" in (name := str(link.readlink()))]


@pytest.mark.parametrize(("page_bytes", "words"), [(2 * MIB, "vm.nr_hugepages"), (GIB, "hugepagesz=1G")])
def test_huge_pages_that_are_not_there(page_bytes: int, words: str) -> None:
    """The error says how many of which size are missing and what reserves them; no descriptor is left."""
    with pytest.raises(Refused, match=f"needs 4096 huge pages of {page_bytes // MIB} MiB") as caught:
        Segment(4096 * page_bytes, name="t", page_bytes=page_bytes)

    assert words in caught.value.fix
    assert memfds() == []


@pytest.fixture
def huge_pages() -> Iterator[int]:
    """Eight huge pages of 2 MiB."""
    with huge.reserved(8) as count:
        yield count


def test_huge_pages(huge_pages: int) -> None:
    """A segment of huge pages takes them, is sealed like any other, and gives them back when it is closed."""
    free = huge.free()
    segment = Segment(huge_pages * 2 * MIB, name="t", page_bytes=2 * MIB)
    try:
        segment.populate_first()
        assert segment.populated_bytes == FIRST_BYTES
        assert fill(segment, 2) == ["done"]
        assert huge.free() == free - huge_pages
        segment.memory[-3:] = b"end"
        assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            mmap.mmap(segment.fd, 2 * MIB, mmap.MAP_SHARED, mmap.PROT_WRITE)
        with mmap.mmap(segment.fd, segment.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as reader:
            assert reader[-3:] == b"end"
    finally:
        segment.close()
        segment.memory.release()
        del segment

    assert huge.free() == free
