"""Ages of touches are right across the clock's wrap after 49.7 days."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvops.limits import LEASE_TTL_MS
from kvops.store.lease import AGE_MS_MAX, AgeClamp, ages_ms

WRAP = 1 << 32


@given(touched=st.integers(0, WRAP - 1), passed=st.integers(0, 3 * LEASE_TTL_MS))
def test_an_age_is_what_has_passed(touched: int, passed: int) -> None:
    """A touch just before the clock's wrap is no older after it than time has passed."""
    ages = ages_ms(np.array([touched, touched], np.uint32), (touched + passed) % WRAP)

    assert ages.tolist() == [passed] * 2


def test_no_age_reaches_the_wrap() -> None:
    """Objects untouched for months stay old, and younger ones keep their age."""
    touched = np.zeros(1_000, dtype=np.uint32)
    clamp = AgeClamp(touched)
    day_ms = 86_400_000
    for day in range(1, 120):
        now = day * day_ms % WRAP
        touched[500:] = now - 5_000 if now >= 5_000 else 0
        rounds = [clamp.step(now_ms32=now, slots_used=1_000, budget=300) for _ in range(4)]
        assert rounds == [False, False, False, True]
        ages = (now - touched.astype(np.int64)) % WRAP
        assert (ages[:500] == min(day * day_ms, AGE_MS_MAX)).all()
        assert (ages[500:] == 5_000).all()
