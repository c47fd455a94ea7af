"""C3: breakers open in time, hold while open, close again, and only around what is broken."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvops.chaos.checkers.model import Checker, CounterExample, Result, Verdict, found
from kvops.chaos.history import Arm, Block, EventKind, FaultWindow, Kind, Operation, RunRecord
from kvops.chaos.stalls import Stalls

ERROR_SHARE: Final = 0.5  # of a client's calls to one store, from which on a breaker must open
ERRORS_MIN: Final = 5
GRACE_NS: Final = 250_000_000  # calls that were under way when it opened
_FAILED: Final = ("TIMEOUT", "STORE_DOWN", "MASTER_DOWN")
_MOVES: Final = (EventKind.BREAKER_OPENED, EventKind.BREAKER_HALF_OPEN, EventKind.BREAKER_CLOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A breaker from its opening to its closing."""

    who: str  # client, or master for the group's
    domain: str  # store, master, group
    node: str
    begin_ns: int
    end_ns: int | None
    t_half_ns: tuple[int, ...]


def openings(record: RunRecord) -> list[Opening]:
    """Every breaker's open stretches, in order; half-open counts as open."""
    found_: list[Opening] = []
    current: dict[tuple[str, str, str], tuple[int, list[int]]] = {}
    for event in record.events:
        if event.kind not in _MOVES:
            continue
        key = (event.subject, event.domain, event.node)
        if event.kind == EventKind.BREAKER_OPENED:
            current.setdefault(key, (event.t_ns, []))
        elif key in current and event.kind == EventKind.BREAKER_HALF_OPEN:
            current[key][1].append(event.t_ns)
        elif key in current:
            begin, half = current.pop(key)
            found_.append(_opening(key, begin, event.t_ns, half))
    found_ += [_opening(key, begin, None, half) for key, (begin, half) in current.items()]
    return sorted(found_, key=lambda one: one.begin_ns)


def _opening(key: tuple[str, str, str], begin: int, end: int | None, half: list[int]) -> Opening:
    return Opening(who=key[0], domain=key[1], node=key[2], begin_ns=begin, end_ns=end, t_half_ns=tuple(half))


def breakers(record: RunRecord) -> Result:
    """An automaton over breaker events, beside the calls that were made meanwhile."""
    opened = openings(record)
    windows = [one for one in record.fault_windows() if one.t_active_ns is not None]
    if not windows and not opened:
        return Result(verdict=Verdict.UNKNOWN, summary="no proven fault and no breaker event was recorded")
    examples: list[CounterExample] = []
    usual = ""
    for kind in (
        _too_wide(record, opened),
        _too_late(record, opened, windows),
        _leaky(record, opened),
        _stuck(record, opened, windows),
        _flapping(record, opened),
    ):
        some = list(kind)
        # What breakers do without any fault is not this fault's doing; the same beside it then proves nothing.
        if quiet := [one for one in some if _quiet(record, one.t_ns)]:
            usual = f"without a fault, too: {quiet[0].what}"
        else:
            examples += some
    if usual and not examples:
        return Result(
            verdict=Verdict.UNKNOWN,
            summary=usual,
            checked=len(opened),
            not_concluded=(f"breakers: {usual}",),
        )
    judged = len(opened) + sum(1 for _ in _failing(record, windows))
    return found(
        examples,
        checked=judged,
        good=f"{len(opened)} openings, in time, tight, and closed again",
        unknown="" if record.complete else "rows are missing",
        nothing="no breaker opened, and no client saw enough errors that one should have",
        safety=False,
    )


def _stretch(record: RunRecord, t_ns: int) -> Block | None:
    """The stretch of load that ran at a time."""
    return next(
        (one for one in record.blocks if one.t_start_ns <= t_ns <= (one.t_end_ns or t_ns)),
        None,
    )


def _quiet(record: RunRecord, t_ns: int) -> bool:
    """Whether an arm without a fault ran at a time."""
    found_ = _stretch(record, t_ns)
    return found_ is not None and found_.arm in (Arm.BASELINE, Arm.CONTROL)


def _too_wide(record: RunRecord, opened: list[Opening]) -> Iterator[CounterExample]:
    if record.run.bounds.breaker_scope != "store":
        return
    for one in opened:
        if one.domain == "group":
            target = record.run.target or "one store"
            yield CounterExample(
                what=f"the whole group's breaker opened at {one.who}, for a fault of {target}",
                t_ns=one.begin_ns,
            )


def _failing(record: RunRecord, windows: list[FaultWindow]) -> Iterator[tuple[str, str, int, FaultWindow]]:
    """Clients with mostly failing calls to one store while a fault was active: who, which, since when."""
    for window in windows:
        begin, end = window.t_inject_ns, window.t_end_ns
        calls: dict[tuple[str, str], tuple[int, int]] = {}
        told: set[tuple[str, str]] = set()
        for op in record.operations:
            if (
                not op.node
                or op.kind not in (Kind.GET, Kind.PUT)
                or op.t_invoke_ns < begin
                or (end and op.t_invoke_ns > end)
            ):
                continue
            key = (op.client, op.node)
            bad, total = calls.get(key, (0, 0))
            bad, total = bad + (op.reason in _FAILED), total + 1
            calls[key] = bad, total
            if key not in told and bad >= ERRORS_MIN and bad > ERROR_SHARE * total:
                told.add(key)
                yield op.client, op.node, op.t_return_ns or op.t_invoke_ns, window


def _too_late(
    record: RunRecord, opened: list[Opening], windows: list[FaultWindow]
) -> Iterator[CounterExample]:
    allowed_ns = int(record.run.bounds.t_open_s * 1e9)
    for client, node, since_ns, window in _failing(record, windows):
        until_ns = since_ns + allowed_ns
        if window.t_end_ns is not None and window.t_end_ns < until_ns:
            continue  # it was over before a breaker had to open
        if not _goes_on(record, client, node, until_ns, window):
            continue  # it went there no more, for whatever reason: that is all a breaker is for
        if not any(
            one.begin_ns <= until_ns
            and (one.end_ns is None or one.end_ns >= since_ns)
            and (one.node == node or one.domain in ("master", "group"))
            and (one.who == client or one.domain == "group")
            for one in opened
        ):
            yield CounterExample(
                what=f"{client} kept failing at {node}; no breaker opened within {record.run.bounds.t_open_s:g} s",
                t_ns=since_ns,
            )


def _goes_on(record: RunRecord, client: str, node: str, from_ns: int, window: FaultWindow) -> bool:
    """Whether the client went on failing at that store, more often than probes explain."""
    end_ns = (
        window.t_end_ns if window.t_end_ns is not None else max(op.t_invoke_ns for op in record.operations)
    )
    failed = sum(
        1
        for op in record.operations
        if from_ns < op.t_invoke_ns <= end_ns
        and (op.client, op.node) == (client, node)
        and op.reason in _FAILED
    )
    return failed > record.run.bounds.probes_per_s * max(0.0, (end_ns - from_ns) / 1e9) + 1


def _leaky(record: RunRecord, opened: list[Opening]) -> Iterator[CounterExample]:
    bounds = record.run.bounds
    end_of_all = max((op.t_return_ns for op in record.operations), default=0)
    calls: dict[str, list[Operation]] = {}
    stalls = Stalls(record)
    for op in record.operations:
        if op.node and op.reason != "BREAKER_OPEN":
            calls.setdefault(op.client, []).append(op)
    for one in opened:
        if one.domain == "master":
            continue
        until = one.end_ns or end_of_all
        begin = one.begin_ns + GRACE_NS
        # Breakers are looked at from outside: a process that stood still has shown its own that much later.
        begin += int(stalls.ms(one.who, one.begin_ns - GRACE_NS, begin) * 1e6)
        # The group's breaker is the master's: it stands before every client's calls.
        whose = calls if one.domain == "group" and one.who not in calls else (one.who,)
        through = [
            op
            for client in whose
            for op in _between(calls.get(client, []), begin, until)
            if not one.node or op.node == one.node
        ]
        seconds = max(0.0, (until - begin) / 1e9)
        allowed = bounds.probes_per_s * seconds + bounds.half_open_probes * (1 + len(one.t_half_ns))
        if len(through) > allowed:
            yield CounterExample(
                what=f"{len(through)} calls of {one.who} went to {one.node or 'the pool'} through an open breaker"
                f" in {seconds:.1f} s; {allowed:.0f} probes are allowed",
                rows=tuple(op.op_id for op in through[:10]),
                t_ns=one.begin_ns,
            )


def _between(rows: list[Operation], begin_ns: int, end_ns: int) -> list[Operation]:
    """Those begun strictly between; ``rows`` are in the order of their beginning."""
    first = bisect_right(rows, begin_ns, key=lambda one: one.t_invoke_ns)
    return rows[first : bisect_left(rows, end_ns, key=lambda one: one.t_invoke_ns)]


def _stuck(record: RunRecord, opened: list[Opening], windows: list[FaultWindow]) -> Iterator[CounterExample]:
    # Only what was proven gone counts: a breaker may well stay open around a store that did not come back.
    if any(window.t_clean_ns is None for window in windows):
        return
    allowed_ns = int(record.run.bounds.t_close_s * 1e9)
    seen_until = max(
        [record.end.t_ns if record.end else 0, *(event.t_ns for event in record.events[-1:])], default=0
    )
    for one in opened:
        gone = [w.t_clean_ns for w in windows if w.t_inject_ns <= one.begin_ns and w.t_clean_ns is not None]
        if not gone:
            continue
        by_ns = max(max(gone), one.begin_ns) + allowed_ns
        again = any(w.t_inject_ns <= by_ns and w.t_inject_ns > max(gone) for w in windows)
        if again or by_ns > seen_until:
            continue  # the next fault came first, or nobody looked on for as long
        if one.end_ns is None or one.end_ns > by_ns:
            yield CounterExample(
                what=f"{one.who}'s breaker of {one.node or one.domain} was still open"
                f" {record.run.bounds.t_close_s:g} s after the undo",
                t_ns=one.begin_ns,
            )


def _flapping(record: RunRecord, opened: list[Opening]) -> Iterator[CounterExample]:
    """
    Breakers that opened too often within a minute of one stretch of load, whose clients are processes of their own,
    and more often than any did in a stretch without a fault.
    """
    minute_ns = 60_000_000_000
    times: dict[tuple[str, str, str, int], list[int]] = {}
    quiet: set[int] = set()
    for one in opened:
        block = _stretch(record, one.begin_ns)
        place = -1 if block is None else block.t_start_ns
        if block is not None and block.arm in (Arm.BASELINE, Arm.CONTROL):
            quiet.add(place)
        times.setdefault((one.who, one.domain, one.node, place), []).append(one.begin_ns)
    most = {
        key: max(
            (bisect_left(begins, begin + minute_ns) - number, -begin) for number, begin in enumerate(begins)
        )
        for key, begins in times.items()
    }
    usual = max((count for (*_, place), (count, _) in most.items() if place in quiet), default=0)
    allowed = max(record.run.bounds.flaps_per_minute, float(usual))
    for (who, domain, node, place), (count, begin) in most.items():
        if count > (record.run.bounds.flaps_per_minute if place in quiet else allowed):
            yield CounterExample(
                what=f"{who}'s breaker of {node or domain} opened {count} times within a minute", t_ns=-begin
            )


CHECKER: Final = Checker(
    id="C3",
    name="breaker",
    title="Breakers open in time, hold, close, and stay local",
    safety=False,
    run=breakers,
)
