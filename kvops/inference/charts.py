"""
Small charts as HTML and inline SVG: shapes stretch with the page, text does not.

Shapes lie in an SVG that is stretched to its box; axis labels, markers and the legend are HTML over it,
placed in percent. So a chart reads the same on a telephone and on a wide screen, without a script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

X_LABELS_MAX: Final = 6
FLAG_WIDTH_PERCENT: Final = 8.0  # of a chart on a telephone
_NICE: Final = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity over time; ``values[i]`` belongs to ``x[i]`` of its chart."""

    name: str
    color: str  # a CSS variable's name, such as ``--c1``: the page sets it for light and for dark
    values: Sequence[float | None]  # None: nothing was measured then; for ``lines`` alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A moment worth a line across the chart."""

    x: float
    label: str  # a character or two
    title: str
    strong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of time that is shaded."""

    begin: float
    end: float
    title: str


def nice_step(span: float, *, count: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) that cuts ``span`` into at most ``count`` parts."""
    if span <= 0:
        return 1.0
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in _NICE if factor * power >= raw * (1 - 1e-9))


def number(value: float) -> str:
    """A figure with three digits that matter, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 4)}f}"


def stacked(
    *,
    title: str,
    note: str,
    x: Sequence[float],
    x_max: float,
    series: Sequence[Series],
    markers: Sequence[Marker],
) -> str:
    """Shares that add up to one, as areas upon each other; the first series lies at the bottom."""
    places = [_percent(value, x_max) for value in x]
    below = [0.0] * len(x)
    shapes = []
    for one in series:
        above = [base + (value or 0.0) for base, value in zip(below, one.values, strict=True)]
        upper = " ".join(
            f"{place:.2f},{100 - 100 * value:.2f}" for place, value in zip(places, above, strict=True)
        )
        lower = " ".join(
            f"{place:.2f},{100 - 100 * value:.2f}"
            for place, value in reversed(list(zip(places, below, strict=True)))
        )
        shapes.append(f'<polygon points="{upper} {lower}" style="fill:var({one.color})"/>')
        below = above
    ticks = [(100 - share, f"{share} %") for share in (0, 25, 50, 75, 100)]
    return _chart(title, note, x, x_max, series, markers, shapes, ticks, unit="%", scale=100.0)


def shares(
    *,
    title: str,
    note: str,
    x: Sequence[float],
    x_max: float,
    series: Sequence[Series],
    markers: Sequence[Marker],
    bands: Sequence[Band] = (),
) -> str:
    """Shares from 0 to 1, one line each on a plain axis; a line has a gap at None."""
    places = [_percent(place, x_max) for place in x]
    shapes = list(_polylines(places, series, lambda value: 100 - 100 * min(1.0, max(0.0, value))))
    ticks = [(100 - share, f"{share} %") for share in (0, 25, 50, 75, 100)]
    return _chart(title, note, x, x_max, series, markers, shapes, ticks, unit="%", scale=100.0, bands=bands)


def lines(
    *,
    title: str,
    note: str,
    unit: str,
    x: Sequence[float],
    x_max: float,
    series: Sequence[Series],
    markers: Sequence[Marker],
    bands: Sequence[Band] = (),
) -> str:
    """Quantities above zero on a logarithmic axis; zeros lie on its floor, and a line has a gap at None."""
    positive = [value for one in series for value in one.values if value]
    low = math.floor(math.log10(min(positive))) if positive else 0
    high = max(low + 1, math.ceil(math.log10(max(positive)))) if positive else 1

    def height(value: float) -> float:
        power = math.log10(value) if value > 0 else low
        return 100 - 100 * (power - low) / (high - low)

    shapes = list(_polylines([_percent(place, x_max) for place in x], series, height))
    every = 1 if high - low <= 5 else 2
    ticks = [(height(10.0**power), f"{10.0**power:,g}") for power in range(low, high + 1, every)]
    return _chart(title, note, x, x_max, series, markers, shapes, ticks, unit=unit, scale=1.0, bands=bands)


def _polylines(
    places: Sequence[float], series: Sequence[Series], height: Callable[[float], float]
) -> Iterator[str]:
    for one in series:
        for part in _runs(places, one.values):
            # A point between two gaps is a line too short to be seen, were it not for its round ends.
            part = part * 2 if len(part) == 1 else part
            points = " ".join(f"{place:.2f},{height(value):.2f}" for place, value in part)
            yield f'<polyline points="{points}" style="stroke:var({one.color})"/>'


def _runs(places: Sequence[float], values: Sequence[float | None]) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a gap."""
    run: list[tuple[float, float]] = []
    for place, value in zip(places, values, strict=True):
        if value is not None:
            run.append((place, value))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _percent(value: float, whole: float) -> float:
    return 100.0 * value / whole if whole > 0 else 0.0


def _chart(
    title: str,
    note: str,
    x: Sequence[float],
    x_max: float,
    series: Sequence[Series],
    markers: Sequence[Marker],
    shapes: Sequence[str],
    ticks: Sequence[tuple[float, str]],
    *,
    unit: str,
    scale: float,
    bands: Sequence[Band] = (),
) -> str:
    shade = "".join(
        f'<rect x="{_percent(band.begin, x_max):.2f}" y="0" height="100"'
        f' width="{_percent(band.end - band.begin, x_max):.2f}"><title>{escape(band.title)}</title></rect>'
        for band in bands
    )
    shade = f'<g class="band">{shade}</g>' if shade else ""
    grid = "".join(f'<line x1="0" x2="100" y1="{top:.2f}" y2="{top:.2f}"/>' for top, _ in ticks)
    y_labels = "".join(f'<span style="top:{top:.2f}%">{escape(text)}</span>' for top, text in ticks)
    step = nice_step(x_max, count=X_LABELS_MAX)
    places = [index * step for index in range(int(x_max / step + 1e-9) + 1)] if x_max > 0 else [0.0]
    x_labels = "".join(
        f'<span style="left:{_percent(place, x_max):.2f}%">{place:g}{"" if place else " s"}</span>'
        for place in places
    )
    rules = "".join(_rule(marker, x_max) for marker in markers)
    flags = "".join(_flags(markers, x_max))
    legend = "".join(
        f'<li><s style="background:var({one.color})"></s>{escape(one.name)}</li>' for one in series
    )
    data = {
        "x": [round(value, 3) for value in x],
        "max": x_max,
        "unit": unit,
        "series": [
            {
                "name": one.name,
                "color": one.color,
                "values": [None if value is None else round(value * scale, 3) for value in one.values],
            }
            for one in series
        ],
    }
    return (
        f'<figure class="chart"><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>'
        f'<ul class="legend">{legend}</ul>'
        f'<div class="frame"><div class="y">{y_labels}</div><div class="plot">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{shade}<g class="grid">{grid}</g>'
        f'{"".join(shapes)}</svg>{rules}{flags}</div><div class="x">{x_labels}</div></div>'
        f'<script type="application/json">{for_script(data)}</script></figure>'
    )


def _rule(marker: Marker, x_max: float) -> str:
    css = ' class="strong"' if marker.strong else ""
    left = min(100.0, _percent(marker.x, x_max))
    return f'<i{css} style="left:{left:.2f}%" title="{escape(marker.title)}"></i>'


def _flags(markers: Sequence[Marker], x_max: float) -> Iterator[str]:
    """One flag for markers that lie too close for one each."""
    groups: list[list[Marker]] = []
    for marker in sorted(markers, key=lambda one: one.x):
        if groups and _percent(marker.x - groups[-1][0].x, x_max) < FLAG_WIDTH_PERCENT:
            groups[-1].append(marker)
        else:
            groups.append([marker])
    for group in groups:
        text = group[0].label if len(group) == 1 else f"{group[0].label}–{group[-1].label}"
        css = ' class="strong"' if any(marker.strong for marker in group) else ""
        left = min(100.0, _percent((group[0].x + group[-1].x) / 2, x_max))
        yield f'<b{css} style="left:{left:.2f}%">{escape(text)}</b>'


def for_script(value: object) -> str:
    """JSON that can stand inside a script element, whatever text is in it."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace(">", "\\u003e")
