"""Many links, one deadline: what healthy stores deliver is never held up by a sick one."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvops.errors import KvopsError
from kvops.net.link import LinkState
from kvops.transfer.model import Job, SliceState

LOOK_S: Final = 0.1  # between two looks at the lease


class Until:
    """When a transfer must have ended, on ``time.monotonic``: its deadline, or the end of a lease."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def left(self, now: float) -> float:
        """Seconds that are left."""
        return self.deadline - now


class Lease:
    """How long memory may be read, on ``time.monotonic``: strictly less than its owner keeps it."""

    def __init__(self, end: float, renew: Callable[[float], float | None]) -> None:
        """
        Args:
            end: Of what was granted.
            renew: Asks for more, until a given time; returns the new end, or None when nothing was granted.
        """
        self.end = end
        self._renew = renew

    def renew(self, by: float) -> None:
        """Ask for more, waiting until ``by`` at most."""
        self.end = self._renew(by) or self.end


class Leased(Until):
    """A deadline that a lease cuts short, unless it is renewed at half time."""

    def __init__(self, deadline: float, lease: Lease) -> None:
        super().__init__(deadline)
        self._lease = lease
        self._renew_at = self._half(time.monotonic())

    def _half(self, now: float) -> float:
        return now + (self._lease.end - now) / 2

    def left(self, now: float) -> float:
        """Seconds that are left."""
        if now >= self._renew_at and self._lease.end < self.deadline:
            self._lease.renew(self._half(now))
            self._renew_at = self._half(now)
        return min(self.deadline, self._lease.end) - now


def drive(jobs: Sequence[Job], until: Until) -> None:
    """
    Run jobs side by side until all are done or the time has come.

    Args:
        jobs: Each with a link of its own.
        until: After it nothing is written into any job's buffers.
    """
    poll = select.poll()
    active: dict[int, tuple[Job, int]] = {}
    for job in jobs:
        if not job.done and _run(job, select.POLLOUT):
            active[job.link.fileno()] = (job, job.link.events)
            poll.register(job.link, job.link.events)
    while active:
        left = until.left(time.monotonic())
        if left <= 0:
            for job, _ in active.values():
                job.abandon(SliceState.LATE)
            return
        for fd, events in poll.poll(min(left, LOOK_S) * 1_000):
            job, wanted = active[fd]
            if not _run(job, events):
                poll.unregister(fd)
                del active[fd]
            elif job.link.events != wanted:
                active[fd] = (job, job.link.events)
                poll.modify(fd, job.link.events)


def _run(job: Job, events: int) -> bool:
    """Whether the job wants more."""
    try:
        job.advance(events)
    except KvopsError:
        job.abandon(SliceState.FAILED)
    if not job.done and job.link.state is LinkState.CLOSED:  # by whoever used it before us
        job.abandon(SliceState.FAILED)
    return not job.done
