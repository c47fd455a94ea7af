"""L1: once the fault is gone, everything is as before within its time, and stays so."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict
from kvops.chaos.containment import measure
from kvops.chaos.history import RunRecord


def recovery(record: RunRecord) -> Result:
    """Failures, lateness and time to first token back in the band of the arms without a fault; then the hits."""
    bounds = record.run.bounds
    numbers = measure(record)
    after = [point for point in numbers.timeline if point.t_s >= 0]
    if not record.fault_windows() or not numbers.timeline:
        return Result(verdict=Verdict.UNKNOWN, summary="nothing was recorded after the undo")
    if numbers.observed_after_s <= 0 or not after:
        why = "recovery: the load ended before the undo, or within a second of it"
        # A quick run says so and goes on; a whole one that cannot speak of recovery has not passed.
        checked = 0 if record.run.quick else 1
        return Result(verdict=Verdict.UNKNOWN, summary=why, checked=checked, not_concluded=(why,))
    checked = int(numbers.observed_after_s)
    if numbers.t_recover_s is None and numbers.observed_after_s < bounds.stay_s + 1 and record.run.quick:
        why = f"recovery: looked on for {numbers.observed_after_s:.0f} s after the undo, {bounds.stay_s:g} s are needed"
        return Result(verdict=Verdict.UNKNOWN, summary=why, not_concluded=(why,))
    took, warm = numbers.t_recover_s, numbers.t_rewarm_s
    if took is None or took > bounds.t_recover_s:
        if took is None and numbers.observed_after_s < bounds.t_recover_s + bounds.stay_s:
            return Result(
                verdict=Verdict.UNKNOWN,
                summary=f"not recovered in {numbers.observed_after_s:.0f} s after the undo, and no longer looked on",
                checked=checked,
            )
        what = "never recovered" if took is None else f"recovered after {took:.0f} s"
        return _late(f"{what} after the undo; {bounds.t_recover_s:g} s are allowed", checked)
    if warm is not None and warm > bounds.t_rewarm_s:
        return _late(f"hits were back after {warm:.0f} s; {bounds.t_rewarm_s:g} s are allowed", checked)
    if warm is None:
        if numbers.observed_after_s >= bounds.t_rewarm_s + bounds.stay_s:
            return _late(f"hits were not back {numbers.observed_after_s:.0f} s after the undo", checked)
        return Result(
            verdict=Verdict.VALID if record.run.quick else Verdict.UNKNOWN,
            summary=f"recovered after {took:.0f} s; hits not yet back {numbers.observed_after_s:.0f} s after the undo",
            checked=checked,
            not_concluded=(f"rewarming takes longer than was looked on ({numbers.observed_after_s:.0f} s)",),
        )
    return Result(
        verdict=Verdict.VALID,
        summary=f"recovered after {took:.0f} s, warm again after {warm:.0f} s",
        checked=max(1, checked),
    )


def _late(what: str, checked: int) -> Result:
    return Result(
        verdict=Verdict.INVALID,
        summary=what,
        checked=checked,
        examples=(CounterExample(what=what),),
        example_count=1,
    )


CHECKER: Final = Checker(
    id="L1",
    name="recovery",
    title="After the undo everything is as before, in time",
    safety=False,
    run=recovery,
)
