"""Figures drawn from the rows of a replay."""

from __future__ import annotations

import numpy as np
import pytest

from kvops.inference.report import recovery
from kvops.inference.results import DONE, FAILED, RESULT, ReplayEvent, ReplayResult, impact, losses, summary


def result_of(served: list[float], *, fault_at: int | None = None, **columns: list[float]) -> ReplayResult:
    """A request a second, each of 1,000 tokens all seen before, of which the given share was served."""
    count = len(served)
    rows = np.zeros(count, dtype=RESULT)
    rows["state"] = DONE
    rows["sent_s"] = np.arange(count)
    rows["done_s"] = np.arange(count) + 0.5
    rows["input_tokens"] = 1_000
    rows["l3_tokens"] = [int(1_000 * share) for share in served]
    rows["lost_tokens"] = 1_000 - rows["l3_tokens"]
    rows["lost_reason"] = rows["lost_tokens"] > 0
    for name, values in columns.items():
        rows[name] = values
    events = []
    if fault_at is not None:
        events = [
            ReplayEvent(
                at_s=float(fault_at), trace_s=0.0, event="fault.killed", subject="store-1", fault=True
            )
        ]
    return ReplayResult(
        rows=rows,
        arrival_ms=np.arange(count) * 1000.0,
        seen_tokens=np.full(count, 1_000),
        reasons=["", "MISS"],
        events=events,
        write_failures={},
        wall_s=float(count),
        lag_s=0.0,
        started_at="2031-01-01T00:00:00.000Z",
        hosts=("host-0",),
        page_bytes=64,
        deadline_ms=200,
        parameters={},
    )


def test_recovery_counts_from_the_fault_to_the_first_stretch_as_good_as_before() -> None:
    """Half of the hits gone for 60 requests: the worst is seen, and so is when it was over, not before it stayed so."""
    hit = impact(result_of([1.0] * 100 + [0.5] * 60 + [1.0] * 100, fault_at=100))

    assert hit is not None
    assert (hit.before.served_share, hit.lowest_share) == (1.0, 0.5)
    assert hit.recovered_after_s == pytest.approx(80, abs=6)  # 60 bad ones and a good stretch of 20


def test_a_relapse_is_no_recovery() -> None:
    """Good again for a while and bad at the end: not recovered."""
    hit = impact(result_of([1.0] * 100 + [0.5] * 30 + [1.0] * 40 + [0.5] * 30, fault_at=100))

    assert hit is not None
    assert hit.recovered_after_s is None


def test_a_fault_without_effect_needs_no_recovery() -> None:
    """Nothing was lost: zero seconds, not "never"."""
    hit = impact(result_of([0.9] * 200, fault_at=100))

    assert hit is not None
    assert hit.recovered_after_s == 0.0


def test_too_few_requests_after_a_fault_say_nothing() -> None:
    """Neither "100 % at worst" nor "not yet back": the report says that it cannot tell."""
    hit = impact(result_of([1.0] * 30 + [0.5] * 10, fault_at=30))

    assert hit is not None
    assert hit.lowest_share is hit.recovered_after_s is None
    assert "too few requests" in recovery(hit)


def test_no_fault_no_comparison() -> None:
    """A plain replay has no before and after."""
    assert impact(result_of([1.0] * 10)) is None


def test_blocked_and_slow_requests_are_told_apart() -> None:
    """A call over its deadline or an answer that never came blocks; a long read within it is only slow."""
    result = result_of([1.0] * 4, fault_at=2, over_deadline=[0, 0, 1, 0], read_ms=[1, 120, 300, 1])
    result.rows["state"][3] = FAILED
    hit = impact(result)

    assert hit is not None
    assert (hit.before.blocked, hit.before.slow, hit.before.requests) == (0, 1, 2)
    assert (hit.after.blocked, hit.after.slow, hit.after.requests) == (2, 1, 1)


def test_a_request_under_way_belongs_to_after_the_fault() -> None:
    """Sent before and answered after: the fault could touch it, so "before" stays what it was without a fault."""
    result = result_of([1.0, 1.0, 0.2, 0.2], fault_at=3)
    result.rows["done_s"][2] = 3.1
    hit = impact(result)

    assert hit is not None
    assert (hit.before.requests, hit.before.served_share) == (2, 1.0)


def test_losses_come_largest_first_and_add_up() -> None:
    """Each lost token has one reason; the sum is what was recomputed."""
    result = result_of([0.5, 0.9, 1.0])
    result.reasons.append("TIMEOUT")
    result.rows["lost_reason"][1] = 2

    assert list(losses(result).items()) == [("MISS", 500), ("TIMEOUT", 100)]
    assert summary(result)["recomputed_tokens"] == 600


def test_a_replay_in_which_nothing_was_answered_still_has_figures() -> None:
    """Zeros, not a division by zero."""
    result = result_of([1.0] * 3, fault_at=1)
    result.rows["state"] = FAILED

    figures = summary(result)

    assert (figures["failed"], figures["hit_ratio"]["tokens"], figures["ttft_ms"]["p99"]) == (3, 0.0, 0.0)


def test_a_warm_pool_serves_no_more_than_was_possible() -> None:
    """Tokens that a pool held from before were possible too: no share is above one, and none is hidden."""
    result = result_of([0.8, 0.4, 0.6], fault_at=1)
    result.seen_tokens[:] = [0, 500, 1_000]

    figures = summary(result)
    hit = impact(result)

    assert figures["hit_ratio"]["possible"] == round((800 + 500 + 1_000) / 3_000, 6)
    assert hit is not None
    assert (hit.before.served_share, hit.after.served_share) == (1.0, 1_000 / 1_500)
