"""Processes of this machine by their command line and by their parents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvops.fleet.process import PROC, ProcessIdentity, identify

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
PROCESSES_MAX: Final = 256  # of one role


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What one process holds."""

    rss_bytes: int
    fds: int
    threads: int


def size_of(pid: int) -> Size | None:
    """What a process holds now; None when it has ended, or is not ours to see."""
    folder = PROC / str(pid)
    try:
        return Size(
            rss_bytes=int((folder / "statm").read_text().split()[1]) * PAGE_BYTES,
            fds=sum(1 for _ in (folder / "fd").iterdir()),
            threads=sum(1 for _ in (folder / "task").iterdir()),
        )
    except OSError:
        return None


def pids() -> list[int]:
    """Every pid there is now."""
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]  # noqa: PTH208 (names only, thousands)


def command_lines() -> Iterator[tuple[int, bytes]]:
    """Pid and command line (words that end in NUL) of all; a zombie has none."""
    for pid in pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended
        if words:
            yield pid, words


def argv_of(pid: int) -> list[str]:
    """The command line of a process, word for word; empty when it has ended."""
    try:
        return [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
    except OSError:
        return []


def running(argv: Sequence[str]) -> Iterator[ProcessIdentity]:
    """The processes with exactly this command line."""
    wanted = b"".join(os.fsencode(word) + b"\0" for word in argv)
    for pid, words in command_lines():
        if words == wanted:
            identity = identify(pid)
            if identity is not None:
                yield identity


def with_word(word: str) -> Iterator[ProcessIdentity]:
    """The processes that have this word on their command line; not ourselves."""
    needle = word.encode()
    for pid, words in command_lines():
        if pid != os.getpid() and needle in words.split(b"\0"):
            identity = identify(pid)
            if identity is not None:
                yield identity


def tree(root: ProcessIdentity) -> list[ProcessIdentity]:
    """A process and all that descend from it, parents first."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        try:
            fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(pid)
        except (OSError, IndexError, ValueError):
            continue  # it ended
    found, waiting = [root], [root.pid]
    while waiting and len(found) < PROCESSES_MAX:
        for pid in children.get(waiting.pop(), ()):
            one = identify(pid)
            if one is not None:
                found.append(one)
                waiting.append(pid)
    return found
