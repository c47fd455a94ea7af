"""Several masters from the command line: what operators ask, and what they see when nobody may lead."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, environment, runner
from tests.pool import until

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd: apt-get install etcd-server"
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two masters, a store and an etcd of its own."""
    run = runner(environment(tmp_path))
    try:
        started = run("start", "--masters", "2", "--etcd", "auto", "--stores", "1", "--segment-size", "16MiB")
        assert started.returncode == 0, started.stderr
        yield run
    finally:
        run("stop", "--now")


def masters(run: Run) -> dict[str, dict[str, Any]]:
    """Rows of ``kvops status``, by role."""
    rows: list[dict[str, Any]] = json.loads(run("status", "-o", "json").stdout)["masters"]
    return {row["role"] or "down": row for row in rows}


def test_operators_see_through_to_every_master(run: Run) -> None:
    """Events of every leader, masters alone as targets, refusals beside a leader; and then the way out without one."""
    until(lambda: (rows := masters(run)) and rows.get("standby", {}).get("promotable"), "both could lead")
    first, second = masters(run)["leader"]["name"], masters(run)["standby"]["name"]
    assert run("master", "step-down").returncode == 0
    until(lambda: masters(run).get("leader", {}).get("name") == second, "the other one leads")
    events = json.loads(run("events", "-o", "json").stdout)["events"]
    assert [one["subject"] for one in events if one["event"] == "master.elected"] == [first, second]

    until(lambda: run("ok-to-stop", second).returncode == 0, "one of two may be stopped")
    assert run("ok-to-stop", first, second).returncode == 1
    refused = run("master", "promote", first, "--force", "in-sync")
    assert (refused.returncode, f"{second} leads" in refused.stderr) == (5, True)

    os.kill(masters(run)["standby"]["pid"], signal.SIGKILL)
    until(lambda: run("ok-to-stop", second).returncode == 1, "only the leader is in the set")
    os.kill(masters(run)["leader"]["pid"], signal.SIGKILL)
    assert run("restart", first).returncode in (0, 1, 3)

    def stuck() -> list[dict[str, Any]]:
        said = json.loads(run("status", "-o", "json").stdout)
        return [one for one in said["reasons"] if one["code"] == "master.no_candidate"]

    (reason,) = until(stuck, "status says why nobody leads")
    command = f"kvops master promote {first} --force in-sync"
    assert command in reason["text"]
    assert run("master", "promote", first).returncode == 5
    done = run(*command.split()[1:])
    assert done.returncode == 0, done.stderr
    assert masters(run)["leader"]["name"] == first
