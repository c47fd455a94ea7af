"""stub"""

from __future__ import annotations

import random
from enum import StrEnum


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Failure(StrEnum):
    TIMEOUT = "timeout"
    REFUSED = "refused"


class Breaker:
    def __init__(self, rng: random.Random) -> None:
        self.state = BreakerState.CLOSED
        self.n = 0
        self.probe_at_ms = 0
        self.wait = 500

    def failed(self, kind: Failure, now: int) -> None:
        self.n += 1
        if kind is Failure.REFUSED or self.n >= 2 or self.state is not BreakerState.CLOSED:
            self.state = BreakerState.OPEN
            self.probe_at_ms = now + self.wait
            self.wait = min(self.wait * 2, 10000)

    def succeeded(self, now: int) -> None:
        self.state = BreakerState.CLOSED
        self.n = 0
        self.wait = 500

    def allow(self, now: int) -> bool:
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN and now >= self.probe_at_ms:
            self.state = BreakerState.HALF_OPEN
            return True
        return False


class RetryBudget:
    def earn(self, n: int) -> None: ...
    def spend(self, n: int) -> bool:
        return True


class GroupBreaker:
    open = False

    def report(self, host: str, *, hosts: int, now_ms: int) -> None: ...
    def tick(self, now_ms: int) -> None: ...
