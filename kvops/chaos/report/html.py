"""A judged run as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import Final

from kvops import __version__
from kvops.chaos.checkers.breaker import openings
from kvops.chaos.checkers.model import CounterExample, Verdict
from kvops.chaos.containment import METRICS, Cell, Point
from kvops.chaos.history import Arm, RunRecord
from kvops.chaos.report.document import (
    Entry,
    again,
    arm_figures,
    document,
    fault_requests,
    over_deadline,
    shortened,
    start_ns,
    timeline,
    wrong_bytes,
)
from kvops.chaos.verdict import Judgement, RunVerdict
from kvops.inference.charts import Band, Marker, Series, for_script, lines, number, shares
from kvops.inference.page import page, table

ENTRIES_MAX: Final = 200
STRIPS_MAX: Final = 24
NAMES: Final = {
    "degraded": "degraded",
    "success": "success",
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "hit": "hits",
    "recompute": "recomputed",
    "rpc": "calls",
}
STATES: Final = {
    "ok": "as without a fault",
    "degraded-expected": "degraded, as declared",
    "degraded-unexpected": "degraded, and should not be",
    "unknown": "too little to say",
}
_MARKS: Final = {Verdict.VALID: "✓ valid", Verdict.UNKNOWN: "? unknown", Verdict.INVALID: "✗ invalid"}


def render(record: RunRecord, judgement: Judgement) -> str:
    """The whole page."""
    run = record.run
    title = run.title or run.experiment or run.fault or "chaos run"
    style = resources.files("kvops.chaos.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f'<header><p class="kicker">kvops chaos{" · quick run" * run.quick} · seed {run.seed}</p>'
        f'<h1><span class="verdict {judgement.verdict}">{judgement.verdict}</span>{escape(title)}</h1>'
        f"<p>{escape('. '.join(shortened(reason) for reason in judgement.reasons[:3]))}</p>{_left(judgement)}</header>",
        _tiles(record, judgement),
        _matrix(judgement.containment.matrix),
        _charts(record, judgement.containment.timeline),
        _strips(record),
        _arms(record),
        _checkers(judgement),
        _limits(judgement),
        _timeline(timeline(record)),
        _commands(record),
        _parameters(record, judgement),
        f"<footer>kvops {escape(__version__)} · {escape(run.started_at or run.run_id)}</footer>",
        f'<script type="application/json" id="run">{for_script(document(record, judgement))}</script>',
    ]
    return page(kind="kvops chaos", title=title, body="".join(body), style=style)


def _left(judgement: Judgement) -> str:
    if judgement.verdict is not RunVerdict.DIRTY:
        return ""
    commands = "\n".join(judgement.left) or "the run did not say which; see kvops chaos status"
    return f'<div class="left"><h2 class="bad">Left behind: run these by hand</h2><pre>{escape(commands)}</pre></div>'


def _tiles(record: RunRecord, judgement: Judgement) -> str:
    one, bounds = judgement.containment, record.run.bounds
    k_note = f"bound {bounds.containment_ratio:g}"
    if one.k_low is not None and one.k_high is not None:
        k_note += f"; 95 %: {one.k_low:.2f} to {one.k_high:.2f}"
    recover = "–" if one.t_recover_s is None else f"{one.t_recover_s:g} s"
    looked = (
        f"looked on for {one.observed_after_s:.0f} s"
        if one.observed_after_s
        else "not looked on after the undo"
    )
    if one.t_rewarm_s is not None:
        warm = f"warm after {one.t_rewarm_s:g} s"
    else:
        warm = "not warm again, " * bool(one.observed_after_s) + looked
    open_k, open_s = (
        "; not concluded" if verdict is Verdict.UNKNOWN else ""
        for verdict in (one.k_verdict, one.spread_verdict)
    )
    tiles = [
        (
            "Containment K",
            "–" if one.k is None else f"{one.k:.2f}",
            k_note + open_k,
            one.k_verdict is Verdict.INVALID,
        ),
        (
            "Spread S",
            "–" if one.spread is None else f"{one.spread:g}",
            f"{len(one.spread_domains)} of {one.spread_of} domains outside{open_s}",
            one.spread_verdict is Verdict.INVALID,
        ),
        (
            "Amplification",
            "–" if one.amplification is None else f"{one.amplification:.2f}",
            f"bound {bounds.amplification:g}",
            _invalid(judgement, "C2"),
        ),
        ("Wrong bytes", f"{wrong_bytes(record):,}", "bound 0", _invalid(judgement, "S1")),
        (
            "Over deadline",
            f"{over_deadline(record):,}",
            f"of {fault_requests(record):,} requests of the arm with the fault",
            _invalid(judgement, "L2"),
        ),
        ("Recovered after", recover, warm, _invalid(judgement, "L1")),
    ]
    cells = "".join(
        f'<div class="tile{" bad" if bad else ""}"><h2>{escape(name)}</h2><p>{escape(value)}</p>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note, bad in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _invalid(judgement: Judgement, checker: str) -> bool:
    return any(
        one.checker.id == checker and one.result.verdict is Verdict.INVALID for one in judgement.checkers
    )


def _matrix(cells: Sequence[Cell]) -> str:
    if not cells:
        return "<section><h2>Impact</h2><p>No request met a proven fault.</p></section>"
    rows: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault((cell.domain, cell.cls), {})[cell.metric] = cell
    classes = any(cls for _, cls in rows)
    head = "".join(f'<th class="n">{NAMES[metric]}</th>' for metric in METRICS)
    body = "".join(
        f"<tr><td>{escape(domain)}</td>{f'<td>{escape(cls)}</td>' if classes else ''}"
        + "".join(_matrix_cell(found.get(metric)) for metric in METRICS)
        + "</tr>"
        for (domain, cls), found in rows.items()
    )
    key = "".join(f'<li><s class="{state}"></s>{escape(text)}</li>' for state, text in STATES.items())
    return (
        "<section><h2>Impact</h2><p>While the fault was active, against the same requests without it. Latency and"
        " calls: a ratio; the others: a difference in percentage points.</p>"
        f'<ul class="key">{key}</ul><div class="scroll"><table><thead><tr><th>domain</th>'
        f"{'<th>class</th>' if classes else ''}{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _matrix_cell(cell: Cell | None) -> str:
    if cell is None or cell.ratio is None:
        return '<td class="n unknown" title="too little to say">–</td>'
    low, high = cell.low if cell.low is not None else 0.0, cell.high if cell.high is not None else 0.0
    title = f"95 %: {_metric(cell.metric, low)} to {_metric(cell.metric, high)}; {STATES[cell.state]}"
    return (
        f'<td class="n {cell.state}" title="{escape(title)}">{escape(_metric(cell.metric, cell.ratio))}</td>'
    )


def _metric(metric: str, value: float) -> str:
    return (
        f"× {value:.2f}"
        if metric in ("ttft_p50", "ttft_p99", "rpc")
        else f"{100 * value + 0.0:+.2f}".replace("-0.00", "+0.00")
    )


def _charts(record: RunRecord, points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    zero = min(points[0].t_s, 0.0)
    x = [one.t_s - zero for one in points]
    x_max = x[-1] + 1
    end = _fault_length_s(record)
    bands = [Band(begin=-zero, end=min(x_max, end - zero), title="fault")] if end is not None else []
    marks = [Marker(x=-zero, label="in", title="injected", strong=True)]
    if end is not None and end - zero <= x_max:
        marks.append(Marker(x=end - zero, label="out", title="undone and proven clean", strong=True))
    note = "Affected groups, second by second, averaged over blocks. Shaded: the fault."
    ttft = lines(
        title="Time to first token, median",
        note=note,
        unit="ms",
        x=x,
        x_max=x_max,
        series=[
            Series(name="with the fault", color="--c3", values=[one.ttft_ms for one in points]),
            Series(
                name="the same requests without", color="--c1", values=[one.ttft_twin_ms for one in points]
            ),
        ],
        markers=marks,
        bands=bands,
    )
    hits = shares(
        title="Input tokens served from the cache",
        note=note,
        x=x,
        x_max=x_max,
        series=[
            Series(name="with the fault", color="--c3", values=[one.hit for one in points]),
            Series(name="the same requests without", color="--c1", values=[one.hit_twin for one in points]),
        ],
        markers=marks,
        bands=bands,
    )
    degraded = shares(
        title="Degraded requests",
        note="Failed, wrong, late, or computing again what their twins did not.",
        x=x,
        x_max=x_max,
        series=[
            Series(
                name="degraded",
                color="--c5",
                values=[one.degraded if one.requests else None for one in points],
            ),
            Series(
                name="of them failed, wrong or late",
                color="--c3",
                values=[one.harmed if one.requests else None for one in points],
            ),
        ],
        markers=marks,
        bands=bands,
    )
    return f"<section><h2>What clients saw</h2>{ttft}{hits}{degraded}</section>"


def _fault_length_s(record: RunRecord) -> float | None:
    """Of the longest injection that was undone."""
    lengths = [(one.t_end_ns - one.t_inject_ns) / 1e9 for one in record.fault_windows() if one.t_end_ns]
    return max(lengths, default=None)


def _strips(record: RunRecord) -> str:
    """Breakers and faults over the whole run, one strip each."""
    opened = openings(record)
    windows = record.fault_windows()
    if not opened and not windows:
        return ""
    zero = start_ns(record)
    moments = [record.end.t_ns] if record.end else []
    moments += [one.t_end_ns or one.t_start_ns for one in record.blocks]
    moments += [event.t_ns for event in record.events[-1:]] + [one.t_inject_ns for one in windows]
    last = max([*moments, zero + 1])

    def bar(css: str, begin: int, end: int | None, title: str) -> str:
        left = 100 * (begin - zero) / (last - zero)
        width = 100 * ((end if end is not None else last) - begin) / (last - zero)
        return f'<b class="{css}" style="left:{left:.3f}%;width:{width:.3f}%" title="{escape(title)}"></b>'

    strips: dict[str, list[str]] = {}
    for one in windows:
        name = f"{one.fault} {one.target}".strip()
        title = f"block {one.block}, {(one.t_inject_ns - zero) / 1e9:.1f} s"
        strips.setdefault(name, []).append(bar("fault", one.t_inject_ns, one.t_end_ns, title))
    for each in opened:
        guarded = each.node or each.domain
        title = f"open at {(each.begin_ns - zero) / 1e9:.1f} s"
        title += "" if each.end_ns is None else f", for {(each.end_ns - each.begin_ns) / 1e9:.1f} s"
        half = "".join(
            f'<i style="left:{100 * (at - zero) / (last - zero):.3f}%" title="half-open"></i>'
            for at in each.t_half_ns
        )
        strips.setdefault(f"{each.who} → {guarded}", []).append(
            bar("", each.begin_ns, each.end_ns, title) + half
        )
    shown = list(strips.items())[:STRIPS_MAX]
    body = "".join(f"<span>{escape(name)}</span><div>{''.join(parts)}</div>" for name, parts in shown)
    left = len(strips) - len(shown)
    more = f"<p>… and {left} more.</p>" if left else ""
    scale = f"<span></span><em><small>0 s</small><small>{(last - zero) / 1e9:,.0f} s</small></em>"
    return (
        "<section><h2>Breakers</h2><p>Faults, and which breakers were open meanwhile, over the whole run; a line is a"
        f' half-open breaker trying.</p><div class="strips">{body}{scale}</div>{more}</section>'
    )


def _arms(record: RunRecord) -> str:
    names = {
        Arm.CACHE_OFF: "without a cache",
        Arm.BASELINE: "baseline",
        Arm.CONTROL: "baseline again",
        Arm.FAULT: "with the fault",
    }
    rows = []
    for arm, one in arm_figures(record).items():
        rows.append(
            (
                names[Arm(arm)],
                f"{one['requests']:,}",
                f"{100 * (one['success'] or 0):.4g} %",
                "–" if one["ttft_p50_ms"] is None else f"{number(one['ttft_p50_ms'])} ms",
                "–" if one["ttft_p99_ms"] is None else f"{number(one['ttft_p99_ms'])} ms",
                "–" if one["hit_ratio"] is None else f"{100 * one['hit_ratio']:.1f} %",
                f"{one['recomputed_tokens']:,}",
                f"{one['late']:,}",
            )
        )
    if not rows:
        return ""
    head = ["arm", "requests", "success", "TTFT p50", "TTFT p99", "hits", "recomputed tokens", "late"]
    return (
        "<section><h2>Arms</h2><p>The requests that met the fault, and the same ones in the other arms.</p>"
        f"{table(head, rows, numbers=range(1, 8))}</section>"
    )


def _checkers(judgement: Judgement) -> str:
    rows = "".join(_checker_rows(judgement))
    return (
        '<section><h2>Promises</h2><div class="scroll stack"><table><thead><tr><th></th><th>promise</th>'
        f"<th>verdict</th><th>what was found</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _checker_rows(judgement: Judgement) -> Iterator[str]:
    for one in judgement.checkers:
        result = one.result
        mark = _MARKS[result.verdict] if one.counts else "– not judged"
        css = ' class="k bad"' if result.verdict is Verdict.INVALID else ' class="k"'
        examples = "".join(_example(example) for example in result.examples[:5])
        left = result.example_count - min(5, len(result.examples))
        examples += f"<li>… and {left:,} more</li>" if left > 0 else ""
        yield (
            f'<tr><td class="k">{one.checker.id}</td><td>{escape(one.checker.title)}</td><td{css}>{mark}</td>'
            f"<td>{escape(result.summary)}{f'<ul>{examples}</ul>' if examples else ''}</td></tr>"
        )


def _example(example: CounterExample) -> str:
    rows = f" <small>{escape(', '.join(example.rows[:6]))}</small>" if example.rows else ""
    return f"<li>{escape(example.what)}{rows}</li>"


def _limits(judgement: Judgement) -> str:
    texts = [*judgement.not_concluded, *judgement.notes]
    if not texts:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<section><h2>What this run cannot say</h2><ul>{rows}</ul></section>"


def _timeline(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    rows = [
        (f"{one.at_s:,.1f} s", one.time[11:19], one.what, ("" if one.ok else "✗ ") + one.text)
        for one in entries[:ENTRIES_MAX]
    ]
    left = len(entries) - len(rows)
    more = f"<p>… and {left:,} more.</p>" if left else ""
    text = table(["after", "UTC", "what", ""], rows, numbers=(0,), unbroken=(1, 2), stack=True)
    return f"<section><h2>Timeline</h2>{text}{more}</section>"


def _commands(record: RunRecord) -> str:
    windows = record.fault_windows()
    rows = []
    for one in windows:
        undone = "proven clean" if one.t_clean_ns is not None and not one.dirty else "NOT proven clean"
        proof = "; ".join(one.proof) or "NOT proven active"
        run = "\n".join(one.commands) or f"{one.fault} {one.target}".strip()  # some need no command
        rows.append((str(one.block), run, proof, "\n".join(one.undo_commands), undone))
    if not rows:
        return ""
    head = ["block", "run", "proof", "undone by", "result"]
    return f"<section><h2>Commands run and undone</h2>{table(head, rows, numbers=(0,), stack=True)}</section>"


def _parameters(record: RunRecord, judgement: Judgement) -> str:
    run = record.run
    rows = [
        ("seed", str(run.seed)),
        ("experiment", run.experiment),
        ("fault", f"{run.fault} {run.target}".strip()),
        ("scope", ", ".join(run.scope.domains or run.scope.hosts)),
        ("capacity lost", f"{100 * judgement.containment.capacity_lost:.2f} %"),
        ("placement", run.placement),
        ("without", ", ".join(run.without)),
        (
            "length",
            "quick: one pair of arms, which looks for harm and proves little" if run.quick else "whole",
        ),
        ("blocks", str(len({one.block for one in record.blocks}))),
        ("again", again(record)),
    ]
    return f"<section><h2>How it was run</h2>{table(['', ''], [row for row in rows if row[1]])}</section>"
