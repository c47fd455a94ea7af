"""Many links, one deadline: what healthy stores deliver is never held up by a sick one."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from kvops.errors import KvopsError
from kvops.transfer.model import Job, SliceState


def drive(jobs: Sequence[Job], *, deadline: float) -> None:
    """
    Run jobs side by side until all are done or the time has come.

    Args:
        jobs: Each with a link of its own.
        deadline: On ``time.monotonic``. After it nothing is written into any job's buffers.
    """
    poll = select.poll()
    active: dict[int, tuple[Job, int]] = {}
    for job in jobs:
        if not job.done and _run(job, select.POLLOUT):
            active[job.link.fileno()] = (job, job.link.events)
            poll.register(job.link, job.link.events)
    while active:
        left = deadline - time.monotonic()
        if left <= 0:
            for job, _ in active.values():
                job.abandon(SliceState.LATE)
            return
        for fd, events in poll.poll(left * 1_000 + 0.999):
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
