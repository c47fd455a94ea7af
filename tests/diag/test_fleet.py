"""Twenty real sshd in network namespaces: who answers, who does not, and whom we refuse to believe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvops.diag.fleet import BOOT, at_once
from kvops.diag.probes import LocalTalk
from kvops.errors import Unreachable

sys.path.insert(0, str(Path(__file__).parent))
from hosts import PORT, Fleet, fleet_of, oldest_python

from tests.waiting import WAIT_S

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Twenty hosts whose only Python is the oldest that we promise to work with and find here."""
    with fleet_of(tmp_path_factory.mktemp("fleet"), 20, python=oldest_python()) as made:
        yield made


def _diagnose(fleet: Fleet, *args: str) -> tuple[int, Any]:
    done = fleet.kvops("diagnose", *args, "-o", "json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_twenty_hosts_answer(fleet: Fleet) -> None:
    """Twenty hosts named by the inventory give twenty results at once, each under its own name, nobody is missing."""
    code, document = _diagnose(
        fleet, "--inventory", str(fleet.inventory), "--window", "1s", "--timeout", "200s"
    )

    assert code in (0, 1)  # what the checks think of this machine is not the question here
    assert sorted(node["name"] for node in document["nodes"]) == fleet.names
    assert document["unreached"] == []


def test_the_dead_do_not_hold_up_the_living(fleet: Fleet) -> None:
    """Two hung hosts and one that refuses are named with the reason; the others arrive within the time."""
    hung = ["h03", "h07"]
    path = (fleet.folder / "h11.conf").read_text().split("SetEnv PATH=")[1].split()[0]
    for name in hung:
        os.kill(fleet.pids[name], signal.SIGSTOP)
    fleet.stop("h11")
    timeout_s = 30  # the living have all of it, on a busy machine as well
    try:
        began = time.monotonic()
        code, document = _diagnose(
            fleet,
            "--host",
            "h[01-07],h11",
            "--inventory",
            str(fleet.inventory),
            "--window",
            "0s",
            "--timeout",
            f"{timeout_s}s",
        )
        took_s = time.monotonic() - began
    finally:
        for name in hung:
            os.kill(fleet.pids[name], signal.SIGCONT)
        fleet.start("h11", path)
        fleet._wait()

    reasons = {row["host"]: row["reason"] for row in document["unreached"]}
    assert set(reasons) == {*hung, "h11"}
    assert [node["name"] for node in document["nodes"]] == ["h01", "h02", "h04", "h05", "h06"]
    assert "onnect" in reasons["h11"] or "refused" in reasons["h11"]
    assert code in (1, 3)
    # The deadline is the promise, not a measurement: hosts that hang cost their own time-out and no more.
    assert took_s < timeout_s + WAIT_S


def test_host_keys_are_enforced(fleet: Fleet, tmp_path: Path) -> None:
    """An unknown and a changed host key are refused, each with what to do; the hosts with the right key answer."""
    lines = fleet.known_hosts.read_text().splitlines()
    kind, blob, *_ = (fleet.folder / "other.pub").read_text().split()
    lines[0] = f"[{fleet.address('h01')}]:{PORT} {kind} {blob}"
    del lines[1]
    known = tmp_path / "known_hosts"
    known.write_text("\n".join(lines) + "\n")

    code, document = _diagnose(
        fleet,
        "--inventory",
        str(fleet.inventory),
        "--host",
        "h[01-03]",
        "--known-hosts",
        str(known),
        "--window",
        "0s",
    )

    reasons = {row["host"]: row["reason"] for row in document["unreached"]}
    assert [node["name"] for node in document["nodes"]] == ["h03"]
    assert set(reasons) == {"h01", "h02"}
    assert "not the host it says" in reasons["h01"]
    assert f"ssh-keygen -R '[{fleet.address('h01')}]:{PORT}'" in reasons["h01"]
    assert "not known" in reasons["h02"]
    assert "ssh-keyscan" in reasons["h02"]
    assert code in (1, 3)


def test_a_context_brings_its_inventory(fleet: Fleet) -> None:
    """The inventory of the context in use says how to reach a host; a name it does not have is refused, with the nearest."""
    config = fleet.folder / "config/kvops/config.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f"contexts:\n  prod:\n    inventory: {fleet.inventory}\n    environment: test\n")

    code, document = _diagnose(fleet, "-g", "prod", "--host", "h05", "--window", "0s", "--only", "time.sync")
    wrong = fleet.kvops("diagnose", "-g", "prod", "--host", "h5")

    assert [node["name"] for node in document["nodes"]] == ["h05"]
    assert code in (0, 1, 3)
    assert wrong.returncode == 2
    assert "did you mean 'h05'" in wrong.stderr


def test_old_python_is_named() -> None:
    """What is sent runs on the oldest Python here; a host whose Python is too old is told so in plain words."""
    talk = LocalTalk("here", python=oldest_python())
    try:
        answer = talk.ask("hello")
    finally:
        talk.close()
    # The same line with the version asked for out of reach: no such old Python need be installed.
    boot = BOOT.replace("(3, 8)", "(99, 0)")
    done = subprocess.run([sys.executable, "-c", boot, "0"], capture_output=True, text=True, check=False)

    assert answer["python"].startswith("3.")
    assert done.returncode != 0
    assert "or newer is needed" in done.stderr


def test_at_once_leaves_the_hung_behind() -> None:
    """More calls than run at once: each ends with its value, its error, or None when its own time is over."""
    release = threading.Event()

    def failing() -> int:
        raise Unreachable("gone", fix="")

    work: dict[str, Any] = {"hung": lambda: release.wait(WAIT_S), "bad": failing}
    work |= {f"n{i}": (lambda i=i: i) for i in range(20)}
    try:
        results = at_once(work, timeout_s=2.0, limit=3)
    finally:
        release.set()

    assert list(results) == list(work)
    assert results["hung"] is None
    assert isinstance(results["bad"], Unreachable)
    assert [results[f"n{i}"] for i in range(20)] == list(range(20))
