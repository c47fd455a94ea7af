"""
What a client's calls went by: the masters that answered, the places they named, the leases they gave.

A pool that is told to leave a trail (``Pool.follow``) writes into it; each thread sees its own last call there. It
is for whoever checks the pool's promises from outside, and costs nothing while nobody does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvops.limits import LEASE_MARGIN_MS
from kvops.net.auth import Welcome
from kvops.net.wire import Kind

ANSWERS_MAX: Final = 64  # kept of one call, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a master; times are nanoseconds of CLOCK_BOOTTIME."""

    kind: Kind
    master: str
    incarnation: int  # of its process
    term: int  # that it led when the connection was made: it may have raised it since
    asked_ns: int
    answered_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an object lay that a call was sent to, or was given room."""

    store: str
    incarnation: int  # of the store's process
    offset: int  # in its segment
    size_bytes: int
    generation: int


class Trail(threading.local):
    """The last call of the thread that looks."""

    def __init__(self) -> None:
        self.answers: deque[Answer] = deque(maxlen=ANSWERS_MAX)
        self.places: dict[int, Place] = {}  # by place in the batch
        self.lease_until_ns = 0  # as the master keeps it; 0: no lease
        self.ended_ns = 0  # when the last byte had been read
        self.requests = 0  # sent to masters and stores by this thread so far
        self.retries = 0  # reads that were asked for again, of another replica

    def begin(self) -> None:
        """Another call begins: forget the one before. What is counted goes on."""
        self.answers.clear()
        self.places.clear()
        self.lease_until_ns = self.ended_ns = 0

    def answered(self, kind: Kind, *, by: Welcome, asked_ns: int) -> None:
        """A master has answered, over a connection on which it had welcomed us like that."""
        self.answers.append(
            Answer(
                kind=kind,
                master=by.name,
                incarnation=by.incarnation,
                term=by.term,
                asked_ns=asked_ns,
                answered_ns=boot_ns(),
            )
        )

    def named(self, places: Iterable[tuple[int, Place]]) -> None:
        """These places were named, by their place in the batch."""
        self.places.update(places)

    def read(self, *, lease_end_s: float) -> None:
        """
        A read has ended.

        Args:
            lease_end_s: When the reader was to have given up, on ``time.monotonic``; its master waits for a margin
                longer.
        """
        self.ended_ns = boot_ns()
        left_s = lease_end_s + LEASE_MARGIN_MS / 1_000 - time.monotonic()
        self.lease_until_ns = self.ended_ns + round(left_s * 1e9)

    def first(self, kind: Kind) -> Answer | None:
        """The first answer of a kind."""
        return next((one for one in self.answers if one.kind is kind), None)

    @property
    def last(self) -> Answer | None:
        """The last answer."""
        return self.answers[-1] if self.answers else None


def boot_ns() -> int:
    """CLOCK_BOOTTIME, in nanoseconds: the clock of leases."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
