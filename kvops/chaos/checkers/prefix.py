"""S5: a reported hit of k blocks means that the first k blocks were all served."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import Arm, Kind, Outcome, RunRecord


def prefix_closure(record: RunRecord) -> Result:
    """For each request: its reads by position; a failed block cuts the hit there and never leaves a hole."""
    served: dict[tuple[Arm, int, str], set[int]] = {}
    for op in record.operations:
        if op.kind is Kind.GET and op.request and op.position >= 0:
            good = served.setdefault((op.arm, op.block, op.request), set())
            if op.outcome is Outcome.OK and op.reason != "MISS":
                good.add(op.position)
    examples: list[CounterExample] = []
    checked = silent = 0
    for row in record.requests:
        if row.outcome is not Outcome.OK or not row.hit_blocks:
            continue
        if row.hit_blocks > row.blocks > 0:
            examples.append(
                _example(row.request, f"{row.hit_blocks} hits of {row.blocks} blocks", row.t_return_ns)
            )
            continue
        needed = range(row.local_blocks, row.hit_blocks)
        places = served.get((row.arm, row.block, row.request))
        if places is None:
            silent += bool(needed)
            checked += not needed
            continue
        checked += 1
        missing = [place for place in needed if place not in places]
        if missing:
            examples.append(
                _example(
                    row.request,
                    f"{row.hit_blocks} blocks reported as hits, block {missing[0]} was not served",
                    row.t_return_ns,
                )
            )
    return found(
        examples,
        checked=checked,
        good=f"{checked:,} requests with hits, none with a hole",
        unknown=f"{silent:,} requests did not record their reads by position" if silent else "",
        nothing="no request recorded its reads by position",
    )


def _example(request: str, what: str, t_ns: int) -> CounterExample:
    return CounterExample(what=f"request {request}: {what}", rows=(request,), t_ns=t_ns)


CHECKER: Final = Checker(
    id="S5", name="prefix_closure", title="A hit of k blocks has no hole", safety=True, run=prefix_closure
)
