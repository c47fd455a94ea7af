"""C2: a fault does not multiply the calls that clients make."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict
from kvops.chaos.containment import measure, pairs_of
from kvops.chaos.history import RunRecord
from kvops.chaos.pairing import Pairs, Phase


def amplification(record: RunRecord) -> Result:
    """Calls per request in proportion to the twins', and the share of them that are retries."""
    numbers, pairs = measure(record), pairs_of(record)
    bound = record.run.bounds.amplification
    ratio = numbers.amplification
    if ratio is None:
        return Result(verdict=Verdict.UNKNOWN, summary="no request recorded its calls, or none has a twin")
    checked = int((pairs.phase != Phase.BEFORE).sum())
    if not (pairs.phase == Phase.DURING).any():
        return Result(verdict=Verdict.UNKNOWN, summary="no request while a proven fault was active")
    summary = f"{ratio:.2f} times the calls per request; {bound:g} are allowed"
    again = _retry_share(pairs)
    if again > bound - 1:
        what = f"{100 * again:.1f} % of the calls were retries that the twins did not need"
        return Result(
            verdict=Verdict.INVALID,
            summary=f"{what}; {100 * (bound - 1):.0f} % are allowed",
            checked=checked,
            examples=(CounterExample(what=what),),
            example_count=1,
        )
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


def _retry_share(pairs: Pairs) -> float:
    """Retries per call while the fault was active, beyond the twins'."""
    mask = (pairs.phase == Phase.DURING) & pairs.fault.there & pairs.baseline.there
    calls, usual = float(pairs.fault.rpcs[mask].sum()), float(pairs.baseline.rpcs[mask].sum())
    if not calls or not usual:
        return 0.0
    return float(pairs.fault.retries[mask].sum()) / calls - float(pairs.baseline.retries[mask].sum()) / usual


CHECKER: Final = Checker(
    id="C2", name="amplification", title="A fault does not multiply calls", safety=False, run=amplification
)
