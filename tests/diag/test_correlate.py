"""What moved together with what: the numbers, and that the words never say more than they do."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvops.diag import textfile
from kvops.diag.correlate import chance, ranks, relations, spearman
from kvops.diag.runner import select
from kvops.diag.scrape import Totals, checked_urls, parse, scrape, totals
from kvops.diag.watch import Watch, together
from kvops.errors import Unreachable, UsageError

sys.path.insert(0, str(Path(__file__).parent))
from world import World


def test_ranks_share_ties() -> None:
    """Equal values share the mean of their ranks."""
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=60))
@settings(max_examples=80, deadline=None)
def test_rank_correlation_knows_order_alone(pairs: list[tuple[int, int]]) -> None:
    """It lies between -1 and 1, is the same both ways, and does not change when values are stretched."""
    xs, ys = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]

    rho = spearman(xs, ys)

    assert rho is None or -1 <= rho <= 1
    assert rho == pytest.approx(spearman(ys, xs))
    assert rho == pytest.approx(spearman([x**3 for x in xs], ys))


def _series(n: int = 60, *, seed: int = 7) -> list[float]:
    source = random.Random(seed)
    return [source.random() for _ in range(n)]


@pytest.mark.parametrize(
    ("sign", "speed", "word"),
    [
        (_series(), [-v for v in _series()], "it was slower"),
        (_series(), _series(), "no harm seen"),
        (_series(), _series(seed=8), "no relation seen"),
        ([0.0] * 60, _series(), "did not change"),
        (_series(10), [-v for v in _series(10)], "10 windows, 20 are needed"),
    ],
    ids=["slower", "load", "unrelated", "flat", "few"],
)
def test_the_words(sign: list[float], speed: list[float], word: str) -> None:
    """Each case has its own words with the number of windows; where something moved together, cause is denied."""
    (relation,) = relations({"pfc": sign, "speed": speed})

    assert word in relation.verdict
    assert str(relation.n) in relation.verdict
    if word == "it was slower":
        assert "no proof of cause" in relation.verdict
        assert relation.rho == -1.0
        assert relation.p is not None
        assert relation.p < 0.001


def test_windows_that_were_not_seen_do_not_count() -> None:
    """A window in which one of the two was not seen is left out, and the number says so."""
    values: list[float | None] = [*_series(30)]
    values[3:8] = [None] * 5

    assert relations({"cnp": values, "ttft": _series(30)})[0].n == 25


def test_slow_drifts_count_as_few() -> None:
    """Two series that each drift slowly look alike by chance: they are told from independent windows."""
    slow = [float(i // 15) for i in range(60)]
    quick = [float((i * 37) % 60) for i in range(60)]

    assert chance(slow, slow, 0.5) > chance(quick, quick, 0.5)


PAGE = """# TYPE kvops_store_read_bytes counter
kvops_store_read_bytes_total{transport="tcp"} 1000
kvops_store_read_bytes_total{transport="shm"} 500.0
kvops_store_written_bytes_total 1e3
vllm:time_to_first_token_seconds_sum{model_name="a b} c"} 2.5
vllm:time_to_first_token_seconds_count{model_name="a b} c"} 10
vllm:time_to_first_token_seconds_bucket{le="0.1"} 4
other NaN
half a line
"""


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    """A page of metrics on loopback."""
    with HTTPServer(("127.0.0.1", 0), _Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_pages_are_summed(server: str) -> None:
    """Counters are summed over labels and pages; a page that does not answer is named and costs nothing else."""
    urls = checked_urls([server, "127.0.0.1:9/metrics"])

    found = scrape(urls)

    assert (found.moved_bytes, found.first_token_s, found.first_tokens) == (2500.0, 2.5, 10.0)
    assert len(found.unseen) == 1
    assert "127.0.0.1:9" in found.unseen[0]


@given(st.text(max_size=300))
@settings(max_examples=80, deadline=None)
def test_any_page_can_be_read(text: str) -> None:
    """Whatever a page holds, reading it gives sums or nothing."""
    assert all(value == value for value in parse(text).values())
    totals([parse(text)])


@pytest.mark.parametrize(
    "text", ["file:///etc/passwd", "http://", "ftp://a/metrics", "http://u@h/metrics", "a b"]
)
def test_addresses_of_metrics(text: str) -> None:
    """Only http and https addresses are asked."""
    with pytest.raises(UsageError):
        checked_urls([text])


class Passing:
    """A clock that each window moves on by its own length."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_watch_says_what_moved_together(tmp_path: Path) -> None:
    """When CNPs grow while the pool slows down, the watch ends with that relation, its windows and no claim of cause."""
    loads = iter(_series(30))
    clock = Passing()
    moved = 0.0

    def collect(window_s: float) -> dict[str, bytes]:
        nonlocal moved
        clock.now_s += window_s
        load = next(loads)
        moved += 1e9 * (1 - load)
        snapshot = World().grow("np_cnp_sent", int(load * 10_000)).snapshot()
        return {**snapshot.files._files, "meta.json": json.dumps(snapshot.meta).encode()}  # type: ignore[attr-defined]

    watch = Watch(
        duration_s=25,
        every_s=1,
        selected=select(["ctr.timeout_rate"]),
        collect=collect,
        scrape=lambda: Totals(moved_bytes=moved),
        clock=clock,
    )
    rows = list(watch.rows())
    textfile.write(tmp_path / "kvops.prom", watch.results, watch.rates)

    found = {row["subject"]: row for row in rows if row["event"] == "correlation"}
    assert sum(row["event"] == "pool" for row in rows) == 25
    assert found["cnp ~ speed"]["n"] == 25
    assert found["cnp ~ speed"]["rho"] < -0.9
    assert "no proof of cause" in found["cnp ~ speed"]["text"]
    assert "cnp ~ ttft" not in found
    assert any(row["event"] == "unseen" and "first token" in row["text"] for row in rows)
    text = (tmp_path / "kvops.prom").read_text()
    assert 'kvops_diag_port_bits_per_second{port="mlx5_0/1",direction="sent"}' in text


def test_watch_says_what_it_cannot_see() -> None:
    """On a host without RDMA, one line says that there is nothing to watch; it is not repeated each window."""
    clock = Passing()
    meta = {"schema": 1, "scope": ["/sys/class/infiniband"], "samples": [{"t": 0}, {"t": 1}]}

    def collect(window_s: float) -> dict[str, bytes]:
        clock.now_s += window_s
        return {"meta.json": json.dumps(meta).encode()}

    rows = list(Watch(duration_s=3, every_s=1, selected=[], collect=collect, clock=clock).rows())

    assert [row["subject"] for row in rows] == ["this host", "correlation", "correlation"]
    assert {row["event"] for row in rows} == {"unseen"}


def test_hosts_are_watched_together() -> None:
    """Two hosts' rows carry their names; one that cannot be collected says so once and holds the other up for nothing."""
    paused: list[float] = []

    def watch(name: str, well: bool) -> Watch:
        clock = Passing()

        def collect(window_s: float) -> dict[str, bytes]:
            clock.now_s += window_s
            if not well:
                raise Unreachable(f"{name}: no route to host", fix="")
            snapshot = World().snapshot()
            return {**snapshot.files._files, "meta.json": json.dumps(snapshot.meta).encode()}  # type: ignore[attr-defined]

        return Watch(
            duration_s=3, every_s=1, selected=[], collect=collect, clock=clock, name=name, pause=paused.append
        )

    rows = list(together({"a": watch("a", True), "b": watch("b", False)}))

    assert {row["host"] for row in rows if row["event"] == "rate"} == {"a"}
    assert [row["text"] for row in rows if row["host"] == "b"] == [
        "b: no route to host: no word about that time"
    ]
    assert paused == [1, 1, 1]
