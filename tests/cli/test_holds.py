"""What a drain is said to cost, and how progress of several targets is put together."""

from __future__ import annotations

import pytest

from kvops.cli.holds import named, price, summary
from kvops.errors import ParseError, UsageError
from kvops.store.model import HoldInfo, HoldKind, HoldReply, HoldState, MasterStatus, PlacementPolicy


def hold(target: str, **fields: int | HoldState) -> HoldInfo:
    """A hold of a store with 1,000 objects of 1 MB."""
    known = {
        "state": HoldState.DRAINING,
        "objects_at_call": 1_000,
        "bytes_at_call": 10**9,
        "leases_left_ms": 0,
        "swept": 0,
        "left": -1,
        "objects": 1_000,
        "migrated": 0,
        "migrated_bytes": 0,
        "unmoved": 0,
    }
    return HoldInfo(
        number=7,
        target=target,
        host=False,
        kind=HoldKind.DRAIN,
        reason="",
        owner="o",
        since="",
        migrate=False,
        bandwidth_bps=0,
        stores=[target],
        **(known | fields),
    )


def reply(*, pool: int, used: int) -> HoldReply:
    """A dry run for one of a pool's stores, which has 2 GB."""
    return HoldReply(holds=[hold("a")], capacity_bytes=2 * 10**9, pool_bytes=pool, pool_used_bytes=used)


def status(*, lookups: int, hits: int) -> MasterStatus:
    """A master with 4,000 objects."""
    return MasterStatus(
        group="g",
        name="m",
        host="h",
        pid=1,
        address="",
        role="leader",
        term=1,
        uptime_s=1.0,
        placement=PlacementPolicy.LOCAL_FIRST,
        objects=4_000,
        processing=0,
        capacity_bytes=0,
        used_bytes=0,
        evicted_total=0,
        lookups_total=lookups,
        hits_total=hits,
        breaker_open=False,
        stores=[],
        clients=[],
    )


def test_price_of_a_drain() -> None:
    """A quarter of the objects costs a quarter of the hits; the rest is as full as it would be with everything."""
    cost = price(reply(pool=8 * 10**9, used=3 * 10**9), status(lookups=1_000, hits=800))

    assert (cost.share, cost.full, cost.hit_ratio) == (0.25, 0.5, 0.8)
    assert cost.hit_ratio_after == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("used", "after"), [(3 * 10**9, 0.8), (65 * 10**8, 0.7), (7 * 10**9, 0.6)], ids=["room", "half", "none"]
)
def test_price_of_a_migration(used: int, after: float) -> None:
    """What finds room elsewhere costs no hits, only the time that the limit allows."""
    cost = price(
        reply(pool=8 * 10**9, used=used),
        status(lookups=1_000, hits=800),
        migrate=True,
        bandwidth_bps=8 * 10**8,
    )

    assert cost.hit_ratio_after == pytest.approx(after)
    assert cost.seconds > 10


def test_price_without_a_lookup() -> None:
    """Where nobody has looked anything up there is no ratio to predict."""
    cost = price(reply(pool=8 * 10**9, used=0), status(lookups=0, hits=0))

    assert cost.document()["hit_ratio"] is cost.document()["hit_ratio_after"] is None


def test_price_of_all_there_is() -> None:
    """Without another store no hit is left, whatever they hold, and nothing is called safe or as full as anything."""
    everything = reply(pool=2 * 10**9, used=0)
    cost = price(everything, status(lookups=1_000, hits=800))

    assert cost.hit_ratio_after == 0
    assert not any("full" in line for line in cost.lines(everything))


def test_summary_names_the_one_that_is_behind() -> None:
    """Several targets are drained when all are, and nothing is counted before all have been."""
    done = hold("a", state=HoldState.DRAINED, swept=1_000, left=0)

    assert summary([done, hold("b", swept=10)])["state"] == "draining"
    assert summary([done, hold("b", swept=10)])["left"] is None
    both = summary([done, hold("b", state=HoldState.LOST, swept=10, left=0)])
    assert (both["state"], both["left"], both["swept"], both["hold"]) == ("lost", 0, 1_010, 7)


def test_targets() -> None:
    """Ranges and commas are spread out; none at all, and a range that runs backwards, are refused."""
    assert named(["gpu-[009-011]", "a,b"]) == ["gpu-009", "gpu-010", "gpu-011", "a", "b"]
    with pytest.raises(UsageError, match="no target"):
        named([","])
    with pytest.raises(ParseError):
        named(["gpu-[9-1]"])
