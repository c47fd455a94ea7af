"""Leases hold exactly as long as they should, also across the clock's wrap after 49.7 days."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvops.limits import LEASE_TTL_MS
from kvops.store.lease import AGE_MS_MAX, LeaseTable

WRAP = 1 << 32


@given(granted=st.integers(0, WRAP - 1), passed=st.integers(0, 3 * LEASE_TTL_MS))
def test_a_lease_lasts_for_its_ttl(granted: int, passed: int) -> None:
    """A slot is leased from its grant until just before the time that the grant returned."""
    table = LeaseTable(np.zeros(10, dtype=np.uint32))
    slots = np.array([3, 5])

    end = table.grant(slots, now_ms32=granted)

    assert end == table.ends_ms(5) == (granted + LEASE_TTL_MS) % WRAP
    leased = table.leased(slots, now_ms32=(granted + passed) % WRAP)
    assert leased.tolist() == [passed < LEASE_TTL_MS] * 2


def test_the_last_reader_counts() -> None:
    """A second grant extends the first one, for the slots it names only."""
    table = LeaseTable(np.zeros(10, dtype=np.uint32))
    table.grant(np.array([1, 2]), now_ms32=5_000)
    table.grant(np.array([2]), now_ms32=5_600)

    assert table.leased(np.array([1, 2]), now_ms32=5_000 + LEASE_TTL_MS).tolist() == [False, True]


def test_no_age_reaches_the_wrap() -> None:
    """Objects untouched for months stay old and unleased, and younger ones keep their age."""
    touched = np.zeros(1_000, dtype=np.uint32)
    table = LeaseTable(touched)
    day_ms = 86_400_000
    for day in range(1, 120):
        now = day * day_ms % WRAP
        touched[500:] = now - 5_000 if now >= 5_000 else 0
        rounds = [table.clamp_ages(now_ms32=now, slots_used=1_000, budget=300) for _ in range(4)]
        assert rounds == [False, False, False, True]
        ages = (now - touched.astype(np.int64)) % WRAP
        assert (ages[:500] == min(day * day_ms, AGE_MS_MAX)).all()
        assert (ages[500:] == 5_000).all()
        assert not table.leased(np.arange(1_000), now_ms32=now).any()
