"""S3: what was stored can be read until something is known to have taken it."""

from __future__ import annotations

from typing import Final

from kvops.chaos.checkers.hidden import Hidden
from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import Event, EventKind, FaultWindow, Kind, Operation, Outcome, RunRecord, Sample

_OF_KEY: Final = (EventKind.EVICTED, EventKind.EXPIRED, EventKind.REUSED)
_OF_STORE: Final = (EventKind.STORE_LOST, EventKind.STORE_DRAINED)
_OF_ALL: Final = (EventKind.OBJECTS_LOST,)
SLACK_NS: Final = 1_100_000_000  # samples are a second apart: an eviction is known by the next one


def visibility(record: RunRecord) -> Result:
    """Every miss of a key that had been stored must be explained: the set of allowed losses."""
    puts: dict[str, list[Operation]] = {}
    removes: dict[str, list[Operation]] = {}
    for op in record.operations:
        if op.kind is Kind.PUT and op.outcome is Outcome.OK and op.reason in ("", "STORED"):
            puts.setdefault(op.key, []).append(op)
        elif op.kind is Kind.REMOVE and op.outcome is not Outcome.FAIL:
            removes.setdefault(op.key, []).append(op)
    losses = [event for event in record.events if event.kind in (*_OF_KEY, *_OF_STORE, *_OF_ALL)]
    evicting = _evicting(record.samples)
    windows = record.fault_windows()
    hidden = Hidden(record)
    blind = not record.complete or not (record.samples or record.events)
    examples: list[CounterExample] = []
    checked = unexplained = 0
    for op in record.operations:
        miss = op.kind in (Kind.GET, Kind.EXISTS) and op.outcome is Outcome.OK and op.reason == "MISS"
        if not miss:
            continue
        before = [
            put
            for put in puts.get(op.key, ())
            if 0 < put.t_return_ns < op.t_invoke_ns - record.run.clock_error_ns
        ]
        if not before:
            continue
        put = max(before, key=lambda one: one.t_return_ns)
        checked += 1
        if _explained(windows, put, op, removes.get(op.key, []), losses, evicting):
            continue
        if hidden.any(put.group, put.node, op.t_invoke_ns, op.t_return_ns or op.t_invoke_ns):
            continue
        unexplained += 1
        if not blind:
            examples.append(
                CounterExample(
                    what=f"{op.client} missed {op.key}, stored {(op.t_invoke_ns - put.t_return_ns) / 1e6:.1f} ms"
                    " before; nothing is known to have taken it",
                    rows=(put.op_id, op.op_id),
                    t_ns=op.t_return_ns,
                )
            )
    hits = sum(1 for op in record.operations if op.kind is Kind.GET and op.reason == "HIT" and op.key in puts)
    why = f"{unexplained:,} misses, and what would explain them was not recorded" if unexplained else ""
    return found(
        examples,
        checked=checked + hits,
        good=f"{hits:,} reads found what was stored; {checked:,} misses, all explained",
        unknown=why,
        nothing="no read of a stored key",
    )


def _evicting(samples: tuple[Sample, ...]) -> list[tuple[int, int]]:
    """When some store evicted or forgot: from the sample before to the sample after."""
    spans = []
    last: dict[str, Sample] = {}
    for sample in samples:
        before = last.get(sample.subject)
        if (
            before is not None
            and sample.evicted_total is not None
            and sample.evicted_total > (before.evicted_total or 0)
        ):
            spans.append((before.t_ns, sample.t_ns))
        last[sample.subject] = sample
    return spans


def _explained(
    windows: list[FaultWindow],
    put: Operation,
    op: Operation,
    removes: list[Operation],
    losses: list[Event],
    evicting: list[tuple[int, int]],
) -> bool:
    begin, end = put.t_invoke_ns, op.t_return_ns or op.t_invoke_ns
    if any(
        one.t_invoke_ns <= end
        and (one.t_return_ns == 0 or one.t_return_ns >= begin or one.outcome is Outcome.INFO)
        for one in removes
    ):
        return True
    if any(first - SLACK_NS <= end and last >= begin for first, last in evicting):
        return True
    for event in losses:
        if not begin <= event.t_ns <= end + SLACK_NS:
            continue
        if event.kind in _OF_ALL:
            return True
        if event.kind in _OF_KEY and event.key in ("", op.key):
            return True
        if event.kind in _OF_STORE and (not put.node or event.subject in ("", put.node)):
            return True
    for window in windows:
        finish = window.t_end_ns
        if window.t_inject_ns > end or (finish is not None and finish < begin):
            continue
        if not put.node or window.target in ("", put.node) or window.host == put.host or not window.host:
            return True
    return False


CHECKER: Final = Checker(
    id="S3",
    name="visibility",
    title="A stored object can be read until a known loss",
    safety=True,
    run=visibility,
)
