"""Many links, one deadline: what healthy stores deliver is never held up by a sick one."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvops.errors import KvopsError
from kvops.transfer.model import Job, SliceState

LOOK_S: Final = 0.1  # between two looks at the lease


class Until:
    """When a transfer must have ended, on ``time.monotonic``: its deadline, or the end of a lease."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def left(self, now: float) -> float:
        """Seconds that are left."""
        return self.deadline - now


class Leased(Until):
    """A deadline that a lease cuts short unless it is renewed in time."""

    def __init__(self, deadline: float, lease_end: float, renew: Callable[[float], float]) -> None:
        """
        Args:
            deadline: Of the caller.
            lease_end: Of the lease at hand.
            renew: Asks for a longer one until a given time; returns the end of what was got, or the old one.
        """
        super().__init__(deadline)
        self._lease_end = lease_end
        self._renew = renew
        self._renew_at = self._half(time.monotonic())

    def _half(self, now: float) -> float:
        return now + (self._lease_end - now) / 2

    def left(self, now: float) -> float:
        """Seconds that are left; renews at half time."""
        if now >= self._renew_at and self._lease_end < self.deadline:
            self._lease_end = self._renew(self._half(now))
            self._renew_at = self._half(now)
        return min(self.deadline, self._lease_end) - now


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
        for fd, events in poll.poll(min(left, LOOK_S) * 1_000 + 0.999):
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
    return not job.done
