"""S2: what was removed, drained or replaced does not come back."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import EventKind, Kind, Operation, Outcome, RunRecord


def no_resurrection(record: RunRecord) -> Result:
    """For each read that hit: the last removal, and the last drain of its store, that had returned before it began."""
    error_ns = record.run.clock_error_ns
    removes: dict[str, list[Operation]] = {}
    drains: dict[str, list[Operation]] = {}
    back: dict[str, list[int]] = {}
    puts: dict[tuple[str, str], list[Operation]] = {}
    for op in record.operations:
        if op.kind is Kind.PUT and op.outcome is not Outcome.FAIL:
            puts.setdefault((op.key, op.value), []).append(op)
        elif op.kind is Kind.UNDRAIN and op.outcome is not Outcome.FAIL:
            back.setdefault(op.node, []).append(op.t_invoke_ns)
        elif op.outcome is Outcome.OK and op.kind is Kind.REMOVE:
            removes.setdefault(op.key, []).append(op)
        elif op.outcome is Outcome.OK and op.kind is Kind.DRAIN:
            drains.setdefault(op.node, []).append(op)
    for event in record.events:
        if event.kind == EventKind.STORE_READY:
            back.setdefault(event.subject, []).append(event.t_ns)
    for rows in (*removes.values(), *drains.values()):
        rows.sort(key=lambda one: one.t_return_ns)

    examples: list[CounterExample] = []
    checked = 0
    for op in record.operations:
        if op.kind is not Kind.GET or op.outcome is not Outcome.OK or op.reason == "MISS":
            continue
        gone = _last(removes.get(op.key, []), op.t_invoke_ns - error_ns)
        if gone is not None and op.value and (op.key, op.value) in puts:
            checked += 1
            # A put that had not ended when the removal began may have come after it.
            if all(
                0 < put.t_return_ns < gone.t_invoke_ns - error_ns and put.outcome is Outcome.OK
                for put in puts[op.key, op.value]
            ):
                examples.append(_example(op, gone, f"version {op.value} of {op.key}, removed"))
        drained = _last(drains.get(op.node, []), op.t_invoke_ns - error_ns) if op.node else None
        if drained is not None:
            checked += 1
            if not any(drained.t_invoke_ns <= at <= op.t_return_ns for at in back.get(op.node, [])):
                examples.append(_example(op, drained, f"{op.key} from {op.node}, drained"))
    return found(
        examples,
        checked=checked,
        good=f"{checked:,} reads after a removal or drain, none of them of the old",
        nothing="no read followed a removal or drain",
    )


def _last(rows: list[Operation], before_ns: int) -> Operation | None:
    place = bisect_left(rows, before_ns, key=lambda one: one.t_return_ns)
    return rows[place - 1] if place else None


def _example(op: Operation, gone: Operation, what: str) -> CounterExample:
    ago = (op.t_invoke_ns - gone.t_return_ns) / 1e6
    return CounterExample(
        what=f"{op.client} read {what} {ago:.1f} ms before the read began",
        rows=(gone.op_id, op.op_id),
        t_ns=op.t_return_ns,
    )


CHECKER: Final = Checker(
    id="S2",
    name="no_resurrection",
    title="What was removed or drained is not read again",
    safety=True,
    run=no_resurrection,
)
