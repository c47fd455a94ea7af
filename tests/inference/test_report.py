"""The HTML report."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import UsageError
from kvops.inference.charts import nice_step, number
from kvops.inference.outfile import check_writable
from kvops.inference.report import render, write_report
from kvops.inference.results import FAILED, ReplayEvent

from .test_results import result_of

VOID = {"meta", "br", "line", "polygon", "polyline"}


class Page(HTMLParser):
    """Collects text, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += f" {data} "


def test_the_report_says_what_happened() -> None:
    """Ratio, fault, recovery, losses and events are on the page, and it fetches nothing from anywhere."""
    result = result_of([1.0] * 100 + [0.5] * 60 + [1.0] * 100, fault_at=100)
    text = render(result, title="a trace")
    page = Page(text)

    for wanted in (
        "a trace",
        "88.5 %",
        "store-1 killed after 100 s",
        "50.0 % at worst",
        "MISS",
        "30,000",
        "fault.killed",
    ):
        assert wanted in page.text
    assert not re.search(r"https?://|@import|url\(", text)
    assert not {name for name, _ in page.attributes} & {"src", "href"}


def test_words_from_elsewhere_cannot_become_markup() -> None:
    """Names, reasons and titles are text, wherever they stand, in scripts too."""
    evil = "</script><script>alert(1)</script><img src=x>"
    result = result_of([0.5] * 40, fault_at=10)
    result.reasons[1] = evil
    result.parameters[evil] = evil
    result.events.append(ReplayEvent(at_s=1.0, trace_s=1.0, event=evil, subject=evil, detail=evil))

    text = render(result, title=evil)
    page = Page(text)

    assert "alert(1)" in page.text
    assert text.count("<script") == text.count("</script>") == 4  # three charts' figures, one for the pointer
    assert "<img" not in text


def test_the_figures_under_the_pointer_are_those_of_the_chart() -> None:
    """What the script reads is valid JSON with as many values as places."""
    text = render(result_of([0.5] * 200), title="t")
    charts = [
        json.loads(found) for found in re.findall(r'<script type="application/json">(.*?)</script>', text)
    ]

    assert len(charts) == 3
    for chart in charts:
        assert chart["x"]
        assert all(len(series["values"]) == len(chart["x"]) for series in chart["series"])
    shares = np.array([series["values"] for series in charts[0]["series"]])
    assert shares.sum(axis=0) == pytest.approx(100.0, abs=0.01)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_short_replays_have_a_report_too(count: int) -> None:
    """One request is enough; none answered is said instead of drawn."""
    result = result_of([0.0] * count)
    Page(render(result, title="t"))
    result.rows["state"] = FAILED

    assert "No request was answered" in Page(render(result, title="t")).text


def test_where_nothing_was_read_the_line_has_a_gap() -> None:
    """A stretch without reads is none of 1 ms: the line stops before it and begins anew behind it."""
    reads = [5.0] * 80 + [0.0] * 40 + [5.0] * 80
    text = render(result_of([1.0] * 200, read_ms=reads), title="t")
    chart = text.split('<figure class="chart">')[2]
    (figures,) = re.findall(r'<script type="application/json">(.*?)</script>', chart)
    values = json.loads(figures)["series"][0]["values"]

    assert "Time to read" in chart
    assert values == [5.0] * 4 + [None] * 2 + [5.0] * 4
    assert chart.count("<polyline") == 4
    assert all("," in points for points in re.findall(r'<polyline points="([^"]*)"', chart))


def test_tables_carry_their_columns_names_for_narrow_screens() -> None:
    """Where a table is stacked, each figure says what it is."""
    text = render(result_of([0.5] * 40, fault_at=10), title="t")

    assert 'data-name="tokens"' in text
    assert 'data-name="in the trace"' in text
    assert "@media (max-width:480px){.stack" in text


def test_many_events_stay_readable() -> None:
    """Charts carry a few markers, the fault among them; the table says how many rows it leaves out."""
    result = result_of([1.0] * 50, fault_at=40)
    result.events[:0] = [
        ReplayEvent(at_s=i / 100, trace_s=0.0, event="breaker.opened", subject=f"store-{i}")
        for i in range(300)
    ]

    text = render(result, title="t")

    assert "… and 101 more" in text
    assert text.count("<i ") <= 9 * 3
    assert 'title="fault.killed store-1"' in text


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A place where no file can be is an error that names it, with a way out; no folder is made unasked."""
    path = tmp_path / "a" / "r.html"
    with pytest.raises(UsageError, match=f"there is no folder {path.parent}") as caught:
        check_writable(str(path), what="the report")
    assert caught.value.fix == f"make it: mkdir -p {path.parent}"
    assert not path.parent.exists()
    path.parent.mkdir()
    write_report(str(path), result_of([1.0] * 5), title="t")

    assert [file.name for file in path.parent.iterdir()] == ["r.html"]
    with pytest.raises(UsageError, match=r"the report .* cannot be written: .*folder"):
        write_report(str(path / "below-a-file.html"), result_of([1.0]), title="t")
    for wrong in (path / "x.html", path.parent):
        with pytest.raises(UsageError, match="cannot be written"):
            check_writable(str(wrong), what="the report")
    check_writable(str(path), what="the report")
    assert path.read_text().startswith("<!doctype html>")


@given(span=st.floats(1e-6, 1e9), count=st.integers(1, 12))
def test_axis_steps_are_round_and_few(span: float, count: int) -> None:
    """A step is 1, 2 or 5 times a power of ten, and no more of them fit than asked for."""
    step = nice_step(span, count=count)

    assert span / step <= count * (1 + 1e-6)
    assert float(f"{step:.6e}".partition("e")[0]) in (1.0, 2.0, 5.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12345.6, "12,346"), (99.94, "99.9"), (1.234, "1.23"), (0.01234, "0.0123")]
)
def test_numbers_have_three_digits_that_matter(value: float, text: str) -> None:
    """Neither false precision nor a figure rounded to nothing."""
    assert number(value) == text
