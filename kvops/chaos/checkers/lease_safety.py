"""S4: memory is not reused while a reader holds a lease, and nobody reads past one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, found
from kvops.chaos.history import EventKind, Kind, Operation, Outcome, RunRecord
from kvops.chaos.stalls import Stalls

Node = tuple[str, str, int]
"""Group, store and the incarnation of its process: where offsets mean something."""


def lease_safety(record: RunRecord) -> Result:
    """
    Reads that came back well must have ended inside their lease. Evictions, and places given to a put, must lie
    outside of all leases on that memory.
    """
    taken: dict[str, list[tuple[int, str, str, int]]] = {}
    for event in record.events:
        if event.kind in (EventKind.EVICTED, EventKind.REUSED) and event.key:
            taken.setdefault(event.key, []).append((event.t_ns, event.kind, event.node, event.generation))
    error_ns = record.run.clock_error_ns
    stalls = Stalls(record)
    examples: list[CounterExample] = []
    leases: dict[Node, list[Operation]] = {}
    grants: list[Operation] = []
    checked = 0
    for op in record.operations:
        if op.kind is Kind.PUT and op.incarnation and op.answered_ns:
            grants.append(op)
        if op.kind is not Kind.GET or not op.lease_until_ns:
            continue
        checked += 1
        if op.incarnation:
            leases.setdefault(_node(op), []).append(op)
        hit = op.outcome is Outcome.OK and op.reason != "MISS"
        ended_ns = op.ended_ns or op.t_return_ns
        late_ms = (ended_ns - op.lease_until_ns) / 1e6
        # A process that stood still took note of the end that much later than it was: it had read in time.
        stalled_ms = (
            stalls.ms(op.client, op.asked_ns or op.t_invoke_ns, ended_ns) if hit and late_ms > 0 else 0.0
        )
        if hit and late_ms > stalled_ms and not op.revalidated:
            examples.append(
                CounterExample(
                    what=f"{op.client} took {op.key} as read {late_ms:.1f} ms after its lease had ended",
                    rows=(op.op_id,),
                    t_ns=ended_ns,
                )
            )
        begin = op.lease_from_ns or op.t_invoke_ns
        until = min(op.lease_until_ns, op.t_return_ns) if op.t_return_ns else op.lease_until_ns
        for at, kind, node, generation in taken.get(op.key, []):
            same = (not node or not op.node or node == op.node) and (
                not generation or not op.generation or generation == op.generation
            )
            if same and begin + error_ns < at < until - error_ns:
                examples.append(
                    CounterExample(
                        what=f"{kind} of {op.key} {(until - at) / 1e6:.1f} ms before {op.client}'s lease ended",
                        rows=(op.op_id,),
                        t_ns=at,
                    )
                )
    memory = {node: _Leased(rows) for node, rows in leases.items()}
    compared = 0
    for put in grants:
        if (held := memory.get(_node(put))) is None:
            continue
        compared += 1
        reader = held.by(put, error_ns)
        if reader is not None:
            examples.append(
                CounterExample(
                    what=f"{put.node} gave the memory of {reader.key} to {put.key}"
                    f" {(reader.lease_until_ns - put.answered_ns) / 1e6:.1f} ms before {reader.client}'s lease ended",
                    rows=(reader.op_id, put.op_id),
                    t_ns=put.answered_ns,
                )
            )
    return found(
        examples,
        checked=checked,
        good=f"{checked:,} leases, none outlived by its reader or cut short; "
        f"{compared:,} places given to puts, none of leased memory",
        nothing="no read recorded its lease",
    )


def _node(op: Operation) -> Node:
    return op.group, op.node, op.incarnation


class _Leased:
    """The leases on one store's memory, by where they begin: who holds some of it at a time."""

    def __init__(self, rows: Iterable[Operation]) -> None:
        self._rows: dict[tuple[int, int], list[Operation]] = {}  # by offset and extent
        for row in rows:
            self._rows.setdefault((row.offset, row.extent_bytes), []).append(row)
        # Of all leases on a place that had begun by the n-th's begin, the one that ends last.
        self._last: dict[tuple[int, int], list[Operation]] = {}
        for place, held in self._rows.items():
            held.sort(key=_begin)
            last: list[Operation] = []
            for row in held:
                last.append(row if not last or row.lease_until_ns >= last[-1].lease_until_ns else last[-1])
            self._last[place] = last
        self._places = sorted(self._rows)
        self._longest = max(extent for _, extent in self._places)

    def by(self, put: Operation, error_ns: int) -> Operation | None:
        """
        Whoever certainly held a lease on memory of a put when that was given to it: the lease had been answered before
        the put was asked for, and outlasts the answer to it.
        """
        first = bisect_left(self._places, (put.offset - self._longest + 1,))
        for place in self._places[first : bisect_left(self._places, (put.offset + put.extent_bytes,))]:
            if sum(place) <= put.offset:
                continue
            count = bisect_right(self._rows[place], put.asked_ns - error_ns, key=_begin)
            if not count:
                continue
            reader = self._last[place][count - 1]
            if reader.generation != put.generation and reader.lease_until_ns > put.answered_ns + error_ns:
                return reader
        return None


def _begin(op: Operation) -> int:
    return op.lease_from_ns or op.t_invoke_ns


CHECKER: Final = Checker(
    id="S4",
    name="lease",
    title="Leased memory is not reused, and no read outlives its lease",
    safety=True,
    run=lease_safety,
)
