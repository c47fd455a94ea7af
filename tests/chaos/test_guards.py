"""Guards: what trips them, what does not, and that being blind does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvops.chaos import probes, telemetry
from kvops.chaos.client import ClientSpec, now_ns
from kvops.chaos.experiment import Guard
from kvops.chaos.guards import BLIND, GuardThread, Watcher, violated, with_sight
from kvops.chaos.history import Arm, HistoryWriter, Outcome, Request
from kvops.chaos.profiles import Planned
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("guard", "value", "trips"),
    [
        (Guard(probe="success_rate", below=0.9), 0.89, True),
        (Guard(probe="success_rate", below=0.9), 0.9, False),
        (Guard(probe="success_rate", below=0.9), None, False),
        (Guard(probe="telemetry_age", above="5s"), 5.1, True),
        (Guard(probe="telemetry_age", above="5s"), 5.0, False),
    ],
)
def test_limits(guard: Guard, value: float | None, trips: bool) -> None:
    """A limit is passed only beyond it, and a probe that has nothing to say yet passes none."""
    assert (violated(guard, value) is not None) is trips


def test_only_so_many_in_a_row_trip() -> None:
    """One bad look between good ones is no reason to end an experiment."""
    values = iter([0.1, 0.1, 1.0, 0.1, 0.1, 0.1])
    watcher = Watcher(
        [Guard(probe="success_rate", below=0.5, times=3, every=0.0)], {"success_rate": lambda: next(values)}
    )

    said = [watcher.look(now_s=float(second)) for second in range(6)]

    assert said[:5] == [None] * 5
    assert said[5] is not None
    assert "success_rate 0.100 is below 0.5" in said[5]


def test_a_guard_that_breaks_down_trips() -> None:
    """What cannot see must not let an experiment go on."""

    def broken() -> float:
        raise ValueError("no telemetry")

    thread = GuardThread(Watcher([Guard(probe="success_rate", below=0.5)], {"success_rate": broken}))
    thread.start()

    assert thread.trip.wait(WAIT_S)
    thread.stop()
    assert "no telemetry" in thread.why


def test_stopping_ends_the_thread() -> None:
    """An experiment that ends leaves no guard behind."""
    before = set(threading.enumerate())
    thread = GuardThread(Watcher([], {}))
    thread.start()
    thread.stop()

    assert set(threading.enumerate()) <= before


def spec(folder: Path, planned: list[Planned]) -> ClientSpec:
    """A client's words, as far as telemetry needs them."""
    return ClientSpec(
        name="e0",
        group="g1",
        host="host-0",
        arm=Arm.FAULT,
        block=0,
        history=str(folder / "e0.jsonl"),
        plan=planned,
        warmup_s=0,
        duration_s=10,
        seed=1,
        key_prefix="",
        page_bytes=4096,
        l2_pages=0,
        deadline_ms=200,
        budget_ms=400,
        register_rps=0,
    )


def test_a_request_that_was_never_answered_counts_against_success(tmp_path: Path) -> None:
    """Silence is no success: what was due and has no row is missing."""
    planned = [Planned(f"r{i}", 0.02 * i, 0, 512, [i], 0) for i in range(20)]
    one = spec(tmp_path, planned)
    seen = telemetry.Telemetry([one], now_ns() - 1_500_000_000)  # all are due, and none is too old for long
    with HistoryWriter(Path(one.history)) as writer:
        for each in planned[::2]:
            writer.write(
                Request(request=each.request, client="e0", outcome=Outcome.OK, t_intended_ns=1, t_return_ns=2)
            )

    assert seen.success_rate() == 0.5
    assert seen.age_s() < WAIT_S


def answered(request: str) -> Request:
    """A request's row."""
    return Request(request=request, client="e0", outcome=Outcome.OK, t_intended_ns=1, t_return_ns=2)


def test_what_a_client_never_wrote_down_is_counted(tmp_path: Path) -> None:
    """A client whose requests are not all on record is named; one that has written all of its own may be silent."""
    now_s = 0.0
    planned = [Planned(f"r{i}", 0.02 * i, 0, 512, [i], 0) for i in range(20)]
    one = spec(tmp_path, planned)
    seen = telemetry.Telemetry([one], now_ns(), clock=lambda: now_s)
    with HistoryWriter(Path(one.history)) as writer:
        for each in planned[:17]:
            writer.write(answered(each.request))

    assert seen.unrecorded() == ["e0: 3 of 20 requests"]
    assert seen.age_s() == 0
    now_s = 9.0
    Path(one.history).touch()  # as a write that a full disk refuses does
    assert (seen.age_s(), seen.silent) == (9.0, "e0")

    with HistoryWriter(Path(one.history)) as writer:
        for each in planned[17:]:
            writer.write(answered(each.request))

    assert seen.unrecorded() == []
    now_s = 99.0
    assert (seen.age_s(), seen.silent) == (0.0, "")


def test_telemetry_is_always_guarded() -> None:
    """An experiment that names no guard of its telemetry has one; its own is kept."""
    own = [Guard(probe="success_rate", below=0.5), Guard(probe="telemetry_age", above="1s")]

    assert with_sight([]) == [BLIND]
    assert with_sight(own[:1]) == [own[0], BLIND]
    assert with_sight(own) == own


def test_wrong_or_late_is_not_good() -> None:
    """A request is good when it was answered, in its budget, with the right bytes."""
    fine = Request(
        request="r", client="e", outcome=Outcome.OK, t_intended_ns=1, t_return_ns=2, ttft_ms=5, budget_ms=9
    )
    late = Request(
        request="r", client="e", outcome=Outcome.OK, t_intended_ns=1, t_return_ns=2, ttft_ms=10, budget_ms=9
    )
    wrong = Request(
        request="r", client="e", outcome=Outcome.OK, t_intended_ns=1, t_return_ns=2, wrong_bytes=1
    )

    assert [probes.good(one) for one in (fine, late, wrong)] == [True, False, False]
