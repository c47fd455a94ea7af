"""The verdict of a run, from what its history proves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.checkers.registry import Judged, run_all
from kvops.chaos.containment import Containment, measure, pairs_of
from kvops.chaos.history import Arm, End, RunRecord
from kvops.chaos.pairing import Phase

STEADY_FAILED_SHARE_MAX: Final = 0.01  # of requests without a fault; above it nothing was steady


class RunVerdict(StrEnum):
    """How a run is judged; the exit codes are those of every kvops command."""

    PASS = "PASS"  # noqa: S105 (a verdict, not a password)
    FAIL = "FAIL"
    DIRTY = "DIRTY"
    BASELINE_NOT_STEADY = "BASELINE_NOT_STEADY"
    NOT_INJECTED = "NOT_INJECTED"
    ABORTED = "ABORTED"
    UNKNOWN = "UNKNOWN"
    UNSUPPORTED = "UNSUPPORTED"
    INTERRUPTED = "INTERRUPTED"


EXIT_CODES: Final = {
    RunVerdict.PASS: 0,
    RunVerdict.FAIL: 1,
    RunVerdict.DIRTY: 4,
    RunVerdict.BASELINE_NOT_STEADY: 10,
    RunVerdict.NOT_INJECTED: 11,
    RunVerdict.ABORTED: 12,
    RunVerdict.UNKNOWN: 13,
    RunVerdict.UNSUPPORTED: 14,
    RunVerdict.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A run's verdict with everything it rests on."""

    verdict: RunVerdict
    reasons: tuple[str, ...]  # the first is why it is this verdict
    also: tuple[RunVerdict, ...]  # what else applied, and was outweighed
    injected: bool  # every block of the fault arm has a fault proven active from outside
    undone: bool  # every undo proven
    left: tuple[str, ...]  # commands for a person
    containment: Containment
    checkers: tuple[Judged, ...]
    not_concluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    safety: bool = field(default=False)  # a promise was broken that no noise explains

    @property
    def exit_code(self) -> int:
        """Of the command that prints it."""
        return EXIT_CODES[self.verdict]


def judge(record: RunRecord, *, checkers: Iterable[str] = ()) -> Judgement:
    """
    Judge a run.

    Several verdicts may apply; the earlier outweighs the later: DIRTY, FAIL of a safety promise, INTERRUPTED,
    ABORTED, UNSUPPORTED, NOT_INJECTED, BASELINE_NOT_STEADY, FAIL of containment or recovery, UNKNOWN. PASS is what is
    left, and needs a fault that was proven active in each block of the fault arm.

    Raises:
        UsageError: There is no such checker.
    """
    judged = tuple(run_all(record, checkers))
    counted = [one for one in judged if one.counts]
    invalid = [one for one in counted if one.result.verdict is Verdict.INVALID]
    broken = [one for one in invalid if one.result.safety]
    numbers = measure(record)
    injected, why_not = _injected(record)
    undone, left, why_dirty = _undone(record)
    end = record.end.end if record.end else None
    why_end = record.end.why if record.end else ""

    applies: list[tuple[RunVerdict, str]] = []
    if not undone:
        applies.append((RunVerdict.DIRTY, why_dirty))
    applies += [(RunVerdict.FAIL, _said(one)) for one in broken]
    if end is End.INTERRUPTED:
        applies.append((RunVerdict.INTERRUPTED, why_end or "interrupted, and undone"))
    if end is End.ABORTED:
        applies.append((RunVerdict.ABORTED, why_end or "stopped by a guard"))
    if end is End.UNSUPPORTED:
        applies.append((RunVerdict.UNSUPPORTED, why_end or "the fault cannot be made here"))
    if not injected:
        applies.append((RunVerdict.NOT_INJECTED, why_not))
    unsteady = why_end or "not steady before the fault" if end is End.NOT_STEADY else _unsteady(record)
    if unsteady:
        applies.append((RunVerdict.BASELINE_NOT_STEADY, unsteady))
    applies += [(RunVerdict.FAIL, _said(one)) for one in invalid if one not in broken]
    applies += [(RunVerdict.UNKNOWN, why) for why in _unknown(record, counted)]
    if end is End.NOT_STEADY and injected is False:
        # Nothing was injected on purpose: the reason is the baseline, not the injector.
        applies = [one for one in applies if one[0] is not RunVerdict.NOT_INJECTED]
    verdict = applies[0][0] if applies else RunVerdict.PASS
    assert verdict is not RunVerdict.PASS or (injected and undone), "a PASS without proof"
    return Judgement(
        verdict=verdict,
        reasons=tuple(why for one, why in applies if one is verdict) or (_passed(numbers),),
        also=tuple(dict.fromkeys(one for one, _ in applies if one is not verdict)),
        injected=injected,
        undone=undone,
        left=left,
        containment=numbers,
        checkers=judged,
        not_concluded=tuple(
            dict.fromkeys(
                [*numbers.not_concluded, *(why for one in judged for why in one.result.not_concluded)]
            )
        ),
        notes=_notes(record),
        safety=bool(broken),
    )


def _said(one: Judged) -> str:
    return f"{one.checker.id} {one.checker.name}: {one.result.summary}"


def _passed(numbers: Containment) -> str:
    k = "no capacity lost" if numbers.k is None else f"K {numbers.k:.2f}"
    doubt = " (not concluded)" if numbers.spread_verdict is Verdict.UNKNOWN else ""
    return f"{k}, S {numbers.spread or 0:g}{doubt}"


def _injected(record: RunRecord) -> tuple[bool, str]:
    """Whether every block of the fault arm has a proven fault, and requests that met it."""
    windows = record.fault_windows()
    unproven = [one for one in windows if one.t_active_ns is None or not one.proof]
    if unproven:
        one = unproven[0]
        why = one.why or ("its proof names no signal" if one.t_active_ns else "it was never proven active")
        return False, f"{one.fault} {one.target} in block {one.block}: {why}"
    if not windows:
        return False, "no fault was injected"
    have = {one.block for one in windows}
    bare = sorted({row.block for row in record.blocks if row.arm is Arm.FAULT and not row.invalid} - have)
    if bare:
        return False, f"block {bare[0]} of the fault arm has no proven fault"
    return True, ""


def _undone(record: RunRecord) -> tuple[bool, tuple[str, ...], str]:
    windows = record.fault_windows()
    open_ones = [one for one in windows if one.dirty or one.t_clean_ns is None]
    left = [line for one in open_ones for line in one.undo_commands]
    if record.end and (record.end.left or not record.end.undone):
        left += record.end.left
        return False, tuple(dict.fromkeys(left)), record.end.why or "an undo was not verified"
    if open_ones:
        one = open_ones[0]
        return False, tuple(dict.fromkeys(left)), f"{one.fault} {one.target}: its undo was not verified"
    return True, (), ""


def _unsteady(record: RunRecord) -> str:
    failing = [step for step in record.steps if step.name == "baseline" and not step.ok]
    if failing:
        return failing[0].text or "not steady before the fault"
    pairs = pairs_of(record)
    both = pairs.baseline.there & pairs.control.there
    count = int(both.sum())
    if count:
        failed = int((pairs.baseline.failed & both).sum()), int((pairs.control.failed & both).sum())
        if min(failed) > STEADY_FAILED_SHARE_MAX * count:
            return f"without a fault {min(failed):,} of {count:,} requests failed"
    return ""


def _unknown(record: RunRecord, counted: list[Judged]) -> list[str]:
    why = [_said(one) for one in counted if one.result.verdict is Verdict.UNKNOWN]
    if record.end is None:
        why.append("the runner never finished its history")
    if record.gaps:
        why.append(_gaps(record))
    pairs = pairs_of(record)
    if not (pairs.phase == Phase.DURING).any():
        why.append("no request met the fault")
    return why


def _gaps(record: RunRecord) -> str:
    """What was not written; nobody may conclude anything from its absence."""
    counts = [gap.rows for gap in record.gaps]
    rows = f"{sum(counts):,} rows" if all(counts) else "rows"
    return f"{rows} could not be written: {record.gaps[0].why or 'the disk took none'}"


def _notes(record: RunRecord) -> tuple[str, ...]:
    notes = list(pairs_of(record).invalid_blocks)
    if record.run.simulated:
        notes.append("backend: simulated")
    if record.run.quick:
        notes.append("a quick run: it looks for harm, and proves little")
    if record.gaps:
        notes.append(_gaps(record))
    if record.bad_line_count:
        notes.append(f"{record.bad_line_count:,} damaged lines, such as {record.bad_lines[0]}")
    return tuple(notes)
