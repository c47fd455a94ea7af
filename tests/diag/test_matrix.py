"""A matrix of probes judged: who stands out, and that nobody else does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from browser import in_browser
from hypothesis import given
from hypothesis import strategies as st

from kvops.diag import render_matrix
from kvops.diag.matrix import Cell, GidPair, Matrix, document, odd_ones, percentiles, records, rounds

HOSTS = ["a", "b", "c", "d"]


def _matrix(
    change: Callable[[Cell], Any] = lambda cell: None, *, hosts: list[str] = HOSTS, rails: int = 2
) -> Matrix:
    """All well, but for what ``change`` does to a cell."""
    cells = []
    for source in hosts:
        for target in hosts:
            for rail in range(rails if source != target else 0):
                cell = Cell(
                    source=source,
                    source_netdev=f"eth{rail}",
                    source_address=f"10.0.{rail}.{hosts.index(source)}",
                    target=target,
                    target_netdev=f"eth{rail}",
                    target_address=f"10.0.{rail}.{hosts.index(target)}",
                    tcp=True,
                    udp=True,
                    icmp=True,
                    rtt_us={"p50": 300.0, "p99": 400.0, "p999": None, "max": 500.0},
                    loss_percent=0.0,
                    path_mtu=9000,
                    mtu_steps={"9000": True},
                    gbps=90.0,
                )
                change(cell)
                cells.append(cell)
    return Matrix(probes=("tcp",), hosts=hosts, cells=cells)


def _dead(cell: Cell) -> None:
    cell.tcp = cell.udp = cell.icmp = False
    cell.rtt_us = cell.path_mtu = cell.gbps = cell.mtu_steps = None


def _host_dead(cell: Cell) -> None:
    if "c" in (cell.source, cell.target):
        _dead(cell)


def _nic_dead(cell: Cell) -> None:
    if "c eth1" in (cell.source_end, cell.target_end):
        _dead(cell)


def _deaf(cell: Cell) -> None:
    if cell.target == "b":
        _dead(cell)


def _pair_dead(cell: Cell) -> None:
    if cell.name == "a eth0 → b eth0":
        cell.udp = False


def _slow_sender(cell: Cell) -> None:
    if cell.source == "d":
        cell.gbps = 30.0


def _slow_nic(cell: Cell) -> None:
    if "d eth1" in (cell.source_end, cell.target_end):
        cell.rtt_us = {"p50": 900.0, "p99": 1000.0}


def _slow_verbs(cell: Cell) -> None:
    cell.verbs_rtt_us = {"p50": 50.0 if "a" in (cell.source, cell.target) else 8.0}


def _short(cell: Cell) -> None:
    if cell.target_end == "a eth0":
        cell.path_mtu = 1500


def _lossy(cell: Cell) -> None:
    if cell.name == "a eth1 → d eth1":
        cell.loss_percent = 2.0


def _wrong(cell: Cell) -> None:
    if cell.name == "b eth0 → a eth0":
        cell.verbs, cell.verbs_mismatches = True, 3


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        (lambda cell: None, set()),
        (_host_dead, {("host", "c", "reachability")}),
        (_nic_dead, {("interface", "c eth1", "reachability")}),
        (_deaf, {("receiver", "b", "reachability")}),
        (_pair_dead, {("pair", "a eth0 → b eth0", "reachability")}),
        (_slow_sender, {("sender", "d", "bandwidth")}),
        (_slow_nic, {("interface", "d eth1", "round trip")}),
        (_slow_verbs, {("host", "a", "verbs round trip")}),
        (_short, {("receiver", "a eth0", "path MTU")}),
        (_lossy, {("pair", "a eth1 → d eth1", "loss")}),
        (_wrong, {("pair", "b eth0 → a eth0", "integrity")}),
    ],
    ids=[
        "well",
        "host",
        "nic",
        "deaf",
        "pair",
        "slow sender",
        "slow nic",
        "slow verbs",
        "mtu",
        "loss",
        "bytes",
    ],
)
def test_who_stands_out(change: Callable[[Cell], Any], odd: set[tuple[str, str, str]]) -> None:
    """Each fault names the widest thing that explains it, once, and nobody who is well."""
    matrix = _matrix(change)

    assert {(o.kind, o.name, o.metric) for o in odd_ones(matrix)} == odd


def test_between_two_hosts_nobody_is_blamed() -> None:
    """With two hosts alone, the pair is named: whose fault it is cannot be told."""
    matrix = _matrix(_host_dead, hosts=["a", "c"], rails=1)

    assert {o.kind for o in odd_ones(matrix)} == {"pair"}


def test_a_rail_only_fabric_is_by_design() -> None:
    """Interfaces of different rails that do not answer each other stand out to nobody; the check for rails sees them."""
    matrix = _matrix()
    matrix.cells.append(
        Cell(
            source="a",
            source_netdev="eth0",
            source_address="10.0.0.0",
            target="b",
            target_netdev="eth1",
            target_address="10.0.1.1",
            same_rail=False,
            icmp=False,
        )
    )

    assert odd_ones(matrix) == []
    assert {"probe": "icmp", "netdev": "eth0", "address": "10.0.1.1", "answered": False} in records(matrix)[
        "a"
    ]


def test_slow_memory_of_one_node() -> None:
    """A NUMA node that copies at half the others' speed is named."""
    matrix = Matrix(probes=("memory",), hosts=HOSTS, cells=[])
    for host in HOSTS:
        matrix.self_tests[host] = {"memory": {"rows": [{"node": n, "gib_s": 10.0} for n in (0, 1)]}}
    matrix.self_tests["b"]["memory"]["rows"][1]["gib_s"] = 5.0

    assert [o.name for o in odd_ones(matrix)] == ["b node 1"]


@given(st.integers(2, 40))
def test_rounds_hold_every_pair_once(count: int) -> None:
    """Every pair plays once, and nobody plays twice in a round."""
    plan = rounds(count)

    assert sorted(pair for turn in plan for pair in turn) == list(combinations(range(count), 2))
    for turn in plan:
        players = [player for pair in turn for player in pair]
        assert len(players) == len(set(players))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200))
def test_percentiles_are_values(values: list[float]) -> None:
    """Each percentile is one of the values, in order, and the last is the largest."""
    found = list((percentiles(values) or {}).values())

    assert found == sorted(found)
    assert set(found) <= set(values)
    assert found[-1] == max(values)


def test_it_can_be_read() -> None:
    """Grid, page and document name the odd one out; text of a strange machine cannot steer terminal or page."""
    matrix = _matrix(_nic_dead)
    matrix.cells[0].error = "<script>\x1b[2J"
    matrix.cells[0].tcp = False
    matrix.unreached = [("e", "no <b>answer</b>")]

    text = "\n".join(render_matrix.lines(matrix))
    page = render_matrix.page(matrix)

    assert "interface c eth1" in text
    assert "✗ 1/2" in text
    assert "\x1b" not in text
    assert "<script>" not in page
    assert "<b>answer" not in page
    assert "c eth1" in page
    assert document(matrix)["odd"][0]["name"] == "c eth1"


@pytest.mark.process
@pytest.mark.parametrize("width", [360, 1280])
def test_matrix_in_a_browser(tmp_path: Path, width: int) -> None:
    """With many hosts, long names and long errors nothing sticks out sideways but what scrolls, and no link is dead."""
    hosts = [f"gpu-{n:03}.rack-{n % 4}.example.internal" for n in range(20)]
    matrix = _matrix(_some_of_all, hosts=hosts)
    matrix.unreached = [("gpu-099", "connect: " + "x" * 300)]

    seen = in_browser(render_matrix.page(matrix), width, tmp_path)

    assert (seen["over"], seen["wide"], seen["dead"]) == (0, [], [])


def _some_of_all(cell: Cell) -> None:
    """One of each kind of trouble, with words as long as kernels and tools make them."""
    if "gpu-003" in cell.source and "gpu-004" in cell.target:
        _dead(cell)
        cell.error = "y" * 200
    if "gpu-007" in cell.source:
        _slow_nic(cell)
        cell.gbps = 20.0
    if "gpu-009" in cell.target:
        cell.gids = [
            GidPair(
                source_index=3,
                target_index=3,
                kind="RoCE v2, IPv4",
                by_design=False,
                answered=False,
                error="z" * 90,
            ),
            GidPair(
                source_index=1,
                target_index=1,
                kind="RoCE v2, link-local",
                by_design=True,
                answered=True,
                rtt_us=9.0,
            ),
        ]


def test_a_silent_gid_is_named_by_its_interface() -> None:
    """Where one GID of one interface answers nobody, that interface is named once, not each pair."""
    matrix = _matrix(_some_of_all, hosts=["a", "b", "gpu-009"])
    for cell in matrix.cells:
        if cell.source == "gpu-009":
            cell.gids = [
                pair.turned()
                for other in matrix.cells
                if (other.source_end, other.target_end) == (cell.target_end, cell.source_end)
                for pair in other.gids
            ]
        elif cell.target != "gpu-009":
            cell.gids = [
                GidPair(source_index=3, target_index=3, kind="RoCE v2, IPv4", by_design=False, answered=True)
            ]

    named = sorted((odd.kind, odd.name) for odd in odd_ones(matrix))
    assert named == [("interface", "gpu-009 eth0"), ("interface", "gpu-009 eth1")]
