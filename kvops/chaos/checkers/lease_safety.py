"""S4: memory is not reused while a reader holds a lease, and nobody reads past one."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import EventKind, Kind, Outcome, RunRecord


def lease_safety(record: RunRecord) -> Result:
    """Reads that came back well must have ended inside their lease; evictions must lie outside all of them."""
    taken: dict[str, list[tuple[int, str, str, int]]] = {}
    for event in record.events:
        if event.kind in (EventKind.EVICTED, EventKind.REUSED) and event.key:
            taken.setdefault(event.key, []).append((event.t_ns, event.kind, event.node, event.generation))
    examples: list[CounterExample] = []
    checked = 0
    for op in record.operations:
        if op.kind is not Kind.GET or not op.lease_until_ns:
            continue
        checked += 1
        hit = op.outcome is Outcome.OK and op.reason != "MISS"
        if hit and op.t_return_ns > op.lease_until_ns and not op.revalidated:
            late = (op.t_return_ns - op.lease_until_ns) / 1e6
            examples.append(
                CounterExample(
                    what=f"{op.client} took {op.key} as read {late:.1f} ms after its lease had ended",
                    rows=(op.op_id,),
                    t_ns=op.t_return_ns,
                )
            )
        begin = op.lease_from_ns or op.t_invoke_ns
        until = min(op.lease_until_ns, op.t_return_ns) if op.t_return_ns else op.lease_until_ns
        for at, kind, node, generation in taken.get(op.key, []):
            same = (not node or not op.node or node == op.node) and (
                not generation or not op.generation or generation == op.generation
            )
            if same and begin + record.run.clock_error_ns < at < until - record.run.clock_error_ns:
                examples.append(
                    CounterExample(
                        what=f"{kind} of {op.key} {(until - at) / 1e6:.1f} ms before {op.client}'s lease ended",
                        rows=(op.op_id,),
                        t_ns=at,
                    )
                )
    return found(
        examples,
        checked=checked,
        good=f"{checked:,} leases, none outlived by its reader or cut short",
        nothing="no read recorded its lease",
    )


CHECKER: Final = Checker(
    id="S4",
    name="lease",
    title="Leased memory is not reused, and no read outlives its lease",
    safety=True,
    run=lease_safety,
)
