"""A judged run as a person reads it at night."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from kvops.chaos.checkers.model import Verdict
from kvops.chaos.history import FaultState, RunRecord
from kvops.chaos.report.document import (
    again,
    arm_figures,
    joined,
    over_deadline,
    shortened,
    start_ns,
    utc,
    wrong_bytes,
)
from kvops.chaos.verdict import Judgement, RunVerdict

MARKS: Final = {Verdict.VALID: "✓", Verdict.UNKNOWN: "?", Verdict.INVALID: "✗"}
_PROVEN: Final = {
    FaultState.INJECTING: "inject",
    FaultState.ACTIVE: "active",
    FaultState.NOT_ACTIVE: "active",
    FaultState.UNDOING: "undo",
    FaultState.CLEAN: "clean",
    FaultState.DIRTY: "clean",
}


def render(record: RunRecord, judgement: Judgement, *, verbose: bool = False) -> str:
    """The run in about twenty lines; ``verbose`` lists checkers that had nothing to look at, and all examples."""
    lines = [_head(record), *_arms(record), *_faults(record), *_after(judgement)]
    lines += _checkers(judgement, verbose=verbose)
    lines += [f"not concluded  {text}" for text in judgement.not_concluded]
    lines += [f"note     {text}" for text in judgement.notes]
    lines += _verdict(record, judgement)
    return "\n".join(lines)


def _head(record: RunRecord) -> str:
    run, scope = record.run, record.run.scope
    parts = [f"seed {run.seed}", run.environment or run.group]
    parts.append(" ".join(word for word in (run.fault, run.target) if word) or run.title)
    if scope.capacity_share:
        parts.append(f"{100 * scope.capacity_share:.1f} % of the capacity")
    if run.without:
        parts.append(f"without {', '.join(run.without)}")
    return "  ".join(part for part in parts if part)


def _arms(record: RunRecord) -> list[str]:
    lines = []
    for name, one in arm_figures(record).items():
        words = [f"success {100 * (one['success'] or 0):.4g} %"]
        if one["ttft_p50_ms"] is not None:
            words.append(f"TTFT p50 {one['ttft_p50_ms']:,.0f} ms, p99 {one['ttft_p99_ms']:,.0f} ms")
        if one["hit_ratio"] is not None:
            words.append(f"hit {100 * one['hit_ratio']:.1f} %")
        lines.append(f"{name:<9}  {'   '.join(words)}   ({one['requests']:,} requests)")
    return lines


def _faults(record: RunRecord) -> list[str]:
    lines = []
    shown = [row for row in record.faults if row.block == record.faults[0].block]
    for state, group in groupby(shown, key=lambda row: row.state):
        rows = list(group)
        good = state not in (FaultState.NOT_ACTIVE, FaultState.DIRTY)
        moment = utc(record, rows[-1].t_ns)
        when = f"{moment:%H:%M:%S}" if moment else f"+{(rows[-1].t_ns - start_ns(record)) / 1e9:.1f} s"
        targets = f"{', '.join(row.target for row in rows)}:" if len(rows) > 1 else ""
        words = [
            word
            for row in rows
            for word in (*row.proof, row.control and f"control: {row.control}", *row.commands, row.why)
        ]
        text = joined(list(dict.fromkeys(word for word in words if word)))
        lines.append(
            f"{_PROVEN[state]:<8} {'✓' if good else '✗'} {when}  {targets}{' ' * bool(targets)}{text}".rstrip(
                " :"
            )
        )
    blocks = len({row.block for row in record.faults})
    if blocks > 1:
        lines.append(f"         … and the same in {blocks - 1} more blocks")
    return lines


def _after(judgement: Judgement) -> list[str]:
    one = judgement.containment
    if not one.observed_after_s:
        return []
    words = ["not within what was recorded" if one.t_recover_s is None else f"{one.t_recover_s:g} s"]
    if one.t_rewarm_s is not None:
        words.append(f"warm again after {one.t_rewarm_s:g} s")
    if one.t_detect_s is not None:
        words.append(f"noticed at +{one.t_detect_s:.1f} s")
    mark = "✓"
    if one.t_recover_s is None:
        late = any(
            each.checker.id == "L1" and each.result.verdict is Verdict.INVALID for each in judgement.checkers
        )
        mark = "✗" if late else "?"
    return [f"recover  {mark} {', '.join(words)}"]


def _checkers(judgement: Judgement, *, verbose: bool) -> list[str]:
    lines = []
    silent = []
    for one in judgement.checkers:
        if not one.counts and not verbose:
            silent.append(one.checker.id)
            continue
        lines.append(
            f"  {MARKS[one.result.verdict]} {one.checker.id:<3} {one.checker.name:<25} {one.result.summary}"
        )
        examples = one.result.examples if verbose else one.result.examples[:3]
        lines += [f"        {_example(example.what, example.rows)}" for example in examples]
        left = one.result.example_count - len(examples)
        if left > 0:
            lines.append(f"        … and {left:,} more")
    if silent:
        lines.append(f"  - not judged: {', '.join(silent)}")
    return lines


def _example(what: str, rows: tuple[str, ...]) -> str:
    return f"{what}  [{', '.join(rows[:4])}{' …' if len(rows) > 4 else ''}]" if rows else what


def _verdict(record: RunRecord, judgement: Judgement) -> list[str]:
    one, bounds = judgement.containment, record.run.bounds
    figures = []
    if one.k is not None:
        sign = "≤" if one.k <= bounds.containment_ratio else ">"
        figures.append(f"K {one.k:.2f} {sign} {bounds.containment_ratio:g}")
    if one.spread is not None:
        doubt = " (not concluded)" if one.spread_verdict is Verdict.UNKNOWN else ""
        figures.append(f"S {one.spread:g}{doubt}")
    if one.amplification is not None:
        figures.append(f"amplification {one.amplification:.2f}")
    if record.requests:
        figures.append(f"wrong bytes {wrong_bytes(record):,}")
        figures.append(f"over deadline {over_deadline(record):,}")
    lines = [f"{judgement.verdict}  {'   '.join(figures)}".rstrip()]
    if judgement.verdict is not RunVerdict.PASS:
        lines += [f"  {shortened(reason)}" for reason in judgement.reasons[:5]]
    if judgement.left:
        lines += [
            "LEFT BEHIND: run these, then kvops chaos recover",
            *(f"  {line}" for line in judgement.left),
        ]
    if again(record):
        lines.append(f"again: {again(record)}")
    return lines
