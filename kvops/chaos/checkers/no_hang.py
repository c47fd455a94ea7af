"""L2: everything ends by its deadline, and no serving loop stands still."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvops.chaos.checkers.model import EXAMPLES_MAX, Checker, CounterExample, Result, Verdict
from kvops.chaos.containment import pairs_of
from kvops.chaos.history import Arm, Operation, RunRecord
from kvops.chaos.stalls import Stalls
from kvops.chaos.statistics import rate_bound

LATE_SLACK_MS: Final = 25.0  # a shared machine's scheduler alone makes gaps of several ms
LATE_SLACK_MS_MAX: Final = 100.0  # however restless the machine: beyond this a call is late
QUIET_QUANTILE: Final = 0.999
STALLED_SHARE: Final = (
    0.5  # of the time that something waited for a CPU: from there on lateness is the machine's …
)
USUAL_SHARE_MAX: Final = 0.001  # of the calls without a fault; with more late ones the machine is no measure
GROSS: Final = 3.0  # … unless it is this many times what is allowed
_QUIET: Final = (Arm.BASELINE, Arm.CONTROL)


def no_hang(record: RunRecord) -> Result:
    """
    Calls and requests that never came back, calls past their deadline, and the loops' own gaps.

    What never came back is a counter-example by itself. Lateness is judged against the arms without a fault: no
    larger a share than the machine alone makes late there is the machine's doing; where it may be more, by chance or
    because processes waited for a CPU, nothing can be said.
    """
    bounds = record.run.bounds
    ends = _ends_ns(record)
    last_ns = _last_ns(record)
    examples: list[CounterExample] = []
    hung = 0
    checked = 0
    waiting = 0
    gross = {True: 0, False: 0}
    stalled = max((block.cpu_stall_share for block in record.blocks), default=0.0)
    late: dict[bool, list[CounterExample]] = {True: [], False: []}
    calls = {True: 0, False: 0}
    slack_ms = _slack_ms(record)
    stalls = Stalls(record)
    for op in record.operations:
        if not op.deadline_ms:
            continue
        limit_ms = op.deadline_ms * (1 + bounds.over_deadline_share) + slack_ms
        checked += 1
        quiet = op.arm in _QUIET
        calls[quiet] += 1
        if not op.t_return_ns:
            if ends.get((op.arm, op.block), last_ns) - op.t_invoke_ns > limit_ms * 1e6:
                hung += 1
                examples.append(_example(op, f"never came back, its deadline was {op.deadline_ms:g} ms"))
            else:
                waiting += 1
        elif (took := (op.t_return_ns - op.t_invoke_ns) / 1e6) > limit_ms:
            own_ms = took - stalls.ms(op.client, op.t_invoke_ns, op.t_return_ns)
            if own_ms > limit_ms:
                gross[quiet] += own_ms > GROSS * limit_ms
                late[quiet].append(
                    _example(op, f"took {took:.0f} ms, its deadline was {op.deadline_ms:g} ms")
                )
    for row in record.requests:
        checked += 1
        limit_ms = row.budget_ms * (1 + bounds.over_deadline_share) + slack_ms
        if not row.t_return_ns:
            seen_ns = row.t_given_up_ns or ends.get((row.arm, row.block), last_ns)
            if not row.budget_ms or seen_ns - row.t_intended_ns > limit_ms * 1e6:
                hung += 1
                examples.append(
                    CounterExample(
                        what=f"request {row.request} of {row.client} was never answered",
                        rows=(row.request,),
                        t_ns=row.t_intended_ns,
                    )
                )
            else:
                waiting += 1
        elif row.over_deadline and not calls[row.arm in _QUIET]:  # else its calls were judged one by one
            late[row.arm in _QUIET].append(
                CounterExample(
                    what=f"request {row.request}: {row.over_deadline} pool calls came back late",
                    rows=(row.request,),
                    t_ns=row.t_return_ns,
                )
            )
    gaps = [
        CounterExample(what=f"{one.subject}'s loop stood still for {one.loop_gap_ms:.0f} ms", t_ns=one.t_ns)
        for one in record.samples
        if one.loop_gap_ms is not None
        and one.loop_gap_ms > bounds.loop_gap_ms
        and not _target(record, one.subject, one.t_ns)
    ]
    usual_gaps = [one for one in gaps if _arm_at(record, one.t_ns) in _QUIET]
    noisy = as_usual = ""
    if not hung and (late[False] or gaps):
        # As many in a quiet arm, for its number of calls, are the machine's doing; and a few may be by chance.
        usual = rate_bound(events=len(late[True]), trials=calls[True]) if calls[True] else 0.0
        few = 0 < len(late[True]) <= USUAL_SHARE_MAX * calls[True]
        if late[False] and few and len(late[False]) * calls[True] <= len(late[True]) * calls[False]:
            as_usual = (
                f"{len(late[False]):,} of {calls[False]:,} calls late with the fault, "
                f"{len(late[True]):,} of {calls[True]:,} without: the machine's doing"
            )
        elif late[False] and stalled >= STALLED_SHARE and (gross[True] or not gross[False]):
            noisy = f"{len(late[False]):,} late, while processes waited for a CPU {100 * stalled:.0f} % of the time"
        elif len(late[False]) > usual * calls[False]:
            examples += late[False]
        elif late[False]:
            noisy = (
                f"{late[False][0].what}; {len(late[False]):,} late, no more than may be the machine's doing"
            )
        if gaps and not usual_gaps:
            examples += gaps
        elif gaps and not noisy:
            noisy = "serving loops stood still without the fault, too: the machine is too noisy"
    unpaired = pairs_of(record).unpaired if record.requests else 0
    if examples:
        return Result(
            verdict=Verdict.INVALID,
            summary=f"{len(examples):,} of {checked:,}: {examples[0].what}",
            checked=checked,
            examples=tuple(examples[:EXAMPLES_MAX]),
            example_count=len(examples),
            safety=bool(hung),
        )
    if not checked:
        return Result(verdict=Verdict.UNKNOWN, summary="no call or request with a deadline was recorded")
    if unpaired:
        noisy = noisy or f"{unpaired:,} requests of the baseline were never recorded in the fault arm"
    if waiting:
        noisy = noisy or f"{waiting:,} calls were still within their deadline when the history ends"
    if noisy:
        return Result(
            verdict=Verdict.VALID if record.run.quick and not (unpaired or waiting) else Verdict.UNKNOWN,
            summary=noisy,
            checked=checked,
            not_concluded=(f"lateness: {noisy}",),
        )
    return Result(
        verdict=Verdict.VALID,
        summary=as_usual or f"{checked:,} calls and requests, all back in time",
        checked=checked,
        not_concluded=(f"lateness: {as_usual}",) if as_usual else (),
    )


def _slack_ms(record: RunRecord) -> float:
    """
    What the machine alone adds to a call.

    Without a fault a call takes a millisecond and has no deadline in sight: how long the slowest in a thousand takes
    there is how long this machine keeps a process waiting.
    """
    took = [
        (op.t_return_ns - op.t_invoke_ns) / 1e6
        for op in record.operations
        if op.arm in _QUIET and op.t_return_ns and op.deadline_ms
    ]
    usual = float(np.quantile(took, QUIET_QUANTILE)) if took else 0.0
    return min(max(LATE_SLACK_MS, usual), LATE_SLACK_MS_MAX)


def _ends_ns(record: RunRecord) -> dict[tuple[Arm, int], int]:
    """
    When the load of each stretch was over: clients that a runner ends early, because a guard tripped or a person
    wants it, have requests in hand that nobody let come back.
    """
    return {(one.arm, one.block): one.t_end_ns for one in record.blocks if one.t_end_ns}


def _last_ns(record: RunRecord) -> int:
    ends = [record.end.t_ns] if record.end else []
    for rows in (record.operations, record.requests):
        ends += [max(row.t_return_ns for row in rows)] if rows else []
    return max(ends, default=0)


def _target(record: RunRecord, subject: str, t_ns: int) -> bool:
    """Whether the process is the one that we stopped or slowed ourselves."""
    return any(
        one.target == subject
        and one.t_inject_ns <= t_ns
        and (one.t_end_ns is None or t_ns <= one.t_end_ns + 2_000_000_000)
        for one in record.fault_windows()
    )


def _arm_at(record: RunRecord, t_ns: int) -> Arm | None:
    for block in record.blocks:
        if block.t_start_ns <= t_ns <= (block.t_end_ns or t_ns):
            return block.arm
    return None


def _example(op: Operation, what: str) -> CounterExample:
    return CounterExample(
        what=f"{op.client}'s {op.kind} {op.key} {what}", rows=(op.op_id,), t_ns=op.t_invoke_ns
    )


CHECKER: Final = Checker(
    id="L2", name="no_hang", title="Everything ends by its deadline", safety=False, run=no_hang
)
