"""When the last lease ends that anybody may hold, without a look at each: what a drain or a new leader awaits."""

from __future__ import annotations

from kvops.limits import LEASE_TTL_MS
from kvops.store.index import ObjectIndex


class LeaseHorizon:
    """
    The end of all leases that this master has given, or the one before it may have.

    Args:
        index: Whose hits grant leases.
        now_ms: The time; a former master may have given some until now.
    """

    def __init__(self, index: ObjectIndex, *, now_ms: int) -> None:
        self._index = index
        self._renewals = 0
        self._seen = 0  # hits and renewals so far, as the timer last saw them
        self._leased_ms = now_ms  # when it last saw new ones
        self.started_ms = now_ms
        self.earlier_end_ms = now_ms
        """When the last lease of the leader before us ends, of which we know nothing."""

    def renewed(self) -> None:
        """A client has renewed some."""
        self._renewals += 1

    def tick(self, now_ms: int) -> None:
        """Note whether leases were given since the last tick."""
        given = self._index.hits_total + self._renewals
        if given != self._seen:
            self._seen, self._leased_ms = given, now_ms

    def end_ms(self, now_ms: int) -> int:
        """When the last lease ends that may have been given until now; in a pool that nobody reads, at once."""
        if self._seen != self._index.hits_total + self._renewals:
            return now_ms + LEASE_TTL_MS
        return max(now_ms, self._leased_ms + LEASE_TTL_MS, self.earlier_end_ms)

    def take_over(self, now_ms: int) -> None:
        """Another master may have given leases until now."""
        self.earlier_end_ms = now_ms + LEASE_TTL_MS

    def restart(self, now_ms: int) -> None:
        """We begin to lead now, after another master."""
        self.started_ms = now_ms
        self.take_over(now_ms)
