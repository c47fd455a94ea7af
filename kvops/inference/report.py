"""The report of a replay: one HTML file that needs nothing else, for screens of any size, light or dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvops import __version__
from kvops.inference.charts import Marker, Series, lines, number, stacked
from kvops.inference.outfile import whole_file
from kvops.inference.page import page, table
from kvops.inference.results import (
    DONE,
    Impact,
    Phase,
    ReplayEvent,
    ReplayResult,
    impact,
    losses,
    phase,
    summary,
)

BUCKETS_MAX: Final = 60
REQUESTS_PER_BUCKET: Final = 20
EVENTS_SHOWN_MAX: Final = 200
MARKERS_MAX: Final = 9

WHY: Final = {
    "MISS": "the pool did not have it: evicted, refused, or lost with its store",
    "IN_FLIGHT": "another request was computing it at that very time",
    "TIMEOUT": "did not arrive within the prefetch's time",
    "STORE_DOWN": "its store did not answer",
    "MASTER_DOWN": "no master answered the look-up",
    "BREAKER_OPEN": "the breaker was open: not tried, at no cost",
    "CORRUPT": "failed verification, so not used",
    "STALE": "the location was out of date",
}


def write_report(path: str, result: ReplayResult, *, title: str) -> None:
    """
    Write the report to a file; it appears whole or not at all.

    Raises:
        UsageError: The file cannot be written.
    """
    with whole_file(path, what="the report") as stream:
        stream.write(render(result, title=title).encode())


def render(result: ReplayResult, *, title: str) -> str:
    """The whole page."""
    figures = summary(result)
    hit = impact(result)
    marked = _marked(result.events)
    body = [
        f'<header><p class="kicker">kvops replay</p><h1>{escape(title)}</h1>'
        f"<p>{escape(_verdict(result, hit))}</p></header>",
        _tiles(result, figures["ttft_ms"]["p50"], figures["ttft_ms"]["p99"], figures["read_ms"]["p99"]),
        _impact(result, hit) if hit is not None else "",
        _charts(result, marked),
        '<div class="columns">',
        _losses(result),
        _parts(figures),
        "</div>",
        _events(result.events, marked),
        _nodes(figures),
        _parameters(result),
        f"<footer>kvops {escape(__version__)} · {escape(result.started_at)}</footer>",
    ]
    return page(kind="kvops replay", title=title, body="".join(body))


def _verdict(result: ReplayResult, hit: Impact | None) -> str:
    everything = phase(result, np.ones(len(result.rows), dtype=bool))
    answered = everything.requests - int(np.count_nonzero(result.rows["state"][:] != DONE))
    text = (
        f"{answered:,} of {len(result.rows):,} requests answered in {number(result.wall_s)} s; "
        f"{_share(everything.hit_ratio)} of their input tokens came from the cache, "
        f"of {_share(everything.possible_ratio)} "
        f"possible; {everything.wrong_bytes:,} wrong bytes in {size(everything.bytes_checked)} checked."
    )
    if hit is not None:
        text += f" {fault_name(hit.event)} after {number(hit.event.at_s)} s; {recovery(hit)}."
    return text


def fault_name(event: ReplayEvent) -> str:
    """Such as ``store-2 killed``."""
    return f"{event.subject} {event.event.partition('.')[2]}"


def recovery(hit: Impact) -> str:
    """In words, what became of the cache after a fault."""
    before = _share(hit.before.served_share)
    if hit.lowest_share is None:
        return f"too few requests came after it ({hit.after.requests}) to say what it did to the hits"
    text = f"of the possible hits {before} were served before, {_share(hit.lowest_share)} at worst"
    if hit.recovered_after_s is None:
        return f"{text}, not yet back at the end"
    if hit.recovered_after_s == 0:
        return f"the share of possible hits that was served never fell much below {before}"
    return f"{text}, and as many as before again after {number(hit.recovered_after_s)} s"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def size(count: float) -> str:
    """Bytes for people, in powers of 1,000."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= power:
            return f"{count / power:.1f} {unit}"
    return f"{count:.0f} B"


def _tiles(result: ReplayResult, ttft_p50: float, ttft_p99: float, read_p99: float) -> str:
    everything = phase(result, np.ones(len(result.rows), dtype=bool))
    tiles = [
        ("Token hit ratio", _share(everything.hit_ratio), f"of {_share(everything.possible_ratio)} possible"),
        ("TTFT, median", f"{number(ttft_p50)} ms", f"99 %: {number(ttft_p99)} ms"),
        ("Pool read, 99 %", f"{number(read_p99)} ms", f"deadline {result.deadline_ms} ms"),
        ("Wrong bytes", f"{everything.wrong_bytes:,}", f"{size(everything.bytes_checked)} checked"),
        ("Blocked requests", f"{everything.blocked:,}", f"{everything.slow:,} slow"),
    ]
    bad = {"Wrong bytes": everything.wrong_bytes, "Blocked requests": everything.blocked}
    cells = "".join(
        f'<div class="tile{" bad" if bad.get(name) else ""}"><h2>{escape(name)}</h2><p>{escape(value)}</p>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def phase_rows(before: Phase, after: Phase | None) -> list[tuple[str, str, str]]:
    """The table before and after a fault: name and two texts; the second is empty when there was none."""
    second = _phase_texts(after) if after is not None else {}
    return [(name, text, second.get(name, "")) for name, text in _phase_texts(before).items()]


def _phase_texts(one: Phase) -> dict[str, str]:
    return {
        "requests answered": f"{one.requests:,}",
        "blocked requests": f"{one.blocked:,}",
        "slow reads": f"{one.slow:,}",
        "wrong bytes": f"{one.wrong_bytes:,}",
        "bytes checked": size(one.bytes_checked),
        "token hit ratio": _share(one.hit_ratio),
        "… of what was possible": _share(one.served_share),
        "pool read, 99 %": f"{number(one.read_p99_ms)} ms",
        "TTFT, median": f"{number(one.ttft_p50_ms)} ms",
        "TTFT, 99 %": f"{number(one.ttft_p99_ms)} ms",
    }


def _impact(result: ReplayResult, hit: Impact) -> str:
    rows = phase_rows(hit.before, hit.after)
    rows_of = table(["", "before", "after"], rows, numbers=(1, 2), narrow=True)
    text = recovery(hit)
    words = (
        "Blocked: a pool call came back after its deadline, or no answer at all. "
        f"Slow: look-up and reads took more than {result.deadline_ms // 2} ms."
    )
    return (
        f"<section><h2>{escape(fault_name(hit.event))} after {number(hit.event.at_s)} s</h2>"
        f"<p>{escape(text[0].upper() + text[1:])}. {words}</p>{rows_of}</section>"
    )


def _charts(result: ReplayResult, marked: Sequence[ReplayEvent]) -> str:
    rows = result.rows[result.rows["state"] == DONE]
    if not len(rows):
        return "<section><p>No request was answered.</p></section>"
    count = max(4, min(BUCKETS_MAX, len(rows) // REQUESTS_PER_BUCKET))
    x_max = max(result.wall_s, float(rows["done_s"].max()))
    bucket = np.minimum((rows["done_s"] / x_max * count).astype(int), count - 1)
    used = np.unique(bucket)
    x = [(index + 0.5) * x_max / count for index in used]
    tokens = np.bincount(bucket, weights=rows["input_tokens"], minlength=count)[used]

    def share(values: NDArray[np.int64]) -> list[float]:
        return [float(v) for v in np.bincount(bucket, weights=values, minlength=count)[used] / tokens]

    def percentile(name: str, percent: float) -> list[float | None]:
        parts = (rows[name][bucket == index] for index in used)
        return [float(np.percentile(part[part > 0], percent)) if (part > 0).any() else None for part in parts]

    markers = [
        Marker(x=event.at_s, label=str(index), title=f"{event.event} {event.subject}", strong=event.fault)
        for index, event in enumerate(marked, start=1)
    ]
    lost = rows["lost_tokens"]
    hits = rows["l2_tokens"] + rows["l3_tokens"]
    # A pool that was warm before serves tokens that no request of this replay computed: never below nothing.
    fresh = np.maximum(0, rows["input_tokens"] - hits - lost)
    return (
        "<section><h2>Over time</h2>"
        + "".join(
            [
                stacked(
                    title="Where input tokens came from",
                    note="share of input tokens; x: seconds since the replay began",
                    x=x,
                    x_max=x_max,
                    series=[
                        Series(name="L2, host memory", color="--c1", values=share(rows["l2_tokens"])),
                        Series(name="L3, the pool", color="--c2", values=share(rows["l3_tokens"])),
                        Series(name="recomputed: cached before, lost", color="--c3", values=share(lost)),
                        Series(name="computed for the first time", color="--c4", values=share(fresh)),
                    ],
                    markers=markers,
                ),
                lines(
                    title="Time to read from the pool",
                    note="ms a request, measured; logarithmic",
                    unit="ms",
                    x=x,
                    x_max=x_max,
                    series=[
                        Series(name="99 %", color="--c5", values=percentile("read_ms", 99)),
                        Series(name="median", color="--c1", values=percentile("read_ms", 50)),
                    ],
                    markers=markers,
                ),
                lines(
                    title="Time to first token",
                    note="ms; look-up and read measured, queue and GPU from the model; logarithmic",
                    unit="ms",
                    x=x,
                    x_max=x_max,
                    series=[
                        Series(name="99 %", color="--c5", values=percentile("ttft_ms", 99)),
                        Series(name="median", color="--c1", values=percentile("ttft_ms", 50)),
                    ],
                    markers=markers,
                ),
            ]
        )
        + "</section>"
    )


def _losses(result: ReplayResult) -> str:
    found = losses(result)
    if not found:
        text = "None: every token that had been computed before was served."
        return f"<section><h2>Losses</h2><p>{text}</p></section>"
    total = sum(found.values())
    rows = [
        (reason, f"{tokens:,}", _share(tokens / total), WHY.get(reason, "the pool refused"))
        for reason, tokens in found.items()
    ]
    rows_of = table(["reason", "tokens", "share", "meaning"], rows, numbers=(1, 2), stack=True)
    return f"<section><h2>Losses</h2><p>Tokens computed before, and computed again.</p>{rows_of}</section>"


def _parts(figures: dict[str, dict[str, float]]) -> str:
    names = {
        "lookup_ms": "look-up (measured)",
        "read_ms": "read (measured)",
        "queue_ms": "queue (model)",
        "gpu_ms": "GPU (model)",
        "ttft_ms": "time to first token",
        "write_ms": "write-back, afterwards (measured)",
    }
    rows = [
        (text, *(number(figures[name][key]) for key in ("mean", "p50", "p99", "max")))
        for name, text in names.items()
    ]
    rows_of = table(["ms", "mean", "median", "99 %", "max"], rows, numbers=(1, 2, 3, 4))
    return (
        "<section><h2>Where the time went</h2><p>Look-up and read: of the requests that needed one.</p>"
        f"{rows_of}</section>"
    )


def _marked(events: Sequence[ReplayEvent]) -> list[ReplayEvent]:
    """The events that get a line in the charts: those on purpose first, as many as stay readable."""
    chosen = sorted(events, key=lambda event: (not event.fault, event.at_s))[:MARKERS_MAX]
    return sorted(chosen, key=lambda event: event.at_s)


def _events(events: Sequence[ReplayEvent], marked: Sequence[ReplayEvent]) -> str:
    if not events:
        return ""
    labels = {id(event): str(index) for index, event in enumerate(marked, start=1)}
    shown = sorted(events, key=lambda event: event.at_s)
    rows = [
        (
            labels.get(id(one), ""),
            f"{one.at_s:.1f} s",
            f"{one.trace_s:,.0f} s",
            one.event,
            one.subject,
            one.detail,
        )
        for one in shown[:EVENTS_SHOWN_MAX]
    ]
    head = ["", "at", "in the trace", "event", "subject", ""]
    rows_of = table(head, rows, numbers=(1, 2), unbroken=(3, 4), stack=True)
    left = len(shown) - EVENTS_SHOWN_MAX
    more = f"<p>… and {left:,} more.</p>" if left > 0 else ""
    return f"<section><h2>Events</h2>{rows_of}{more}</section>"


def _nodes(figures: dict[str, list[dict[str, str | int | float]]]) -> str:
    rows = [
        (str(one["node"]), str(one["host"]), f"{one['requests']:,}", _share(float(one["gpu_busy_share"])))
        for one in figures["nodes"]
    ]
    rows_of = table(["node", "host", "requests", "GPU busy"], rows, numbers=(2, 3), narrow=True)
    return (
        "<section><h2>Nodes</h2>"
        "<p>GPU busy: modelled time over the trace's; above 100 % a queue only grows.</p>"
        f"{rows_of}</section>"
    )


def _parameters(result: ReplayResult) -> str:
    rows_of = table(["", ""], list(result.parameters.items()))
    note = (
        "Bytes, look-ups, reads and writes are real. Pages are smaller than a real model's: reads say how "
        "this pool does on this machine, not how long a real page takes. GPU time follows "
        "kvops.inference.gpu_model."
    )
    return f"<section><h2>What was replayed</h2>{rows_of}<p>{note}</p></section>"
