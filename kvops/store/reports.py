"""What clients say of stores that they cannot read from, and the group's breaker that it may open."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from kvops.store import messages as m
from kvops.store.breaker import REPORT_HOSTS_MIN, REPORT_WINDOW_MS, BreakerState, GroupBreaker
from kvops.store.model import StoreState
from kvops.store.outbox import Outbox
from kvops.store.store_states import StoreStates
from kvops.store.stores import SERVING, StoreTable

SUSPECT_MS: Final = 2_000  # a store stays hidden on its readers' evidence


class Reports:
    """
    Evidence of readers, by store and for the whole group.

    Args:
        group: Its name, for events.
        stores: The store table.
        states: Hides stores that hosts agree on.
        outbox: Where events go.
        seed: Of the breaker's back-off.
    """

    def __init__(
        self, group: str, stores: StoreTable, states: StoreStates, outbox: Outbox, *, seed: int
    ) -> None:
        self.breaker = GroupBreaker(rng=Random(seed))
        self._group, self._stores, self._states, self._outbox = group, stores, states, outbox

    @property
    def breaker_open(self) -> bool:
        """Whether the group's breaker keeps everybody away."""
        return self.breaker.state is BreakerState.OPEN

    def report(self, host: str, report: m.Report, *, host_count: Callable[[], int], now_ms: int) -> None:
        """A client of a host could not read from a store; ``host_count`` says how many have clients."""
        store = self._stores.get(report.store_id)
        if store is not None and store.state in SERVING:
            store.reports = {host: at for host, at in store.reports.items() if now_ms - at < REPORT_WINDOW_MS}
            store.reports[host] = now_ms
            self._outbox.event(now_ms, "store.reported", store.mount.name, reason=report.reason, host=host)
            if len(store.reports) >= REPORT_HOSTS_MIN:
                store.suspect_until_ms = now_ms + SUSPECT_MS
                self._states.suspect(store, reason="two hosts cannot read from it", now_ms=now_ms)
        if report.stores_down * 2 >= report.stores > 0:
            hosts = host_count()
            if self.breaker.report(host, host_count=hosts, now_ms=now_ms):
                self._outbox.event(now_ms, "breaker.opened", self._group, hosts=hosts)

    def tick(self, *, now_ms: int) -> None:
        """Let clients try again, once the breaker's time is over and there are stores to read from."""
        if self.breaker.try_probe(now_ms=now_ms):
            # The best we can tell from here.
            serving = any(store.state is StoreState.READY for store in self._stores)
            self.breaker.record_probe(serving, now_ms=now_ms)
            if serving:
                self._outbox.event(now_ms, "breaker.closed", self._group)
