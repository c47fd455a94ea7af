"""A plan says what a run would do, and does none of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvops
from kvops.chaos.experiment import load, parse
from kvops.chaos.plan import make
from kvops.chaos.runner import duration_s
from kvops.chaos.suite import REFUSED, Row, exit_code, select

EXPERIMENTS = Path(kvops.__file__).parents[1] / "playbooks" / "experiments"


def test_a_plan_names_target_undo_and_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is known beforehand: whom it hits, what takes it back, what it costs; nothing is written."""
    monkeypatch.chdir(tmp_path)

    plan = make(load(EXPERIMENTS / "store-pause.yaml"))

    (fault,) = plan.faults
    assert fault.supported
    assert fault.target.startswith("g1/store-")
    assert fault.control.startswith("g1/store-")
    assert fault.control != fault.target
    assert fault.undo == (f"kill -CONT <pid of {fault.target}>",)
    assert str(os.getpid()) not in "".join(fault.undo)
    assert plan.capacity_share == pytest.approx(1 / 3)
    assert not plan.refused
    assert not plan.unsupported
    assert list(tmp_path.iterdir()) == []


def test_a_killed_store_is_undone_by_a_start() -> None:
    """The undo of a kill is the command that starts the member again."""
    plan = make(load(EXPERIMENTS / "store-kill.yaml"))

    assert "kvops restart -g g1" in plan.faults[0].undo[0]


def test_a_plan_says_why_it_cannot_be_run_here() -> None:
    """Three masters need what a local group of this version may not have: that is said, not found out."""
    plan = make(load(EXPERIMENTS / "ssd-node-off.yaml"))

    assert "ssd" in plan.unsupported


def test_a_refused_plan_says_so() -> None:
    """What a run would refuse, a plan refuses for the same reason."""
    plan = make(parse("title: t\ndescription: d\nmethod: []\nkvops: {scope: {mode: all}}\n", source="t"))

    assert plan.refused


def test_the_quick_selection_is_short() -> None:
    """The quick suite is announced with at most eight minutes."""
    entries = select(EXPERIMENTS, quick=True)

    assert sum(entry.seconds for entry in entries) <= 8 * 60
    assert len(entries) >= 8


def test_a_full_run_takes_longer_than_a_quick_one() -> None:
    """What is announced follows from blocks, arms and windows."""
    experiment = load(EXPERIMENTS / "store-pause.yaml")

    assert duration_s(experiment, quick=False) > 5 * duration_s(experiment, quick=True)


def row(verdict: str, code: int = 1) -> Row:
    """One line of a matrix."""
    return Row(path=Path("x.yaml"), title="x", fault="f", verdict=verdict, why="", exit_code=code)


@pytest.mark.parametrize(
    ("verdicts", "allow", "quick", "code"),
    [
        (["PASS", "PASS"], False, False, 0),
        (["PASS", "UNSUPPORTED"], False, False, 14),
        (["PASS", "UNSUPPORTED"], True, False, 0),
        (["UNKNOWN"], False, False, 13),
        (["UNKNOWN"], False, True, 0),
        (["UNKNOWN", "BASELINE_NOT_STEADY"], False, True, 0),
        (["BASELINE_NOT_STEADY"], False, False, 10),
        (["UNKNOWN", "FAIL"], False, True, 1),
        (["FAIL", "DIRTY"], False, False, 4),
        (["NOT_INJECTED", "UNKNOWN"], False, False, 11),
        ([REFUSED], True, True, 1),
    ],
)
def test_a_suite_ends_with_its_gravest_verdict(
    verdicts: list[str], allow: bool, quick: bool, code: int
) -> None:
    """One bad row decides, and only what was asked to be forgiven is."""
    assert exit_code(map(row, verdicts), allow_unsupported=allow, quick=quick) == code
