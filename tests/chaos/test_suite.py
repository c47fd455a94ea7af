"""A suite's verdicts: what fails once may be noise, what fails three times is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.chaos.history import End, RunRecord
from kvops.chaos.runner import Ran
from kvops.chaos.suite import Attempt, confirm
from kvops.chaos.verdict import Judgement, RunVerdict, judge
from tests.chaos.histories import get, record


@pytest.fixture(scope="module")
def judged() -> tuple[RunRecord, Judgement]:
    """Any run, to be given another verdict."""
    found = record(get("g", at=1_000_000_000))
    return found, judge(found)


@pytest.mark.parametrize(
    ("verdicts", "safety", "made", "runs"),
    [
        (["PASS"], False, "PASS", 1),
        (["UNKNOWN"], False, "UNKNOWN", 1),
        (["FAIL", "PASS"], False, "UNKNOWN", 2),
        (["FAIL", "FAIL", "UNKNOWN"], False, "UNKNOWN", 3),
        (["FAIL", "FAIL", "FAIL"], False, "FAIL", 3),
        (["FAIL", "DIRTY"], False, "DIRTY", 2),
        (["FAIL"], True, "FAIL", 1),
    ],
)
def test_only_what_fails_again_has_failed(
    judged: tuple[RunRecord, Judgement], verdicts: list[str], safety: bool, made: str, runs: int
) -> None:
    """Three failures in a row are one; a broken promise of safety is one at once; whatever else comes up counts."""
    history, judgement = judged

    def attempts() -> Iterator[Attempt]:
        for number, verdict in enumerate(verdicts):
            said = dataclasses.replace(
                judgement, verdict=RunVerdict(verdict), reasons=(f"run {number}",), safety=safety
            )
            yield Ran(run_id=str(number), folder=Path(), end=End.COMPLETED, why=""), history, said

    left = attempts()
    last, verdict, why, count = confirm(next(left), lambda: next(left), say=lambda step, text: None)

    assert (verdict.value, count) == (made, runs)
    assert last[0].run_id == str(runs - 1)
    assert next(left, None) is None, "and nothing was run in vain"
    assert ("not confirmed" in why) == (runs > 1 and made != "FAIL")
    assert made == "FAIL" or runs == 1 or f"run {runs - 2}" in why
