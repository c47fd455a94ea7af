"""The judgement of ``kvops status``, from what processes and masters say."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from kvops.fleet.health import (
    Health,
    Judgement,
    Known,
    Life,
    judge,
    last_change,
    mounted_at,
    not_back,
    populate_eta_s,
    trouble_since,
)
from kvops.store.model import Event, MasterStatus, PlacementPolicy, StoreInfo, StoreState, Trouble


def store(name: str, state: StoreState = StoreState.READY, *, mount: int = 1) -> StoreInfo:
    """A store as a master knows it."""
    return StoreInfo(
        id=mount,
        name=name,
        host=name.replace("store", "host"),
        numa_node=0,
        incarnation=1,
        boot_id="b",
        pid=10,
        address="127.0.0.1:1",
        unix_path="",
        http_address="127.0.0.1:2",
        state=state,
        capacity_bytes=100,
        populated_bytes=100,
        used_bytes=40,
        objects=4,
        transports=["shm", "tcp"],
    )


def master(*stores: StoreInfo, **change: Any) -> MasterStatus:
    """A leader that knows these stores."""
    status = MasterStatus(
        group="g",
        name="master-0",
        host="host-0",
        pid=9,
        address="127.0.0.1:3",
        role="leader",
        term=5,
        uptime_s=1.0,
        placement=PlacementPolicy.LOCAL_FIRST,
        objects=8,
        processing=0,
        capacity_bytes=200,
        used_bytes=80,
        evicted_total=3,
        lookups_total=1,
        hits_total=1,
        breaker_open=False,
        stores=list(stores),
        clients=[],
    )
    return msgspec.structs.replace(status, **change)


FULL = Trouble(code="journal_failed", text="its journal is behind: No space left", fix="make room")
KNOWN = [
    Known(name="master-0", role="master", pid=9, life=Life.RUNNING),
    Known(name="store-0", role="store", pid=10, life=Life.RUNNING),
    Known(name="store-1", role="store", pid=11, life=Life.RUNNING),
    Known(name="etcd-0", role="etcd", pid=8, life=Life.RUNNING),
]


def judged(status: MasterStatus | None, **lives: Life) -> Judgement:
    """Judge the group of ``KNOWN``, with some processes otherwise than running."""
    known = [dataclasses.replace(one, life=lives.get(one.name.replace("-", "_"), one.life)) for one in KNOWN]
    answers = {"master-0": status} if status is not None else {}
    return judge(
        group="g",
        environment="local",
        known=known,
        answers=answers,
        since={"store-1": "2031-01-01T00:00:09Z"},
        trouble={"store-1": "2031-01-01T00:00:00Z"},
    )


def test_members_of_etcd_are_shown() -> None:
    """A member that kvops started has a row of its own, whatever its state; JSON gives it under etcd."""
    rows = judged(master(store("store-0"), store("store-1")), etcd_0=Life.ENDED).document()["etcd"]

    assert [(row["name"], row["state"], row["pid"]) for row in rows] == [("etcd-0", "down", 8)]


def test_memory_on_another_numa_node_is_no_health() -> None:
    """A bound store of which some memory lies elsewhere serves, and is said to be slower than it should be."""
    away = msgspec.structs.replace(store("store-1"), misplaced_bytes=3 << 20)
    found = judged(master(store("store-0"), away))

    (reason,) = found.reasons
    assert (str(found.health), reason.code, reason.subject) == ("degraded", "store.misplaced", "store-1")
    assert reason.text.startswith("3.0 MiB of its memory lie on other NUMA nodes than 0")
    assert reason.next == "kvops restart store-1"


def test_healthy() -> None:
    """A leader that answers and stores that serve: nothing to say."""
    found = judged(master(store("store-0"), store("store-1")))

    assert found.health is Health.HEALTHY
    assert found.reasons == []
    assert found.unseen == []


@pytest.mark.parametrize(
    ("status", "lives", "health", "codes"),
    [
        (master(store("store-0"), store("store-1")), {"store_1": Life.ENDED}, "degraded", ["store.down"]),
        (
            master(store("store-0"), store("store-1")),
            {"store_1": Life.STOPPED},
            "degraded",
            ["store.stopped"],
        ),
        (
            master(store("store-0"), store("store-1", StoreState.SUSPECTED)),
            {},
            "degraded",
            ["store.suspected"],
        ),
        (master(store("store-0"), store("store-1", StoreState.GONE)), {}, "degraded", ["store.gone"]),
        (master(store("store-0"), store("store-1", StoreState.DRAINING)), {}, "degraded", ["store.draining"]),
        (
            master(store("store-0"), store("store-1", StoreState.ANNOUNCING)),
            {},
            "degraded",
            ["store.announcing"],
        ),
        (master(store("store-0")), {}, "degraded", ["store.unmounted"]),
        (master(store("store-0"), store("store-1")), {"etcd_0": Life.ENDED}, "degraded", ["etcd.down"]),
        (master(store("store-0"), store("store-1")), {"etcd_0": Life.STOPPED}, "degraded", ["etcd.stopped"]),
        (
            master(store("store-0"), store("store-1"), troubles=[FULL]),
            {},
            "degraded",
            ["master.journal_failed"],
        ),
        (master(), {}, "down", ["store.unmounted", "store.unmounted"]),
        (master(store("store-0"), store("store-1"), breaker_open=True), {}, "degraded", ["breaker.open"]),
        (master(store("store-0"), store("store-1"), role="standby"), {}, "down", ["master.no_leader"]),
        (None, {}, "down", ["master.unseen"]),
        (None, {"master_0": Life.ENDED}, "down", ["master.down"]),
        (None, {"master_0": Life.STOPPED}, "down", ["master.stopped"]),
    ],
)
def test_trouble(status: MasterStatus | None, lives: dict[str, Life], health: str, codes: list[str]) -> None:
    """Each trouble has its code, and weighs what it costs clients."""
    found = judged(status, **lives)

    assert found.health == health
    assert [reason.code for reason in found.reasons] == codes


def test_worst_first_and_since_when() -> None:
    """The store that is down comes before those that serve, with the time of its first trouble."""
    found = judged(master(store("store-0"), store("store-1")), store_1=Life.ENDED)

    assert [row["name"] for row in found.stores] == ["store-1", "store-0"]
    assert found.document()["reasons"][0] == {
        "code": "store.down",
        "subject": "store-1",
        "since": "2031-01-01T00:00:00Z",
        "text": "its process ended",
    }


def test_no_store() -> None:
    """A pool without a store answers, but nothing can be put: that is not healthy."""
    former = store("store-0", StoreState.SUSPECTED)  # of the group's former life, as the journal says
    found = judge(
        group="g", environment="local", known=KNOWN[:1], answers={"master-0": master(former)}, since={}
    )

    assert found.health is Health.DEGRADED
    assert found.stores == []
    assert [(one.code, one.text) for one in found.reasons] == [("store.none", "no store: nothing can be put")]
    assert found.reasons[0].next == "kvops stop && kvops start --stores 1"


def test_who_is_not_back_yet() -> None:
    """Whoever runs and has not joined again is awaited; what has ended is not, nor is a store nobody asked for."""
    behind = judged(master(store("store-0", StoreState.SUSPECTED)))

    assert sorted(not_back(behind)) == ["store-0", "store-1"]
    assert not_back(behind, ["store-1"]) == ["store-1"]
    assert not_back(judged(master(store("store-0")), store_1=Life.ENDED)) == []
    assert not_back(judged(None)) == ["master-0", "store-0", "store-1"]


def test_restarted_store() -> None:
    """A store that was restarted is its newest mount; the gone one is history."""
    found = judged(
        master(store("store-0"), store("store-1", StoreState.GONE, mount=7), store("store-1", mount=9))
    )

    assert found.health is Health.HEALTHY


def test_store_of_a_former_life() -> None:
    """A store that the group no longer has, and the master has not forgotten yet, is no trouble."""
    found = judged(master(store("store-0"), store("store-1"), store("store-9", StoreState.SUSPECTED)))

    assert found.health is Health.HEALTHY
    assert [row["name"] for row in found.stores] == ["store-0", "store-1"]


def test_master_that_does_not_answer() -> None:
    """What cannot be seen is named as unseen, stores included, and is not called down."""
    found = judged(None)

    assert found.unseen == ["master-0", "store-0", "store-1"]
    assert [row["state"] for row in found.stores] == ["unseen", "unseen"]


def test_group_stopped_on_purpose() -> None:
    """A group that was stopped has one reason, not one for each of its processes."""
    known = [dataclasses.replace(one, pid=0, life=Life.ENDED) for one in KNOWN]

    found = judge(
        group="g",
        environment="local",
        known=known,
        answers={},
        since={},
        stopped_since="2031-01-01T00:00:00Z",
    )

    assert found.health is Health.DOWN
    assert [(reason.code, reason.since) for reason in found.reasons] == [
        ("group.stopped", "2031-01-01T00:00:00Z")
    ]


def test_never_started() -> None:
    """A group nobody started is down, and says why."""
    found = judge(group="g", environment="local", known=[], answers={}, since={})

    assert found.health is Health.DOWN
    assert [reason.code for reason in found.reasons] == ["group.not_started"]


def test_group_elsewhere() -> None:
    """Of a group on other machines, its stores are those that its leader names."""
    known = [Known(name="10.0.0.1:7801", role="master", control="10.0.0.1:7801")]

    found = judge(
        group="prod",
        environment="production",
        known=known,
        answers={"10.0.0.1:7801": master(store("store-0"))},
        since={},
    )

    assert found.health is Health.HEALTHY
    assert [row["name"] for row in found.masters + found.stores] == ["master-0", "store-0"]


def test_capacity_while_segments_fill() -> None:
    """The capacity is the segments' whole size, beside what of it is ready."""
    found = judged(master(store("store-0"), store("store-1"), capacity_bytes=60, used_bytes=0)).document()

    assert (found["capacity_bytes"], found["populated_bytes"]) == (200, 60)


def mounted(at: str, populated_bytes: int) -> Event:
    """A store came."""
    detail: dict[str, str | int | float | bool] = {"id": 1, "populated_bytes": populated_bytes}
    return Event(time=at, event="store.mounted", subject="store-0", actor="", detail=detail)


def test_how_long_the_rest_of_a_segment_takes() -> None:
    """At its own pace since its last mount; nothing is said before there is a pace, and 0 once all is there."""
    mounts = mounted_at([mounted("2026-01-01T00:00:00.000Z", 0), mounted("2026-01-01T00:01:00.000Z", 10)])
    now = datetime(2026, 1, 1, 0, 1, 30, tzinfo=UTC)

    def eta(populated_bytes: int) -> float | None:
        return populate_eta_s(mounts["store-0"], populated_bytes=populated_bytes, capacity_bytes=100, now=now)

    assert (eta(40), eta(10), eta(100)) == (60.0, None, 0.0)
    assert populate_eta_s(None, populated_bytes=1, capacity_bytes=2, now=now) is None


def test_a_filling_store_says_how_far_it_is() -> None:
    """The row that status prints has the share and the time to go, of stores that serve only."""
    filling = msgspec.structs.replace(store("store-0"), populated_bytes=40)
    found = judge(
        group="g",
        environment="e",
        known=KNOWN,
        answers={"master-0": master(filling, store("store-1"))},
        since={},
        mounts=mounted_at([mounted("2026-01-01T00:00:00.000Z", 0)]),
        now=datetime(2026, 1, 1, 0, 0, 20, tzinfo=UTC),
    )
    rows = {row["name"]: (row["populated_share"], row["populate_eta_s"]) for row in found.stores}

    assert rows == {"store-0": (0.4, 30.0), "store-1": (1.0, 0.0)}


def test_keys_that_others_rely_on() -> None:
    """The JSON document has the keys of the command line's contract."""
    document = judged(master(store("store-0"), store("store-1"))).document()

    top = "group backend health reasons masters stores clients holds objects evicted_total unseen"
    assert set(document) >= set(top.split())
    assert set(document["masters"][0]) >= {"name", "address", "pid", "host", "role", "term", "lag"}
    store_keys = "name address pid host numa_node state capacity_bytes used_bytes objects transports"
    assert set(document["stores"][0]) >= set(store_keys.split())


def test_last_change() -> None:
    """Of a subject's events, the last one's time counts."""
    events = [
        Event(time=time, event="store.lost", subject="store-1", actor="master-0", detail={})
        for time in ("1", "2")
    ]

    assert last_change(events) == {"store-1": "2"}


def event(time: str, name: str, **detail: int) -> Event:
    """Something that happened to store-1."""
    return Event(time=time, event=name, subject="store-1", actor="master", detail=dict(detail))


@pytest.mark.parametrize(
    ("events", "since"),
    [
        ([event("1", "store.mounted", id=1), event("2", "store.ready", id=1)], None),
        (
            [
                event("1", "store.ready", id=1),
                event("2", "store.suspected"),
                event("3", "store.lost", id=1),
                event("4", "store.forgotten", id=1),
            ],
            "2",
        ),
        ([event("2", "store.suspected"), event("3", "store.recovered"), event("4", "store.suspected")], "4"),
        ([event("2", "store.suspected"), event("3", "store.recovered")], None),
        ([event("3", "store.mounted", id=2), event("4", "store.lost", id=1)], None),
        ([event("4", "store.lost", id=1)], "4"),
    ],
    ids=["ready", "killed", "silent again", "recovered", "mounted anew", "of an unknown mount"],
)
def test_trouble_since(events: list[Event], since: str | None) -> None:
    """A store's trouble begins with its first sign, is not moved by what follows, and ends when it is back."""
    assert trouble_since(events).get("store-1") == since


@pytest.mark.parametrize(
    ("life", "follow"),
    [
        (Life.STOPPED, "kill -CONT 9, or kvops restart master-0"),
        (Life.ENDED, "kvops restart master-0"),
    ],
)
def test_a_masters_end_is_dated_by_whoever_saw_it_first(life: Life, follow: str) -> None:
    """No event tells of a master's end; what to do about it depends on what happened."""
    known = [dataclasses.replace(KNOWN[0], life=life, since="2031-01-01T00:00:05Z"), *KNOWN[1:]]

    (reason, *_) = judge(group="g", environment="local", known=known, answers={}, since={}).reasons

    assert (reason.since, reason.next) == ("2031-01-01T00:00:05Z", follow)


def test_a_store_that_was_stopped() -> None:
    """Of the event and the first look the earlier counts; the way on is to let it go on, or to restart it."""
    known = [*KNOWN[:2], dataclasses.replace(KNOWN[2], life=Life.STOPPED, since="2031-01-01T00:00:03Z")]

    def reason(trouble: dict[str, str]) -> tuple[str | None, str]:
        status = master(store("store-0"), store("store-1"))
        found = judge(
            group="g",
            environment="local",
            known=known,
            answers={"master-0": status},
            since={"store-1": "2031-01-01T00:00:01Z"},
            trouble=trouble,
        )
        return found.reasons[0].since, found.reasons[0].next

    follow = "kill -CONT 11, or kvops restart store-1"
    assert reason({}) == ("2031-01-01T00:00:03Z", follow)
    assert reason({"store-1": "2031-01-01T00:00:02Z"}) == ("2031-01-01T00:00:02Z", follow)
    assert reason({"store-1": "2031-01-01T00:00:04Z"}) == ("2031-01-01T00:00:03Z", follow)
