"""C1: harm stays inside the declared scope, and inside it in proportion to what was taken away."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict, worst
from kvops.chaos.containment import measure, pairs_of, success_bound
from kvops.chaos.history import RunRecord
from kvops.chaos.pairing import Phase


def containment(record: RunRecord) -> Result:
    """S, then K, then requests that failed: nobody may fail one because a cache is gone."""
    numbers, pairs = measure(record), pairs_of(record)
    bounds = record.run.bounds
    during = pairs.phase == Phase.DURING
    if not during.any():
        return Result(verdict=Verdict.UNKNOWN, summary="no request while a proven fault was active")
    examples: list[CounterExample] = []
    open_questions = list(numbers.not_concluded)
    spread_verdict, k_verdict = numbers.spread_verdict, numbers.k_verdict
    spread = numbers.spread or 0.0
    if spread_verdict is Verdict.INVALID and spread <= bounds.spread:
        spread_verdict = Verdict.VALID
    if spread_verdict is Verdict.INVALID:
        examples.append(CounterExample(what=f"S {spread:.2g}: {numbers.spread_why}"))
    if k_verdict is Verdict.INVALID:
        examples.append(CounterExample(what=numbers.k_why))
    met = (
        pairs.phase != Phase.BEFORE
    )  # a request that fails once the fault is gone has failed because of it, too
    failed, trials, bound = success_bound(pairs, met)
    success = Verdict.VALID
    if trials and failed / trials > bounds.success_drop:
        names = tuple(np.array(pairs.request)[met & pairs.fault.failed][:20].tolist())
        # Chance alone does not fail requests: those whose twins failed as well are not counted.
        success = Verdict.INVALID if failed >= 2 and pairs.control.there.any() else Verdict.UNKNOWN
        if success is Verdict.INVALID:
            examples.append(
                CounterExample(
                    what=f"{failed:,} of {trials:,} requests failed, their twins did not", rows=names
                )
            )
    elif bound > bounds.success_drop:
        needed = int(3 / bounds.success_drop)
        open_questions.append(
            f"success: {failed} of {trials:,} failed; "
            f"below {100 * bounds.success_drop:g} % needs {needed:,} clean requests"
        )
        success = Verdict.UNKNOWN
    verdicts = [spread_verdict, k_verdict, success]
    if record.run.quick:
        # A quick run looks for harm; what it cannot conclude it names. A K above its bound stays in doubt.
        doubtful = numbers.k is not None and numbers.k > bounds.containment_ratio
        reasons = [numbers.spread_why, numbers.k_why, ""]
        open_questions += [
            why for one, why in zip(verdicts, reasons, strict=True) if one is Verdict.UNKNOWN and why
        ]
        verdicts = [one for one in verdicts if one is not Verdict.UNKNOWN]
        verdicts += [Verdict.UNKNOWN] if doubtful and k_verdict is Verdict.UNKNOWN else []
    verdict = worst(verdicts)
    k = (
        "K not defined (no capacity lost)"
        if numbers.k is None
        else f"K {numbers.k:.2f} ≤ {bounds.containment_ratio:g}"
    )
    if verdict is Verdict.VALID:
        summary = f"{k}, S {spread:g}; {failed} of {trials:,} requests failed"
    elif examples:
        summary = "; ".join(example.what for example in examples)
    else:
        whys = [(spread_verdict, numbers.spread_why), (k_verdict, numbers.k_why)]
        said = [why for one, why in whys if one is Verdict.UNKNOWN]
        summary = "; ".join(said or open_questions[-1:])
    return Result(
        verdict=verdict,
        summary=summary,
        checked=int(during.sum()),
        examples=tuple(examples),
        example_count=len(examples),
        not_concluded=tuple(dict.fromkeys(open_questions)),
    )


CHECKER: Final = Checker(
    id="C1",
    name="containment",
    title="Harm stays in its scope and in proportion",
    safety=False,
    run=containment,
)
