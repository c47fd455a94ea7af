"""Probes between real hosts: three network namespaces with two rails, a real sshd in each."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hosts import Fleet, fleet_of

from tests.waiting import WAIT_S, until

pytestmark = [pytest.mark.process, pytest.mark.slow]
PATIENT = ("--timeout", f"{WAIT_S:.0f}s")
TIMED = "round trip"  # all these hosts share one machine: when it is busy, any of them may look slow

# Whatever else this machine does, these two run: without them no link is busy. They take no more than they need.
FIRST = """
import os
try:
    os.nice(-10)
except OSError:
    pass  # then it takes a machine that is not too busy
"""
SINK = """
import socket
s = socket.create_server(("10.77.0.2", 9999)); print("up", flush=True)
c, _ = s.accept(); b = bytearray(1 << 20)
while c.recv_into(b): pass
"""
SOURCE = """
import socket
s = socket.create_connection(("10.77.0.2", 9999)); b = bytes(1 << 20); print("up", flush=True)
s.setsockopt(socket.SOL_SOCKET, 47, 400_000_000)  # SO_MAX_PACING_RATE, B/s: thrice what counts as busy on 10 Gbit/s
while True: s.sendall(b)
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three hosts, two rails; every test leaves the wires as they were."""
    with fleet_of(tmp_path_factory.mktemp("fleet"), 3, rails=2) as made:
        yield made


def _link(fleet: Fleet, *words: str) -> None:
    subprocess.run(["ip", "-n", fleet.hub, "link", "set", *words], check=True)


def _matrix(fleet: Fleet, *args: str) -> tuple[int, Any]:
    done = fleet.kvops(
        "diagnose", "matrix", "--inventory", str(fleet.inventory), *PATIENT, *args, "-o", "json"
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _commands(fleet: Fleet, name: str) -> list[str]:
    """What runs on a host now."""
    pids = subprocess.run(
        ["ip", "netns", "pids", fleet.namespace(name)], capture_output=True, text=True, check=True
    )
    found = []
    for pid in pids.stdout.split():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def test_every_pair_of_interfaces(fleet: Fleet) -> None:
    """All pairs answer by TCP, UDP and ICMP on their rail, whole packets pass, and no prober stays on a host."""
    code, document = _matrix(fleet, "--probe", "tcp,udp,icmp,mtu")

    rails = [cell for cell in document["cells"] if cell["same_rail"]]
    assert len(document["cells"]) == 3 * 2 * 2 * 2
    assert all(cell["tcp"] and cell["udp"] and cell["icmp"] for cell in rails)
    assert {cell["path_mtu"] for cell in rails} == {1500}
    assert [row for row in document["odd"] if row["metric"] != TIMED] == []
    assert code == (1 if document["odd"] else 0)
    for name in fleet.names:
        until(lambda name=name: "python3" not in _commands(fleet, name), f"no prober stays on {name}")


def test_who_stands_out_is_named(fleet: Fleet) -> None:
    """A rail that is unplugged and a port with a smaller MTU are named as that host's interfaces; the checks judge them."""
    _link(fleet, "r1h03", "nomaster")
    _link(fleet, "r0h02", "mtu", "1300")
    try:
        done = fleet.kvops(
            "diagnose",
            "--inventory",
            str(fleet.inventory),
            *PATIENT,
            "--window",
            "0s",
            "--probe",
            "tcp,udp,icmp,mtu",
            "-o",
            "json",
        )
        path = fleet.kvops(
            "diagnose",
            "path",
            "h01",
            "h02",
            "--inventory",
            str(fleet.inventory),
            *PATIENT,
            "--window",
            "0s",
            "--probe",
            "mtu",
            "-o",
            "json",
        )
    finally:
        _link(fleet, "r1h03", "master", "br1")
        _link(fleet, "r0h02", "mtu", "1500")

    document = json.loads(done.stdout)
    odd = {(row["kind"], row["name"], row["metric"]) for row in document["matrix"]["odd"]}
    odd = {row for row in odd if row[2] != TIMED}
    assert odd == {("interface", "h03 eth1", "reachability"), ("interface", "h02 eth0", "path MTU")}
    failing = {r["check"] for r in document["results"] if r["outcome"] == "fail"}
    assert {"probe.tcp_control", "probe.mtu_ladder"} <= failing
    assert done.returncode == 1
    assert {row["name"] for row in json.loads(path.stdout)["matrix"]["odd"] if row["metric"] != TIMED} == {
        "h01 eth0 → h02 eth0",
        "h02 eth0 → h01 eth0",
    }


def test_latency_bandwidth_and_incast(fleet: Fleet) -> None:
    """Round trips with jitter and loss, streams one by one, all at once and to one receiver, each within its limit."""
    _, document = _matrix(
        fleet, "--probe", "latency,bandwidth,incast", "--rate", "100Mbit/s", "--seconds", "400ms", "--yes"
    )

    rails = [cell for cell in document["cells"] if cell["same_rail"]]
    for cell in rails:
        assert 0 < cell["rtt_us"]["p50"] <= cell["rtt_us"]["p99"] <= cell["rtt_us"]["max"]
        assert cell["jitter_us"] >= 0
        assert 0 <= cell["loss_percent"] < 100
        assert 0 < cell["gbps"] < 1  # without the limit these wires carry many times that
    assert sum("gbps_together" in cell for cell in rails) == 3 * 2
    assert {run["receiver"] for run in document["incast"]} == set(fleet.names)
    assert all(run["senders"] == 2 for run in document["incast"])
    assert {"rtt_us", "jitter_us", "loss_percent", "gbps", "gbps_together"} <= set(document["percentiles"])


def test_a_busy_link_is_left_alone(fleet: Fleet) -> None:
    """While somebody's traffic fills a link, bandwidth is refused with exit code 5 and names it; --yes goes on."""
    sink = fleet.popen("h02", sys.executable, "-c", FIRST + SINK)
    source = None
    try:
        assert sink.stdout is not None
        assert sink.stdout.readline() == b"up\n"
        source = fleet.popen("h01", sys.executable, "-c", FIRST + SOURCE)
        assert source.stdout is not None
        assert source.stdout.readline() == b"up\n"
        args = ("--probe", "bandwidth", "--rate", "10Mbit/s", "--seconds", "200ms")
        refused = fleet.kvops("diagnose", "matrix", "--inventory", str(fleet.inventory), *PATIENT, *args)
        code, document = _matrix(fleet, *args, "--yes")
    finally:
        for process in (source, sink):
            if process is not None:
                process.kill()
                process.communicate()

    assert refused.returncode == 5
    assert "h01 eth0 carries" in refused.stderr
    assert "--yes" in refused.stderr
    assert code in (0, 1)
    assert any("gbps" in cell for cell in document["cells"])


def test_a_host_that_is_gone_costs_only_itself(fleet: Fleet) -> None:
    """A host that refuses is named; the pairs of the others are probed, and the page says so as well."""
    config = fleet.folder / "h03.conf"
    path = config.read_text().split("SetEnv PATH=")[1].split()[0]
    fleet.stop("h03")
    try:
        code, document = _matrix(fleet, "--probe", "tcp")
        page = fleet.kvops(
            "diagnose", "matrix", "--inventory", str(fleet.inventory), "--probe", "tcp", "-o", "html"
        )
    finally:
        fleet.start("h03", path)
        fleet._wait()

    assert [row["host"] for row in document["unreached"]] == ["h03"]
    assert {(cell["source"], cell["target"]) for cell in document["cells"]} == {
        ("h01", "h02"),
        ("h02", "h01"),
    }
    assert code == 3
    assert page.stdout.startswith("<!doctype html>")
    assert "h03" in page.stdout


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--probe", "bandwith", "--host", "h[01-02]"), "did you mean 'bandwidth'"),
        (("--probe", "tcp", "--host", "h01"), "two or more"),
        (("--probe", "tcp", "--host", "h01,h99"), "h99"),
        (
            (
                "--seconds",
                "2h",
            ),
            "200ms to 30s",
        ),
    ],
)
def test_mistakes(fleet: Fleet, args: tuple[str, ...], word: str) -> None:
    """A mistake gives exit code 2 and says what would be right."""
    done = fleet.kvops("diagnose", "matrix", "--inventory", str(fleet.inventory), *args)

    assert done.returncode == 2
    assert word in done.stderr
