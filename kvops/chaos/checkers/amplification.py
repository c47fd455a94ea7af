"""C2: a fault does not multiply the calls that clients make."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict
from kvops.chaos.containment import measure, pairs_of
from kvops.chaos.history import RunRecord
from kvops.chaos.pairing import Phase


def amplification(record: RunRecord) -> Result:
    """Calls per request from the injection on, in proportion to the twins'."""
    numbers, pairs = measure(record), pairs_of(record)
    bound = record.run.bounds.amplification
    ratio = numbers.amplification
    if ratio is None:
        return Result(verdict=Verdict.UNKNOWN, summary="no request recorded its calls, or none has a twin")
    checked = int((pairs.phase != Phase.BEFORE).sum())
    if not (pairs.phase == Phase.DURING).any():
        return Result(verdict=Verdict.UNKNOWN, summary="no request while a proven fault was active")
    summary = f"{ratio:.2f} times the calls per request; {bound:g} are allowed"
    if ratio <= bound:
        return Result(verdict=Verdict.VALID, summary=summary, checked=checked)
    noise = numbers.amplification_noise
    if noise is None or ratio - 1 <= (bound - 1) + noise:
        return Result(verdict=Verdict.UNKNOWN, summary=f"{summary}, within noise", checked=checked)
    return Result(
        verdict=Verdict.INVALID,
        summary=summary,
        checked=checked,
        examples=(CounterExample(what=summary),),
        example_count=1,
    )


CHECKER: Final = Checker(
    id="C2", name="amplification", title="A fault does not multiply calls", safety=False, run=amplification
)
