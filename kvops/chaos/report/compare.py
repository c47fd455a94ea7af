"""Two or more judged runs side by side: with and without a safeguard, with one placement and another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any, Final

from kvops import __version__
from kvops.chaos.checkers.model import Verdict
from kvops.chaos.containment import Containment, pairs_of
from kvops.chaos.history import Arm, RunRecord
from kvops.chaos.metastability import margin
from kvops.chaos.pairing import Phase
from kvops.chaos.report.document import (
    again,
    arm_figures,
    containment,
    over_deadline,
    shortened,
    wrong_bytes,
)
from kvops.chaos.verdict import Judgement, RunVerdict
from kvops.errors import UsageError
from kvops.inference.charts import for_script
from kvops.inference.page import page as html_page
from kvops.inference.page import table

RUNS_MAX: Final = 8
DOMAINS_MAX: Final = 16  # named one by one
NO_EVIDENCE: Final = frozenset(
    {
        RunVerdict.DIRTY,
        RunVerdict.INTERRUPTED,
        RunVerdict.ABORTED,
        RunVerdict.UNSUPPORTED,
        RunVerdict.NOT_INJECTED,
        RunVerdict.BASELINE_NOT_STEADY,
    }
)
"""Verdicts of runs that were not had to their end, or had nothing to compare with."""
MEANING: Final = (
    "K: the share of requests that the fault degraded, beyond their twins without it, for each share of capacity lost. "
    "It is counted over all requests of the group that was hit, wherever their pages lay; 1 is in proportion."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run of a comparison."""

    label: str
    record: RunRecord
    judgement: Judgement


def label(record: RunRecord) -> str:
    """What is special about a run: the safeguards it went without, its placement; what else differs is a row."""
    run = record.run
    words = [f"without {', '.join(run.without)}" if run.without else "all safeguards", run.placement]
    return ", ".join(word for word in words if word)


def as_side(record: RunRecord, judgement: Judgement) -> Side:
    """A judged run as one side."""
    return Side(label=label(record), record=record, judgement=judgement)


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


def same(sides: Sequence[Side]) -> str:
    """What all sides have in common, in words."""
    run = sides[0].record.run
    words = [
        " ".join(filter(None, (run.fault, f"on {run.target}" if run.target else ""))),
        f"seed {run.seed}",
    ]
    if run.scope.capacity_share:
        words.append(f"{100 * run.scope.capacity_share:.1f} % of the capacity")
    words.append("the same requests at the same moments")
    return ", ".join(word for word in words if word)


def differs(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """What is not alike: a setting's name, then its value for each side."""
    settings: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("placement", lambda one: one.run.placement or "–"),
        ("switched off", lambda one: ", ".join(one.run.without) or "nothing"),
        ("load", lambda one: f"{100 * one.run.load_share:.0f} %"),
        ("length", lambda one: "quick" if one.run.quick else "whole"),
        ("arms", lambda one: ", ".join(arm for arm in Arm if any(row.arm is arm for row in one.blocks))),
        ("blocks", lambda one: f"{len({row.block for row in one.blocks})}"),
        (
            "bounds",
            lambda one: f"K {one.run.bounds.containment_ratio:g}, {one.run.bounds.read_timeout_ms:g} ms",
        ),
    ]
    found = [(name, [value(side.record) for side in sides]) for name, value in settings]
    return [(name, values) for name, values in found if len(set(values)) > 1]


def rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """The table: a figure's name, then its text for each side."""
    numbers = [side.judgement.containment for side in sides]
    arms = [arm_figures(side.record) for side in sides]

    def row(name: str, values: Sequence[float | None], form: str) -> tuple[str, list[str]]:
        return name, ["–" if value is None else form.format(value) for value in values]

    def hits(arm: Arm) -> list[float | None]:
        found = [one.get(arm.value, {}).get("hit_ratio") for one in arms]
        return [None if value is None else 100 * value for value in found]

    return [
        ("verdict", [side.judgement.verdict.value for side in sides]),
        row("K", [one.k for one in numbers], "{:.2f}"),
        ("K, 95 %", [_interval(one.k_low, one.k_high) for one in numbers]),
        row("capacity lost %", [100 * one.capacity_lost or None for one in numbers], "{:.1f}"),
        row("requests under the fault", [one.requests for one in numbers], "{:,}"),
        row(
            "degraded, excess %",
            [None if one.excess is None else 100 * one.excess for one in numbers],
            "{:.2f}",
        ),
        row("hits without the fault %", hits(Arm.BASELINE), "{:.1f}"),
        row("hits with it %", hits(Arm.FAULT), "{:.1f}"),
        *_by_domain(sides),
        row("tokens computed again", [_recomputed(one.record) for one in sides], "{:,}"),
        ("S", [_spread(one) for one in numbers]),
        row("amplification", [one.amplification for one in numbers], "{:.2f}"),
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


def _by_domain(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """Whose requests were degraded: where harm stays with the target's host, and where it is spread over all."""
    texts: dict[str, list[str]] = {}
    for place, side in enumerate(sides):
        pairs = pairs_of(side.record)
        met = (pairs.phase == Phase.DURING) & pairs.fault.there & pairs.baseline.there
        worse = pairs.fault.degraded(pairs.baseline)
        for index, name in enumerate(pairs.domains):
            here = met & (pairs.domain == index)
            cells = texts.setdefault(name, ["–"] * len(sides))
            cells[place] = f"{int((here & worse).sum()):,} of {int(here.sum()):,}"
    hit = sides[0].record.run.scope.domains
    return [
        (f"degraded at {name}{' (hit)' * (name in hit)}", cells)
        for name, cells in sorted(texts.items())[:DOMAINS_MAX]
    ]


def _spread(one: Containment) -> str:
    """S, in as few letters as a telephone has room for."""
    if one.spread is None:
        return "–"
    return "not concluded" if one.spread_verdict is Verdict.UNKNOWN else f"{one.spread:g}"


def _recomputed(record: RunRecord) -> int:
    """Input tokens that requests under the fault computed and their twins did not."""
    pairs = pairs_of(record)
    met = (pairs.phase == Phase.DURING) & pairs.fault.there & pairs.baseline.there
    return int((pairs.fault.recomputed - pairs.baseline.recomputed)[met].sum())


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def conclusion(sides: Sequence[Side]) -> list[str]:
    """What the comparison is evidence for, a sentence each; intervals that overlap are evidence for nothing."""
    first, others = sides[0], sides[1:]
    told = [
        f"{side.label}: {side.judgement.verdict}, so it is no evidence ({shortened(side.judgement.reasons[0])})"
        for side in sides
        if side.judgement.verdict in NO_EVIDENCE
    ]
    for other in others:
        a, b = first.judgement, other.judgement
        if NO_EVIDENCE & {a.verdict, b.verdict}:
            continue
        if a.verdict is RunVerdict.PASS and b.verdict is RunVerdict.FAIL:
            told.append(f"{other.label}: the promise breaks ({shortened(b.reasons[0])})")
        told.append(f"{other.label}: {_of_k(a.containment, b.containment)}")
    if not all(any(row.arm is Arm.CONTROL for row in side.record.blocks) for side in sides):
        told.append("no second arm without a fault: what two equal runs disagree on is still within K")
    if len({side.record.run.load_share for side in sides}) > 1:
        told.append(str(margin([side.record for side in sides])))
    return told


def _of_k(first: Containment, other: Containment) -> str:
    if first.k is None or other.k is None:
        return "K was not measured on both sides"
    figures = f"K {other.k:.2f} beside {first.k:.2f}"
    if _apart(first.k_high, other.k_low):
        return f"{figures}: higher, beyond chance"
    if _apart(other.k_high, first.k_low):
        return f"{figures}: lower, beyond chance"
    return f"{figures}: no difference that this run can tell from chance"


def _apart(high: float | None, low: float | None) -> bool:
    return high is not None and low is not None and high < low


def reasons(sides: Sequence[Side]) -> list[str]:
    """Why each side that is no PASS is none."""
    return [
        f"{side.label}: {side.judgement.verdict}: {shortened(side.judgement.reasons[0])}"
        for side in sides
        if side.judgement.verdict not in {RunVerdict.PASS, *NO_EVIDENCE}
    ]


def render(sides: Sequence[Side]) -> str:
    """As text."""
    found = rows(sides)
    apart = differs(sides)
    widths = [
        max(len(side.label), *(len(cells[i]) for _, cells in found + apart)) for i, side in enumerate(sides)
    ]
    name_width = max(len(name) for name, _ in found)

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{name_width}}" + "".join(
            f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
        )

    return "\n".join(
        [
            f"the same: {same(sides)}",
            line("", [side.label for side in sides]),
            *(line(f"differs: {name}", cells) for name, cells in apart),
            *(line(name, cells) for name, cells in found),
            *reasons(sides),
            *conclusion(sides),
            MEANING,
        ]
    )


def document(sides: Sequence[Side]) -> dict[str, Any]:
    """For programs."""
    return {
        "schema": 1,
        "same": same(sides),
        "differs": dict(differs(sides)),
        "sides": [
            {
                "label": side.label,
                "run": side.record.run.run_id,
                "without": list(side.record.run.without),
                "placement": side.record.run.placement,
                "verdict": side.judgement.verdict.value,
                "reasons": list(side.judgement.reasons),
                "containment": containment(side.judgement),
                "arms": arm_figures(side.record),
            }
            for side in sides
        ],
        "conclusion": "; ".join(conclusion(sides)),
    }


def page(sides: Sequence[Side]) -> str:
    """As one HTML page that needs nothing else."""
    letters = "ABCDEFGH"[: len(sides)]  # a telephone has no room for more above a column
    head = ["", *letters]
    columns = range(1, len(head))
    title = sides[0].record.run.title or sides[0].record.run.fault
    verdicts = "".join(
        f'<p><span class="verdict {side.judgement.verdict}">{side.judgement.verdict}</span>'
        f"{letter}: {escape(side.label)}</p>"
        for letter, side in zip(letters, sides, strict=True)
    )
    sentences = "".join(f"<li>{escape(text)}</li>" for text in [*conclusion(sides), *reasons(sides)])
    runs = [
        (f"{letter}: {side.label}", side.record.run.run_id, side.record.run.started_at, again(side.record))
        for letter, side in zip(letters, sides, strict=True)
    ]
    apart = table(head, [(name, *cells) for name, cells in differs(sides)])
    figures = table(head, [(name, *cells) for name, cells in rows(sides)], numbers=columns)
    told = table(["side", "run", "began", "again"], runs, unbroken=(1, 2), stack=True)
    body = [
        f'<header><p class="kicker">kvops chaos · {len(sides)} runs side by side</p><h1>{escape(title)}</h1>'
        f"<p>The same: {escape(same(sides))}.</p>{verdicts}</header>",
        f"<section><h2>What it shows</h2><ul>{sentences}</ul></section>",
        f"<section><h2>What differs</h2>{apart}</section>" if differs(sides) else "",
        f"<section><h2>Figures</h2>{figures}<p>{escape(MEANING)}</p></section>",
        f"<section><h2>Runs</h2>{told}</section>",
        f"<footer>kvops {escape(__version__)}</footer>",
        f'<script type="application/json" id="comparison">{for_script(document(sides))}</script>',
    ]
    style = resources.files("kvops.chaos.report").joinpath("page.css").read_text(encoding="utf-8")
    return html_page(kind="kvops chaos", title=title, body="".join(body), style=style)
