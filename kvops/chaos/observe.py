"""What the runner itself sees of a pool under test: its processes once a second, its masters' events at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvops.chaos.client import now_ns
from kvops.chaos.history import Event, EventKind, HistoryWriter, Sample
from kvops.chaos.pool import Pool, group_names
from kvops.errors import KvopsError
from kvops.timestamps import rfc3339

SAMPLE_S: Final = 1.0
LEADERS_EVERY_IN_LAB: Final = 3  # samples
_QUIET: Final = ("client.", "replay.")  # events of a group that say nothing about its health
_DETECTED: Final = ("store.suspected", "store.reported")


def cpu_stall_s() -> float | None:
    """Seconds in which some task waited for a CPU, since boot; None where the kernel does not count it."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("some"):
            return int(line.rpartition("total=")[2]) / 1e6
    return None


class Sampler:
    """Writes a sample of every member now and then, from a thread of its own."""

    def __init__(self, pool: Pool, writer: HistoryWriter) -> None:
        self._pool = pool
        self._writer = writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-sampler", daemon=True)
        self.trouble = ""
        """Why nothing is sampled any more; empty while all is well."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, samples are taken."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(5.0)

    def take(self, phase: str) -> None:
        """One sample of every member that can be seen."""
        try:
            sizes = self._pool.sizes()
        except KvopsError:
            return  # the group is being changed: the next second will do
        for part, size in sizes:
            self._writer.write(
                Sample(
                    t_ns=now_ns(),
                    subject=part.name,
                    role=part.role,
                    group=part.group,
                    phase=phase,
                    rss_bytes=size.rss_bytes,
                    fds=size.fds,
                    threads=size.threads,
                )
            )

    def _run(self) -> None:
        try:
            self._samples()
        except Exception as error:  # noqa: BLE001 - whoever runs the experiment must know that it is blind
            self.trouble = f"the sampler broke down: {type(error).__name__}: {error}"

    def _samples(self) -> None:
        # A lab's masters are asked by a process each time: now and then is enough.
        every, turn = (LEADERS_EVERY_IN_LAB if self._pool.spec.network == "lab" else 1), 0
        while not self._stop.wait(SAMPLE_S):
            self.take("run")
            turn += 1
            if self._pool.spec.masters > 1 and turn % every == 0:
                self._leaders()

    def _leaders(self) -> None:
        """Who says that it leads, and in which term: two in one term is what must never be seen."""
        for name in group_names(self._pool.spec):
            try:
                statuses = self._pool.statuses(name)
            except KvopsError:
                continue  # the group is being changed
            for member, status in statuses:
                if status.role == "leader":
                    self._writer.write(
                        Event(
                            t_ns=now_ns(),
                            kind=EventKind.LEADER,
                            subject=f"{name}/{member}",
                            group=name,
                            domain="master",
                            term=status.term,
                        )
                    )


def write_group_events(pool: Pool, writer: HistoryWriter, *, since_ns: int, block: int) -> int:
    """
    Write what the masters noticed since a moment of CLOCK_BOOTTIME; returns how many events. A master that does
    not answer has nothing to tell, and one that was restarted has forgotten.
    """
    wall_minus_boot_ns = time.time_ns() - now_ns()
    since = rfc3339(datetime.fromtimestamp((since_ns + wall_minus_boot_ns) / 1e9, UTC))
    count = 0
    for name in group_names(pool.spec):
        for event in pool.events(name, since):
            if event.event.startswith(_QUIET):
                continue
            at_ns = int(datetime.fromisoformat(event.time).timestamp() * 1e9) - wall_minus_boot_ns
            detail = ", ".join(f"{key} {value}" for key, value in event.detail.items())
            kinds = [event.event] + ([EventKind.DETECTED.value] if event.event in _DETECTED else [])
            for kind in kinds:
                breaker = kind.startswith("breaker.")
                writer.write(
                    Event(
                        t_ns=at_ns,
                        kind=kind,
                        subject=name if breaker else event.subject,
                        group=name,
                        domain="group" if breaker else "store",
                        node="" if breaker else event.subject,
                        block=block,
                        detail=detail,
                    )
                )
            count += 1
    return count
