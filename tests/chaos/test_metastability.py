"""From which load the service comes back by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.history import Arm, Bounds, RunRecord
from kvops.chaos.metastability import margin
from tests.chaos.histories import World, simulate

BOUNDS = Bounds(t_recover_s=10, t_rewarm_s=15)


def at(load: float, *, stays_s: float = 1.0, **more: Any) -> RunRecord:
    """A cache-wide outage of two seconds at a load; its effects outlast it for so long."""
    world = World(
        seed=3,
        blocks=2,
        rps=30,
        before_s=4,
        fault_s=2,
        after_s=22,
        arms=(Arm.BASELINE, Arm.CONTROL, Arm.FAULT),
        capacity_share=1.0,
        hit_loss=1.0,
        slower=3.0,
        stays_s=stays_s,
        **more,
    )
    record = simulate(world)
    return dataclasses.replace(
        record, run=msgspec.structs.replace(record.run, load_share=load, bounds=BOUNDS)
    )


def test_margin_is_the_highest_load_that_recovers() -> None:
    """Loads that recover are counted from below up to the first that does not; a lucky one above does not count."""
    found = margin([at(0.9), at(0.7), at(0.8, stays_s=60)])

    assert [(one.load_share, one.verdict) for one in found.levels] == [
        (0.7, Verdict.VALID),
        (0.8, Verdict.INVALID),
        (0.9, Verdict.VALID),
    ]
    assert (found.margin, found.verdict) == (0.7, Verdict.INVALID)
    assert str(found) == "metastability margin: 70 % of cache-off capacity"


@pytest.mark.parametrize("kind", ["closed loop", "late starts", "load not measured"])
def test_closed_loop_proves_nothing(kind: str) -> None:
    """Clients that slow down with the service, and a load that nobody measured, leave the margin unknown."""
    record = at(0.7)
    if kind == "closed loop":
        kept = (row for row in record.requests if row.arm is not Arm.FAULT or int(row.request[1:]) % 3)
        record = dataclasses.replace(record, requests=tuple(kept))
    elif kind == "late starts":
        rows = (
            msgspec.structs.replace(row, t_start_ns=row.t_intended_ns + 2_000_000_000)
            for row in record.requests
        )
        record = dataclasses.replace(record, requests=tuple(rows))
    else:
        record = dataclasses.replace(record, run=msgspec.structs.replace(record.run, load_share=0.0))

    found = margin([record])

    assert (found.margin, found.verdict) == (None, Verdict.UNKNOWN)
    assert ("open loop" in found.levels[0].why) is (kind != "load not measured")
