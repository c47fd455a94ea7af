"""Breakers and the retry budget."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvops.store import breaker as module
from kvops.store.breaker import (
    OPEN_JITTER,
    OPEN_MS_FIRST,
    OPEN_MS_MAX,
    PROBE_MS_MAX,
    REPORT_WINDOW_MS,
    Breaker,
    BreakerState,
    Failure,
    GroupBreaker,
    RetryBudget,
)


def breaker() -> Breaker:
    return Breaker(rng=Random(1))


def due(of: Breaker) -> int:
    at = of.probe_due_ms()
    assert at is not None
    return at


def test_two_timeouts_in_a_row_open_it() -> None:
    """One time-out is forgiven, also when a success lies between two; the second in a row opens."""
    one = breaker()
    one.record(Failure.TIMEOUT, now_ms=0)
    one.record(None, now_ms=1)
    one.record(Failure.TIMEOUT, now_ms=2)
    assert one.allow()

    one.record(Failure.TIMEOUT, now_ms=3)

    assert one.state is BreakerState.OPEN
    assert not one.allow()
    assert one.changed_ms == 3


def test_a_refused_connection_opens_at_once() -> None:
    """Nobody listens: the first failure is enough."""
    one = breaker()

    one.record(Failure.REFUSED, now_ms=0)

    assert not one.allow()


def test_open_times_double_up_to_a_bound_and_a_success_forgets_them() -> None:
    """Probes of a dead peer get rarer, never rarer than the bound; after it answered, it starts afresh."""
    one = breaker()
    one.record(Failure.REFUSED, now_ms=0)
    now, expected = 0, OPEN_MS_FIRST
    for _ in range(8):
        wait = due(one) - now
        assert (1 - OPEN_JITTER) * expected - 1 <= wait <= (1 + OPEN_JITTER) * expected + 1
        now = due(one)
        assert not one.try_probe(now_ms=now - 1)
        assert one.try_probe(now_ms=now)
        one.record_probe(False, now_ms=now)
        expected = min(expected * 2, OPEN_MS_MAX)

    now = due(one)
    assert one.try_probe(now_ms=now)
    one.record_probe(True, now_ms=now)

    assert one.allow()
    assert one.probe_due_ms() is None
    one.record(Failure.TIMEOUT, now_ms=now)
    assert one.allow()
    one.record(Failure.REFUSED, now_ms=now)
    assert due(one) - now <= (1 + OPEN_JITTER) * OPEN_MS_FIRST + 1


def test_late_answers_change_nothing() -> None:
    """Calls that were sent before it opened neither close it nor put the probe off."""
    one = breaker()
    one.record(Failure.REFUSED, now_ms=0)
    at = due(one)

    one.record(None, now_ms=1)
    one.record(Failure.TIMEOUT, now_ms=2)
    assert due(one) == at
    assert one.try_probe(now_ms=at)
    one.record(None, now_ms=at)
    one.record(Failure.REFUSED, now_ms=at)

    assert one.state is BreakerState.HALF_OPEN


def test_a_lost_probe_does_not_hold_it_half_open() -> None:
    """When whoever had the probe never reports, it counts as failed and another probe follows."""
    one = breaker()
    one.record(Failure.REFUSED, now_ms=0)
    at = due(one)
    assert one.try_probe(now_ms=at)
    assert not one.try_probe(now_ms=at + PROBE_MS_MAX - 1)

    assert not one.try_probe(now_ms=at + PROBE_MS_MAX)
    assert one.state is BreakerState.OPEN
    one.record_probe(True, now_ms=at + PROBE_MS_MAX)
    assert not one.allow()

    assert one.try_probe(now_ms=due(one))


def test_breakers_do_not_probe_in_step() -> None:
    """Clients that lost a store at the same moment come back at different ones."""
    times = set()
    for seed in range(20):
        one = Breaker(rng=Random(seed))
        one.record(Failure.REFUSED, now_ms=0)
        times.add(due(one))

    assert len(times) > 10


class BreakerMachine(RuleBasedStateMachine):
    """Whatever the order of things: at most one probe is under way, callers pass only while closed."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = breaker()
        self.now = 0
        self.probe_until = -1
        self.probes = 0
        self.opened_at = 0

    @rule(ms=st.integers(0, 3_000))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(failure=st.sampled_from([None, Failure.TIMEOUT, Failure.REFUSED]))
    def call(self, failure: Failure | None) -> None:
        if self.breaker.allow():
            self.breaker.record(failure, now_ms=self.now)
            if not self.breaker.allow():
                self.opened_at = self.now
                assert self.now < due(self.breaker)

    @rule()
    def probe(self) -> None:
        before = self.breaker.state
        if self.breaker.try_probe(now_ms=self.now):
            assert before is BreakerState.OPEN
            assert self.now >= self.probe_until, "two probes at once"
            assert self.now >= self.opened_at + OPEN_MS_FIRST * (1 - OPEN_JITTER) - 1
            self.probe_until = self.now + PROBE_MS_MAX

    @rule(ok=st.booleans())
    def probe_ends(self, ok: bool) -> None:
        if self.breaker.state is not BreakerState.HALF_OPEN:
            return
        self.breaker.record_probe(ok, now_ms=self.now)
        self.probe_until = self.now
        self.opened_at = self.now
        assert self.breaker.allow() == ok

    @invariant()
    def always_leads_back(self) -> None:
        at = self.breaker.probe_due_ms()
        assert (at is None) == self.breaker.allow()
        assert at is None or at <= self.now + max(OPEN_MS_MAX * (1 + OPEN_JITTER), PROBE_MS_MAX) + 1


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=60, deadline=None)


@given(st.lists(st.integers(0, 3), max_size=200))
def test_retries_never_exceed_their_share(attempts: list[int]) -> None:
    """After any sequence of requests that each want some retries, load is at most 1.1 times the requests."""
    budget = RetryBudget(ratio=0.1, burst=5)
    retries = 0

    for requests, wanted in enumerate(attempts, start=1):
        budget.note_request()
        retries += sum(budget.take() for _ in range(wanted))
        assert retries * 10 <= requests


def test_a_quiet_time_saves_up_only_a_burst() -> None:
    """A million good requests do not pay for a storm: at most a burst of retries is kept."""
    budget = RetryBudget(ratio=0.1, burst=5)
    budget.note_request(1_000_000)

    assert [budget.take() for _ in range(7)] == [True] * 5 + [False] * 2
    budget.note_request(10)
    assert budget.take()
    assert not budget.take()


@pytest.mark.parametrize(
    ("reporting", "hosts", "opens"),
    [
        (1, 1, False),
        (1, 2, False),
        (2, 2, True),
        (2, 4, True),
        (2, 5, False),
        (3, 6, True),
        (49, 100, False),
        (50, 100, True),
    ],
)
def test_half_of_the_hosts_open_the_group(reporting: int, hosts: int, opens: bool) -> None:
    """One host never switches the pool off for others; half of them, and two, do."""
    group = GroupBreaker(rng=Random(1))

    results = [group.report(f"host-{index}", host_count=hosts, now_ms=index) for index in range(reporting)]

    assert any(results) == opens
    assert (group.state is BreakerState.OPEN) == opens


def test_a_host_counts_once_and_for_a_while() -> None:
    """Many engines of one host are one voice; a complaint older than the window is none."""
    group = GroupBreaker(rng=Random(1))
    for now in range(10):
        assert not group.report("a", host_count=2, now_ms=now)

    assert not group.report("b", host_count=2, now_ms=9 + REPORT_WINDOW_MS + 1)
    assert group.report("c", host_count=2, now_ms=9 + REPORT_WINDOW_MS + 2)


def test_the_group_closes_by_a_probe() -> None:
    """After one successful probe the pool is used again, and old complaints do not open it at once."""
    group = GroupBreaker(rng=Random(1))
    assert group.trip(now_ms=0)
    assert not group.trip(now_ms=1)
    assert group.changed_ms == 0
    assert not group.report("a", host_count=2, now_ms=500)
    assert not group.report("b", host_count=2, now_ms=500)

    assert not group.try_probe(now_ms=1)
    assert group.try_probe(now_ms=OPEN_MS_FIRST * 2)
    assert group.state is BreakerState.HALF_OPEN
    group.record_probe(True, now_ms=OPEN_MS_FIRST * 2)

    assert group.state is BreakerState.CLOSED
    assert not group.report("c", host_count=3, now_ms=OPEN_MS_FIRST * 2)


def test_reporting_hosts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented host names do not fill the master's memory."""
    monkeypatch.setattr(module, "REPORTING_HOSTS_MAX", 5)
    group = GroupBreaker(rng=Random(1))

    for index in range(100):
        group.report(f"host-{index}", host_count=1000, now_ms=index)

    assert len(group._reports) <= 5
