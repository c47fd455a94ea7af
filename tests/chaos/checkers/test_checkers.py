"""Each checker says invalid to its own bug's history, valid to a correct one, unknown where it cannot tell."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.checkers.registry import CHECKERS, run_all
from kvops.chaos.history import (
    Arm,
    Block,
    Bounds,
    Content,
    Event,
    Fault,
    FaultState,
    Finish,
    Gap,
    Kind,
    Operation,
    Outcome,
    Request,
    Row,
    Run,
    RunRecord,
    Sample,
)
from tests.chaos.histories import MS, S, clean_operations, get, miss, other, put, record, swap

Rows = list[Row]

FAULT: Rows = [
    Fault(state=FaultState.INJECTING, t_ns=2 * S, fault="process.pause", target="store-1"),
    Fault(state=FaultState.ACTIVE, t_ns=2 * S, fault="process.pause", target="store-1", proof=("state T",)),
    Fault(state=FaultState.CLEAN, t_ns=8 * S, fault="process.pause", target="store-1"),
]


def breaker_event(
    kind: str, at: int, *, who: str = "c", domain: str = "store", node: str = "store-1"
) -> Event:
    return Event(t_ns=at, kind=f"breaker.{kind}", subject=who, domain=domain, node=node)


def failing_calls(*, begin: int, end: int, reason: str = "TIMEOUT") -> Rows:
    outcome = Outcome.FAIL
    return [
        get(
            f"f{at}",
            at=at,
            took=MS,
            node="store-1",
            reason=reason,
            outcome=outcome,
            content=Content.UNCHECKED,
        )
        for at in range(begin, end, 100 * MS)
    ]


def opened(begin: int = 2 * S + 600 * MS, end: int = 9 * S) -> Rows:
    return [
        breaker_event("opened", begin),
        breaker_event("half_open", end - MS),
        breaker_event("closed", end),
    ]


CALM_BREAKER: Rows = [
    *FAULT,
    *failing_calls(begin=2 * S, end=2 * S + 700 * MS),
    *opened(),
    Finish(t_ns=40 * S),
]

LEASED = get("g", at=2 * S, lease_from_ns=2 * S, lease_until_ns=3 * S, node="n", generation=5)
HELD = msgspec.structs.replace(LEASED, incarnation=9, offset=4096, extent_bytes=4096)


def given(at: int, offset: int, *, took: int = MS, incarnation: int = 9, generation: int = 6) -> Operation:
    """A put that was given room at a place of the store that holds ``HELD``'s object."""
    return put(
        "p",
        "other",
        at=at,
        took=took,
        node="n",
        incarnation=incarnation,
        offset=offset,
        extent_bytes=4096,
        generation=generation,
        asked_ns=at,
        answered_ns=at + took,
    )


def removed_then_read(put_took: int = MS) -> Rows:
    return [
        put("p", value="w:1", at=S, took=put_took),
        other(Kind.REMOVE, "r", at=2 * S),
        get("g", at=3 * S, value="w:1"),
    ]


def request(**more: object) -> Request:
    values: dict[str, object] = {
        "client": "c",
        "outcome": Outcome.OK,
        "t_intended_ns": S,
        "t_return_ns": 2 * S,
        "arm": Arm.BASELINE,
        "blocks": 4,
        "hit_blocks": 3,
        "local_blocks": 1,
        **more,
    }
    return Request(request="r0", **values)  # type: ignore[arg-type]


def served(*places: int) -> Rows:
    return [get(f"b{place}", at=S, request="r0", position=place, arm=Arm.BASELINE) for place in places]


def quiet(**more: int) -> Sample:
    return Sample(t_ns=9 * S, subject="store-1", phase="quiet", **more)  # type: ignore[arg-type]


BEFORE = Sample(t_ns=0, subject="store-1", phase="before", fds=20, rss_bytes=100 << 20, mrs=4)

INVALID: dict[str, tuple[str, Rows]] = {
    # what is wrong: (the checker that must say so, the history)
    "wrong bytes": ("S1", [get("g", at=S, content=Content.FLIPPED)]),
    "torn": ("S1", [get("g", at=S, content=Content.TORN)]),
    "another key's value": ("S1", [get("g", at=S, content=Content.CROSS_KEY)]),
    "wrong bytes in a request": ("S1", [request(wrong_bytes=512)]),
    "never put": ("S1", [put("p", value="w:1", at=S), get("g", at=2 * S, value="w:9")]),
    "read before it was put": ("S1", [get("g", at=S, value="w:1"), put("p", value="w:1", at=3 * S)]),
    "other bytes of that version": (
        "S1",
        [put("p", value="w:1", digest="aa", at=S), get("g", at=2 * S, value="w:1", digest="bb")],
    ),
    "removed and back": ("S2", removed_then_read()),
    "drained and read": ("S2", [other(Kind.DRAIN, "d", "", at=S, node="n1"), get("g", at=3 * S, node="n1")]),
    "lost without a reason": (
        "S3",
        [put("p", at=S), miss("g", at=2 * S), Sample(t_ns=3 * S, subject="store-1", evicted_total=0)],
    ),
    "lost with another store": (
        "S3",
        [
            put("p", at=S, node="store-1"),
            Event(t_ns=2 * S, kind="store.lost", subject="store-2"),
            miss("g", at=3 * S),
        ],
    ),
    "read past its lease": ("S4", [msgspec.structs.replace(LEASED, t_return_ns=3 * S + 1)]),
    "evicted inside a lease": (
        "S4",
        [
            msgspec.structs.replace(LEASED, t_return_ns=2 * S + 900 * MS),
            Event(t_ns=2 * S + 500 * MS, kind="object.evicted", key="k", node="n", generation=5),
        ],
    ),
    "given away inside a lease": ("S4", [HELD, given(2 * S + 500 * MS, 4096)]),
    "its client stood still, but not for long enough": (
        "S4",
        [
            msgspec.structs.replace(LEASED, t_return_ns=4 * S),
            Sample(t_ns=4 * S + 500 * MS, subject="c", role="client", stalled_ms=900),
        ],
    ),
    "its client stood still at another time": (
        "S4",
        [
            msgspec.structs.replace(LEASED, t_return_ns=4 * S),
            Sample(t_ns=1 * S, subject="c", role="client", stalled_ms=5_000),
            Sample(t_ns=5 * S, subject="c", role="client", stalled_ms=0),
            Sample(t_ns=6 * S, subject="c", role="client", stalled_ms=5_000),
        ],
    ),
    "its end given away inside a lease": ("S4", [HELD, given(2 * S + 500 * MS, 8000)]),
    "given away while the first of two leases lasts": (
        "S4",
        [
            HELD,
            msgspec.structs.replace(
                HELD,
                op_id="short",
                lease_from_ns=2 * S + MS,
                lease_until_ns=2 * S + 2 * MS,
                ended_ns=2 * S + MS,
            ),
            given(2 * S + 500 * MS, 4096),
        ],
    ),
    "its last byte came after its lease": ("S4", [msgspec.structs.replace(LEASED, ended_ns=3 * S + 1)]),
    "a hole": ("S5", [request(), *served(1), miss("b2", at=S, request="r0", position=2, arm=Arm.BASELINE)]),
    "more hits than blocks": ("S5", [request(hit_blocks=5)]),
    "two leaders": (
        "S7",
        [Event(t_ns=at, kind="leader.observed", subject=f"m{at}", term=3) for at in (1, 2)],
    ),
    "a stopped leader wakes up": (
        "S7",
        [
            put("p1", "a", at=S, term=2, leader="m2"),
            put("p2", "b", "w:2", at=2 * S, term=1, leader="m1"),
        ],
    ),
    "a master started again in an earlier term": (
        "S7",
        [
            put("p1", "a", at=S, term=2, leader="m1", leader_incarnation=7),
            put("p2", "b", "w:2", at=2 * S, term=1, leader="m1", leader_incarnation=8),
        ],
    ),
    "a stopped leader answers a reader": (
        "S7",
        [
            put("p1", "a", at=S, term=2, leader="m2"),
            get("g", at=2 * S, term=1, leader="m1", arm=Arm.BASELINE),
        ],
    ),
    "stored twice": ("S8", [put("p", at=S), put("p", at=2 * S, attempt=2)]),
    "committed twice": (
        "S8",
        [
            put("p", at=S),
            *(Event(t_ns=at, kind="put.committed", key="k", op_id="p", generation=1) for at in (1, 2)),
        ],
    ),
    "refused and read": (
        "S8",
        [
            put("p", at=S, outcome=Outcome.FAIL, reason="REFUSED"),
            get("g", at=2 * S, value="w:1", content=Content.UNCHECKED),
        ],
    ),
    "allocated and not live": ("S9", [quiet(allocated_bytes=10, live_bytes=5)]),
    "a put that never ended": ("S9", [quiet(reservations=1)]),
    "descriptors": ("S9", [BEFORE, quiet(fds=60)]),
    "a memory region": ("S9", [BEFORE, quiet(mrs=5)]),
    "resident memory": ("S9", [BEFORE, quiet(rss_bytes=400 << 20)]),
    "read back in time": (
        "S10",
        [
            put("p", value="w:1", at=S, cls="register"),
            get("g", at=2 * S, value="w:1", cls="register"),
            miss("m", at=3 * S, cls="register"),
        ],
    ),
    "two puts of one key stored": (
        "S10",
        [
            put("p1", value="w:1", at=S, cls="register", reason="STORED"),
            put("p2", value="w:2", at=2 * S, cls="register", reason="STORED"),
        ],
    ),
    "never came back": (
        "L2",
        [get("g", at=S, took=0, deadline_ms=200, outcome=Outcome.INFO), Finish(t_ns=9 * S)],
    ),
    "very late even for a machine without a free CPU": (
        "L2",
        [
            Block(arm=Arm.FAULT, block=0, t_start_ns=0, t_end_ns=9 * S, cpu_stall_share=0.9),
            get("g", at=S, took=4000 * MS, deadline_ms=200),
        ],
    ),
    "late": ("L2", [get("g", at=S, took=300 * MS, deadline_ms=200)]),
    "a request without an answer": ("L2", [request(t_return_ns=0, budget_ms=100), Finish(t_ns=9 * S)]),
    "a loop stands still": (
        "L2",
        [get("g", at=S, deadline_ms=200), Sample(t_ns=S, subject="master-1", loop_gap_ms=900.0)],
    ),
    "breaker never opens": ("C3", [*FAULT, *failing_calls(begin=2 * S, end=7 * S), Finish(t_ns=40 * S)]),
    "open breaker leaks": (
        "C3",
        [*CALM_BREAKER, *failing_calls(begin=3 * S, end=8 * S, reason="STORE_DOWN")],
    ),
    "breaker stays open": ("C3", [*CALM_BREAKER[:-4], breaker_event("opened", 3 * S), Finish(t_ns=40 * S)]),
    "breaker flaps": (
        "C3",
        [
            *FAULT,
            *(row for at in range(3, 9) for row in opened(at * S, at * S + 500 * MS)),
            Finish(t_ns=40 * S),
        ],
    ),
    "whole group's breaker": (
        "C3",
        [
            *CALM_BREAKER,
            breaker_event("opened", 3 * S, domain="group", node=""),
            breaker_event("closed", 9 * S, domain="group", node=""),
        ],
    ),
}

VALID: dict[str, tuple[str, Rows]] = {
    "whole": ("S1", [put("p", digest="aa", at=S), get("g", at=2 * S, value="w:1", digest="aa")]),
    "a put without an answer is read": (
        "S1",
        [put("p", at=S, took=0, outcome=Outcome.INFO, reason="TIMEOUT"), get("g", at=2 * S, value="w:1")],
    ),
    "put again meanwhile": ("S2", removed_then_read(put_took=5 * S)),
    "removal still under way": (
        "S2",
        [
            *removed_then_read()[:2],
            get("g", at=2 * S, value="w:1"),
            get("h", at=4 * S, value="w:2"),
            put("q", value="w:2", at=3 * S),
        ],
    ),
    "undrained": (
        "S2",
        [
            other(Kind.DRAIN, "d", "", at=S, node="n1"),
            other(Kind.UNDRAIN, "u", "", at=2 * S, node="n1"),
            get("g", at=3 * S, node="n1"),
        ],
    ),
    "evicted": (
        "S3",
        [put("p", at=S), Event(t_ns=2 * S, kind="object.evicted", key="k"), miss("g", at=3 * S)],
    ),
    "lost with its store": (
        "S3",
        [
            put("p", at=S, node="store-1"),
            Event(t_ns=2 * S, kind="store.lost", subject="store-1"),
            miss("g", at=3 * S),
        ],
    ),
    "evictions counted": (
        "S3",
        [
            put("p", at=S),
            *(Sample(t_ns=at * S, subject="store-1", evicted_total=at) for at in (1, 2)),
            miss("g", at=3 * S),
        ],
    ),
    "a fault took it": ("S3", [*FAULT, put("p", at=S, node="store-1"), miss("g", at=3 * S)]),
    "inside its lease": ("S4", [LEASED]),
    "its client stood still when its lease ended": (
        "S4",
        [
            msgspec.structs.replace(LEASED, t_return_ns=4 * S),
            Sample(t_ns=4 * S + 500 * MS, subject="c", role="client", stalled_ms=1_500),
        ],
    ),
    "late by as much as its client stood still": (
        "L2",
        [
            get("g", "k", at=S, took=900 * MS, deadline_ms=200, client="c-register"),
            Sample(t_ns=2 * S, subject="c", role="client", stalled_ms=700),
        ],
    ),
    "revalidated": ("S4", [msgspec.structs.replace(LEASED, t_return_ns=4 * S, revalidated=True)]),
    "evicted after the read": (
        "S4",
        [LEASED, Event(t_ns=2 * S + 500 * MS, kind="object.evicted", key="k", node="n", generation=5)],
    ),
    "given away after the lease": ("S4", [HELD, given(3 * S, 4096)]),
    "given away before the lease": ("S4", [HELD, given(S, 4096)]),
    "perhaps given away before the lease": ("S4", [HELD, given(2 * S - MS, 4096, took=2 * MS)]),
    "perhaps given away after the lease": ("S4", [HELD, given(3 * S - MS, 4096, took=2 * MS)]),
    "what lies behind it given away": ("S4", [HELD, given(2 * S + 500 * MS, 8192)]),
    "what lies before it given away": ("S4", [HELD, given(2 * S + 500 * MS, 0)]),
    "the same place of a store started again": (
        "S4",
        [HELD, given(2 * S + 500 * MS, 4096, incarnation=10)],
    ),
    "its last byte came in time": (
        "S4",
        [msgspec.structs.replace(LEASED, ended_ns=3 * S - MS, t_return_ns=3 * S + MS)],
    ),
    "no hole": ("S5", [request(), *served(1, 2)]),
    "a new leader": (
        "S7",
        [put("p1", "a", at=S, term=1, leader="m1"), put("p2", "b", "w:2", at=2 * S, term=2, leader="m2")],
    ),
    "a leader that has raised its own term": (
        "S7",
        [
            put("p1", "a", at=S, term=2, leader="m1", leader_incarnation=7),
            put("p2", "b", "w:2", at=2 * S, term=1, leader="m1", leader_incarnation=7),
        ],
    ),
    "overlapping acknowledgements": (
        "S7",
        [
            put("p1", "a", at=S, took=S, term=2, leader="m2"),
            put("p2", "b", "w:2", at=S, took=2 * S, term=1, leader="m1"),
        ],
    ),
    "stored once": (
        "S8",
        [put("p", at=S, reason="TIMEOUT", outcome=Outcome.INFO), put("p", at=2 * S, attempt=2)],
    ),
    "sums agree": (
        "S9",
        [BEFORE, quiet(allocated_bytes=9, live_bytes=9, used_bytes=9, fds=22, reservations=0)],
    ),
    "has an order": (
        "S10",
        [
            put("p", value="w:1", at=S, took=3 * S, outcome=Outcome.OK, cls="register"),
            miss("m", at=2 * S, cls="register"),
            get("g", at=3 * S, value="w:1", cls="register"),
            other(Kind.REMOVE, "r", at=5 * S, cls="register"),
            miss("n", at=6 * S, cls="register"),
        ],
    ),
    "as seldom late as without a fault": (
        "L2",
        [
            *(
                get(f"late{arm}", at=S, took=300 * MS, deadline_ms=200, arm=arm)
                for arm in (Arm.BASELINE, Arm.FAULT)
            ),
            *(
                get(f"g{number}", at=S, deadline_ms=200, arm=Arm.BASELINE if number % 2 else Arm.FAULT)
                for number in range(3000)
            ),
        ],
    ),
    "in time": ("L2", [get("g", at=S, took=201 * MS, deadline_ms=200)]),
    "the paused one's own loop": (
        "L2",
        [*FAULT, get("g", at=S, deadline_ms=200), Sample(t_ns=8 * S, subject="store-1", loop_gap_ms=6000.0)],
    ),
    "on a machine as slow without a fault": (
        "L2",
        [
            get("g", at=S, took=290 * MS, deadline_ms=200),
            *(
                get(f"q{number}", at=S, took=95 * MS, deadline_ms=200, arm=Arm.BASELINE)
                for number in range(50)
            ),
        ],
    ),
    "opens, holds, closes": ("C3", CALM_BREAKER),
    "goes there no more": (
        "C3",
        [*FAULT, *failing_calls(begin=2 * S, end=2 * S + 700 * MS), Finish(t_ns=40 * S)],
    ),
    "out of sight for a while": (
        "S10",
        [
            *FAULT,
            put("p", value="w:1", at=S, cls="register", node="store-1"),
            miss("m", at=3 * S, cls="register"),
            get("g", at=9 * S, value="w:1", cls="register"),
        ],
    ),
}

UNKNOWN: dict[str, tuple[str, Rows]] = {
    "a request whose client was ended early": (
        "L2",
        [
            request(t_return_ns=0, budget_ms=500, t_intended_ns=8 * S, t_left_ns=8 * S + 100 * MS),
            get("g", at=S),
            Finish(t_ns=20 * S),
        ],
    ),
    "content not checked": ("S1", [get("g", at=S, content=Content.UNCHECKED)]),
    "no removal": ("S2", [get("g", at=S)]),
    "nobody recorded evictions": ("S3", [put("p", at=S), miss("g", at=2 * S)]),
    "rows are missing": (
        "S3",
        [
            put("p", at=S),
            miss("g", at=2 * S),
            Gap(writer="c", rows=3),
            Sample(t_ns=1, subject="s", evicted_total=0),
        ],
    ),
    "no lease": ("S4", [get("g", at=S)]),
    "reads without positions": ("S5", [request()]),
    "no term": ("S7", [put("p", at=S)]),
    "no put": ("S8", [get("g", at=S)]),
    "not seen at rest": ("S9", [BEFORE]),
    "too long to search": (
        "S10",
        [put(f"p{i}", value=f"w:{i}", at=i, took=S, cls="register") for i in range(150)],
    ),
    "nothing after the undo": ("L1", [*FAULT]),
    "still within its deadline": (
        "L2",
        [get("g", at=S, took=0, deadline_ms=200, outcome=Outcome.INFO), Finish(t_ns=S + 100 * MS)],
    ),
    "as late without a fault": (
        "L2",
        [
            get(f"g{number}", at=S, took=400 * MS, deadline_ms=200, arm=arm)
            for number, arm in enumerate((Arm.BASELINE, Arm.FAULT))
        ],
    ),
    "one late call in two thousand": (
        "L2",
        [
            get("late", at=S, took=300 * MS, deadline_ms=200),
            *(
                get(f"g{number}", at=S, deadline_ms=200, arm=Arm.BASELINE if number % 2 else Arm.FAULT)
                for number in range(2000)
            ),
        ],
    ),
    "late on a machine without a free CPU": (
        "L2",
        [
            Block(arm=Arm.FAULT, block=0, t_start_ns=0, t_end_ns=9 * S, cpu_stall_share=0.9),
            get("g", at=S, took=500 * MS, deadline_ms=200),
        ],
    ),
    "no fault": ("C1", [request()]),
    "no calls counted": ("C2", [request()]),
    "no breaker, no fault": ("C3", [get("g", at=S)]),
    "no arm without a cache": ("C4", [request()]),
}


def judged(rows: Rows) -> dict[str, Verdict]:
    run = Run(bounds=Bounds(breaker_scope="store"))
    return {one.checker.id: one.result.verdict for one in run_all(record(*rows, run=run))}


@pytest.mark.parametrize("what", INVALID)
def test_bug_zoo(what: str) -> None:
    """Each bug's history is flagged by its own checker, with a counter-example, and by no other."""
    checker, rows = INVALID[what]
    verdicts = judged(rows)

    assert {name for name, verdict in verdicts.items() if verdict is Verdict.INVALID} == {checker}


@pytest.mark.parametrize("what", VALID)
def test_correct_history(what: str) -> None:
    """What looks like trouble and is none is valid to its checker, and no checker calls it a bug."""
    checker, rows = VALID[what]
    verdicts = judged(rows)

    assert verdicts[checker] is Verdict.VALID
    assert Verdict.INVALID not in verdicts.values()


@pytest.mark.parametrize("what", UNKNOWN)
def test_too_little_to_say(what: str) -> None:
    """A checker that has seen too little says unknown, which is not valid."""
    checker, rows = UNKNOWN[what]

    assert judged(rows)[checker] is Verdict.UNKNOWN


def test_correct_system_passes_every_checker_of_safety() -> None:
    """A history that touches every promise and keeps all of them is valid to S1 to S10."""
    verdicts = judged(clean_operations())

    safety = [one.id for one in CHECKERS.values() if one.safety]
    assert {name: verdicts[name] for name in safety} == dict.fromkeys(safety, Verdict.VALID)


@pytest.mark.parametrize(
    ("checker", "breaks"),
    [
        ("S1", lambda rows: swap(rows, "g1", content=Content.FLIPPED)),
        ("S2", lambda rows: swap(rows, "g3", value="w:1", digest="d1")),
        ("S3", lambda rows: swap(rows, "g3", reason="MISS", value="", content=Content.UNCHECKED)),
        ("S4", lambda rows: swap(rows, "g1", t_return_ns=3 * S + 5)),
        ("S5", lambda rows: swap(rows, "g1", position=1)),
        ("S7", lambda rows: [*rows, put("p4", "c", "w:5", at=8 * S, term=1, leader="m1", group="g1")]),
        ("S8", lambda rows: [*rows, put("p3", "b", "w:3", at=8 * S, attempt=2)]),
        ("S9", lambda rows: [*rows, quiet(allocated_bytes=64, used_bytes=64, live_bytes=0)]),
        ("S10", lambda rows: swap(rows, "q2", value="w:7")),
    ],
)
def test_one_change_breaks_one_promise(checker: str, breaks: Callable[[Rows], Rows]) -> None:
    """In a history that keeps every promise, the one change that breaks a promise is seen by its checker."""
    assert judged(breaks(clean_operations()))[checker] is Verdict.INVALID


def test_broken_checker_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that breaks down hides nothing that the others found."""
    from types import MappingProxyType

    from kvops.chaos.checkers import registry
    from kvops.chaos.checkers.model import Checker, Result

    def broken(record: RunRecord) -> Result:
        raise ZeroDivisionError("of its own")

    checker = Checker(id="S1", name="integrity", title="t", safety=True, run=broken)
    monkeypatch.setattr(registry, "CHECKERS", MappingProxyType({**CHECKERS, "S1": checker}))

    verdicts = {one.checker.id: one.result for one in run_all(record(*INVALID["stored twice"][1]))}

    assert verdicts["S1"].verdict is Verdict.UNKNOWN
    assert "ZeroDivisionError" in verdicts["S1"].summary
    assert verdicts["S8"].verdict is Verdict.INVALID


def test_every_checker_is_in_the_zoo() -> None:
    """No promise is without a history that breaks it: here, or (those about many requests) in test_verdict."""
    assert {checker for checker, _ in INVALID.values()} | {"L1", "C1", "C2", "C4"} == set(CHECKERS)
    assert {checker for checker, _ in UNKNOWN.values()} == set(CHECKERS)


def test_block_rows_are_optional() -> None:
    """A history whose blocks nobody recorded is judged all the same."""
    rows = [row for row in clean_operations() if not isinstance(row, Block)]

    assert Verdict.INVALID not in judged(rows).values()
    assert isinstance(rows[0], Sample | Operation)
