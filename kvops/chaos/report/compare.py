"""Two or more judged runs side by side: with and without a safeguard, with one placement and another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvops.chaos.history import RunRecord
from kvops.chaos.metastability import margin
from kvops.chaos.report.document import containment, over_deadline, wrong_bytes
from kvops.chaos.verdict import Judgement, RunVerdict
from kvops.errors import UsageError

RUNS_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run of a comparison."""

    label: str
    record: RunRecord
    judgement: Judgement


def label(record: RunRecord) -> str:
    """What is special about a run: the safeguards it went without, its placement."""
    run = record.run
    load = f"load {100 * run.load_share:.0f} %" if run.load_share else ""
    words = [f"without {', '.join(run.without)}" if run.without else "all safeguards", run.placement, load]
    return ", ".join(word for word in words if word)


def check_comparable(records: Sequence[RunRecord]) -> None:
    """
    Refuse to put beside each other what was not the same experiment.

    Raises:
        UsageError: They differ in fault, target, seed or scope, or are too many.
    """
    if not 2 <= len(records) <= RUNS_MAX:
        raise UsageError(f"{len(records)} runs cannot be compared", fix=f"name 2 to {RUNS_MAX}")
    first = records[0].run
    for record in records[1:]:
        for name in ("fault", "target", "seed", "scope"):
            one, other = getattr(first, name), getattr(record.run, name)
            if one != other:
                raise UsageError(
                    f"runs {first.run_id or 1} and {record.run.run_id or 2} differ in {name}: {one} and {other}",
                    fix="compare runs of one experiment with one seed",
                )


def rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """The table: a figure's name, then its text for each side."""
    numbers = [side.judgement.containment for side in sides]

    def row(name: str, values: Sequence[float | None], form: str) -> tuple[str, list[str]]:
        return name, ["–" if value is None else form.format(value) for value in values]

    return [
        ("verdict", [side.judgement.verdict.value for side in sides]),
        row("K", [one.k for one in numbers], "{:.2f}"),
        ("K, 95 %", [_interval(one.k_low, one.k_high) for one in numbers]),
        row("S", [one.spread for one in numbers], "{:g}"),
        row("amplification", [one.amplification for one in numbers], "{:.2f}"),
        row(
            "degraded, excess %",
            [None if one.excess is None else 100 * one.excess for one in numbers],
            "{:.2f}",
        ),
        row("failed", [one.harmed.get("failed") for one in numbers], "{:,}"),
        row("late", [one.harmed.get("late") for one in numbers], "{:,}"),
        row("wrong bytes", [wrong_bytes(side.record) for side in sides], "{:,}"),
        row("over deadline", [over_deadline(side.record) for side in sides], "{:,}"),
        row("TTFT p99, excess ms", [one.excess_p99_ms for one in numbers], "{:+.0f}"),
        row("noticed after s", [one.t_detect_s for one in numbers], "{:.1f}"),
        row("contained after s", [one.t_contain_s for one in numbers], "{:g}"),
        row("recovered after s", [one.t_recover_s for one in numbers], "{:g}"),
        row("warm after s", [one.t_rewarm_s for one in numbers], "{:g}"),
        (
            "broken promises",
            [
                ", ".join(
                    one.checker.id for one in side.judgement.checkers if one.result.verdict == "invalid"
                )
                or "none"
                for side in sides
            ],
        ),
    ]


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def conclusion(sides: Sequence[Side]) -> str:
    """What the comparison is evidence for; intervals that overlap are evidence for nothing."""
    first, others = sides[0], sides[1:]
    told = []
    for other in others:
        a, b = first.judgement, other.judgement
        if RunVerdict.PASS is a.verdict and b.verdict is RunVerdict.FAIL:
            told.append(f"{other.label}: the promise breaks ({b.reasons[0]})")
        elif _apart(a.containment.k_high, b.containment.k_low):
            told.append(f"{other.label}: K is higher, beyond chance")
        elif _apart(b.containment.k_high, a.containment.k_low):
            told.append(f"{other.label}: K is lower, beyond chance")
        else:
            told.append(f"{other.label}: no difference that this run can tell from chance")
    if len({side.record.run.load_share for side in sides}) > 1:
        told.append(str(margin([side.record for side in sides])))
    return "; ".join(told)


def _apart(high: float | None, low: float | None) -> bool:
    return high is not None and low is not None and high < low


def render(sides: Sequence[Side]) -> str:
    """As text."""
    found = rows(sides)
    widths = [max(len(side.label), *(len(cells[i]) for _, cells in found)) for i, side in enumerate(sides)]
    name_width = max(len(name) for name, _ in found)
    head = " " * name_width + "".join(
        f"  {side.label:>{width}}" for side, width in zip(sides, widths, strict=True)
    )
    body = [
        f"{name:<{name_width}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in found
    ]
    return "\n".join([head, *body, conclusion(sides)])


def document(sides: Sequence[Side]) -> dict[str, Any]:
    """For programs."""
    return {
        "schema": 1,
        "sides": [
            {
                "label": side.label,
                "run": side.record.run.run_id,
                "without": list(side.record.run.without),
                "placement": side.record.run.placement,
                "verdict": side.judgement.verdict.value,
                "containment": containment(side.judgement),
            }
            for side in sides
        ],
        "conclusion": conclusion(sides),
    }
