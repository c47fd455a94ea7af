"""A suite: what counts as a failure of a short run, and what counts as left behind."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

import msgspec
import pytest

from kvops.chaos.history import End
from kvops.chaos.ledger import Book
from kvops.chaos.model import State
from kvops.chaos.picture import Scope
from kvops.chaos.runner import Ran
from kvops.chaos.suite import confirmed, leftovers
from kvops.chaos.verdict import Judgement, RunVerdict, judge
from tests.chaos.histories import record

FAIL, PASS, UNKNOWN = RunVerdict.FAIL, RunVerdict.PASS, RunVerdict.UNKNOWN
NOTHING = judge(record())


@pytest.mark.parametrize(
    ("verdicts", "safety", "quick", "runs", "ends"),
    [
        ([PASS], False, True, 1, PASS),
        ([UNKNOWN], False, True, 1, UNKNOWN),
        ([FAIL, PASS], False, True, 2, PASS),
        ([FAIL, FAIL, FAIL], False, True, 3, FAIL),
        ([FAIL, FAIL, UNKNOWN], False, True, 3, UNKNOWN),
        ([FAIL], True, True, 1, FAIL),
        ([FAIL], False, False, 1, FAIL),
    ],
    ids=["pass", "unknown", "noise", "three agree", "two and noise", "a broken promise", "a whole run"],
)
def test_a_short_run_fails_when_three_agree(
    verdicts: list[RunVerdict], safety: bool, quick: bool, runs: int, ends: RunVerdict
) -> None:
    """Numbers of one short run prove nothing; one broken promise of safety does, and so does a whole run."""
    left = list(verdicts)
    said: list[str] = []

    def attempt() -> tuple[Ran, Judgement]:
        judged = dataclasses.replace(NOTHING, verdict=left.pop(0), safety=safety, reasons=("K 2 > 1.2",))
        return Ran(run_id="r", folder=Path("r"), end=End.COMPLETED, why=""), judged

    _, judged, note = confirmed(attempt, quick=quick, say=lambda step, text: said.append(step))

    assert judged.verdict is ends
    assert left == []
    assert said == ["again"] * (runs - 1)
    assert ("K 2 > 1.2" in note) == (runs > 1)


def test_what_is_left_is_found_by_its_token(tmp_path: Path) -> None:
    """A file of an experiment that ended well is a leftover all the same, but not one of an experiment before."""
    token = f"kvops_{secrets.token_hex(6)}"
    book = Book(tmp_path)
    experiment = book.create("one")
    scope = msgspec.to_builtins(Scope(tokens=[token]))
    experiment.append(State.JOURNALLED, by="runner", facts={"scope": scope})
    experiment.append(State.CLEAN, by="runner")
    file = Path("/dev/shm") / f"{token}.json"

    clean = leftovers(tmp_path, set())
    file.write_text("left")
    try:
        found, before = leftovers(tmp_path, set()), leftovers(tmp_path, {"one"})
    finally:
        file.unlink()

    assert clean == before == []
    assert len(found) == 1
    assert str(file) in found[0]
