"""
When to stop asking a peer, and when to ask again.

A *breaker* is closed (calls go through), open (they do not, at no cost), or half-open (one probe is under
way, off every caller's path; its outcome decides). The client has one for each store and one for the
master; a *group breaker* opens for everybody, but only when at least half of the hosts say so. A *retry
budget* keeps retries from becoming the load that breaks a peer. Time and randomness are passed in;
callers hold their own lock.
"""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import Final

FAILURES_TO_OPEN: Final = 2  # one time-out may be the peer's hiccup or the network's
OPEN_MS_FIRST: Final = 500
OPEN_MS_MAX: Final = 10_000
OPEN_JITTER: Final = 0.2  # of the open time, either way: clients do not probe in step
PROBE_MS_MAX: Final = 2_000  # a probe that was not heard of for this long has failed
RETRY_RATIO: Final = 0.1
RETRY_BURST: Final = 10
REPORT_WINDOW_MS: Final = 5_000
REPORT_HOSTS_MIN: Final = 2  # one engine's bad NIC switches off only itself
REPORTING_HOSTS_MAX: Final = 4_096


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Failure(StrEnum):
    """How a call failed."""

    TIMEOUT = "timeout"  # silence: counts, and opens when it repeats
    REFUSED = "refused"  # nobody listens, or the connection was reset: opens at once


class Breaker:
    """
    One peer's breaker.

    Args:
        rng: For the jitter; seeded in tests and in the simulator.
        failures_to_open: Time-outs in a row that open it.
        open_ms_first: How long it stays open before the first probe; doubles with each that fails.
        open_ms_max: Longest time between probes, before jitter.
    """

    def __init__(
        self,
        *,
        rng: Random,
        failures_to_open: int = FAILURES_TO_OPEN,
        open_ms_first: int = OPEN_MS_FIRST,
        open_ms_max: int = OPEN_MS_MAX,
    ) -> None:
        assert failures_to_open >= 1, "it opens on something"
        assert 0 < open_ms_first <= open_ms_max, "open times grow"
        self.state = BreakerState.CLOSED
        self.changed_ms = 0  # when ``state`` last changed
        self._rng = rng
        self._failures_to_open = failures_to_open
        self._open_ms_first = open_ms_first
        self._open_ms_max = open_ms_max
        self._failures = 0
        self._open_ms = open_ms_first
        self._probe_ms = 0  # open: when the next probe is due; half-open: when it is given up

    def allow(self) -> bool:
        """Whether a caller may use the peer: only while closed, probes are not the callers' business."""
        return self.state is BreakerState.CLOSED

    def record(self, failure: Failure | None, *, now_ms: int) -> None:
        """
        Note how a call went; None is success.

        Only while closed does it count: what was sent before the breaker opened says nothing about now.
        """
        if self.state is not BreakerState.CLOSED:
            return
        if failure is None:
            self._failures = 0
            return
        self._failures += 1
        if failure is Failure.REFUSED or self._failures >= self._failures_to_open:
            self._open(now_ms)

    def try_probe(self, *, now_ms: int) -> bool:
        """Claim the one probe when it is due; then send it, and tell ``record_probe``."""
        if self.state is BreakerState.HALF_OPEN and now_ms >= self._probe_ms:
            self.record_probe(False, now_ms=now_ms)  # whoever had it died
        if self.state is not BreakerState.OPEN or now_ms < self._probe_ms:
            return False
        self._become(BreakerState.HALF_OPEN, now_ms)
        self._probe_ms = now_ms + PROBE_MS_MAX
        return True

    def record_probe(self, ok: bool, *, now_ms: int) -> None:
        """End the probe: close, or stay open for twice as long. A probe that was given up changes nothing."""
        if self.state is not BreakerState.HALF_OPEN:
            return
        if ok:
            self.reset(now_ms=now_ms)
        else:
            self._open_ms = min(self._open_ms * 2, self._open_ms_max)
            self._open(now_ms)

    def trip(self, *, now_ms: int) -> None:
        """Open it on other evidence than calls."""
        if self.state is BreakerState.CLOSED:
            self._open(now_ms)

    def reset(self, *, now_ms: int) -> None:
        """Close it and forget: the peer answers, or is a new one."""
        self._failures = 0
        self._open_ms = self._open_ms_first
        self._become(BreakerState.CLOSED, now_ms)

    def probe_due_ms(self) -> int | None:
        """When the next probe is due, on the caller's clock; None while closed."""
        return None if self.state is BreakerState.CLOSED else self._probe_ms

    def _open(self, now_ms: int) -> None:
        self._become(BreakerState.OPEN, now_ms)
        self._failures = 0
        jitter = self._rng.uniform(1 - OPEN_JITTER, 1 + OPEN_JITTER)
        self._probe_ms = now_ms + max(1, round(self._open_ms * jitter))

    def _become(self, state: BreakerState, now_ms: int) -> None:
        if state is not self.state:
            self.state = state
            self.changed_ms = now_ms


class RetryBudget:
    """
    Retries in proportion to requests.

    Every request earns a share of a retry. Over any run of requests, retries are at most ``ratio`` of
    them plus ``burst``, and since the first request at most ``ratio``: it begins empty.
    """

    _UNIT: Final = 1_000_000  # tokens are counted in whole millionths: sums of 0.1 would drift

    def __init__(self, *, ratio: float = RETRY_RATIO, burst: int = RETRY_BURST) -> None:
        assert 0 < ratio <= 1, "retries are the smaller part"
        assert burst >= 1, "one retry must be affordable"
        self._earned = int(ratio * self._UNIT)
        self._most = burst * self._UNIT
        self._tokens = 0

    def note_request(self, count: int = 1) -> None:
        """Earn for ``count`` first attempts."""
        self._tokens = min(self._tokens + count * self._earned, self._most)

    def take(self) -> bool:
        """Pay for one retry, if it can be afforded."""
        if self._tokens < self._UNIT:
            return False
        self._tokens -= self._UNIT
        return True


class GroupBreaker:
    """
    The breaker of a whole pool, kept by its master.

    It opens when, within a window, at least half of the hosts (and two) report that the pool fails them,
    or on the master's own evidence. Each host counts once, whatever number of engines runs on it.
    """

    def __init__(self, *, rng: Random, window_ms: int = REPORT_WINDOW_MS) -> None:
        self._breaker = Breaker(rng=rng)
        self._window_ms = window_ms
        self._reports: dict[str, int] = {}  # host → when it last complained

    @property
    def state(self) -> BreakerState:
        """Whether the pool may be used."""
        return self._breaker.state

    @property
    def changed_ms(self) -> int:
        """When ``state`` last changed."""
        return self._breaker.changed_ms

    def report(self, host: str, *, host_count: int, now_ms: int) -> bool:
        """
        Note that a host's clients cannot use the pool.

        Args:
            host: Logical name; reports of one host count once.
            host_count: Hosts that use the pool now.
            now_ms: On the master's clock.

        Returns:
            Whether this report opened the breaker.
        """
        self._reports.pop(host, None)
        self._reports[host] = now_ms  # oldest first
        for old, at_ms in list(self._reports.items()):
            if now_ms - at_ms <= self._window_ms and len(self._reports) <= REPORTING_HOSTS_MAX:
                break
            del self._reports[old]
        reporting = len(self._reports)
        if reporting < REPORT_HOSTS_MIN or reporting * 2 < host_count:
            return False
        return self.trip(now_ms=now_ms)

    def trip(self, *, now_ms: int) -> bool:
        """Open it on the master's own evidence; returns whether it was closed before."""
        was_closed = self._breaker.allow()
        self._breaker.trip(now_ms=now_ms)
        return was_closed

    def try_probe(self, *, now_ms: int) -> bool:
        """Claim the one probe when it is due."""
        return self._breaker.try_probe(now_ms=now_ms)

    def record_probe(self, ok: bool, *, now_ms: int) -> None:
        """End the probe; complaints from before a success no longer count."""
        self._breaker.record_probe(ok, now_ms=now_ms)
        if self._breaker.allow():
            self._reports.clear()
