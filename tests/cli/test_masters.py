"""Several masters from the command line: what operators ask, and what they see when nobody may lead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, environment, runner
from tests.etcd import EtcdCluster, authority, needs_etcd
from tests.waiting import until

pytestmark = [needs_etcd, pytest.mark.process]


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


def wait(condition: Callable[[], Any], what: str) -> Any:
    """As ``until``, for conditions that are a command each."""
    return until(condition, what, timeout_s=60)


def test_operators_see_through_to_every_master(run: Run) -> None:
    """Events of every leader, masters alone as targets, refusals beside a leader; and then the way out without one."""
    wait(lambda: (rows := masters(run)) and rows.get("standby", {}).get("promotable"), "both could lead")
    assert run("master", "step-down").returncode == 0
    events: list[dict[str, Any]] = wait(lambda: elections(run), "two have led")
    assert {one["subject"] for one in events} == {"master-0", "master-1"}
    assert [one["time"] for one in events] == sorted(one["time"] for one in events)

    wait(lambda: run("ok-to-stop", "master-0").returncode == 0, "one of two may be stopped")
    assert run("ok-to-stop", "master-0", "master-1").returncode == 1
    rows = wait(
        lambda: (rows := masters(run)) and rows.keys() == {"leader", "standby"} and rows, "one follows"
    )
    lost, kept = rows["leader"], rows["standby"]
    refused = run("master", "promote", kept["name"], "--force", "in-sync")
    assert (refused.returncode, "leads" in refused.stderr) == (5, True)

    os.kill(kept["pid"], signal.SIGKILL)
    wait(lambda: run("ok-to-stop", lost["name"]).returncode == 1, "only the leader is in the set")
    os.kill(lost["pid"], signal.SIGKILL)
    assert run("restart", kept["name"]).returncode in (1, 3)

    def stuck() -> list[dict[str, Any]]:
        said = json.loads(run("status", "-o", "json").stdout)
        return [one for one in said["reasons"] if one["code"] == "master.no_candidate"]

    (reason,) = wait(stuck, "status says why nobody leads")
    command = f"kvops master promote {kept['name']} --force in-sync"
    assert command in reason["text"]
    assert run("master", "promote", kept["name"]).returncode == 5
    done = run(*command.split()[1:])
    assert done.returncode == 0, done.stderr
    wait(lambda: masters(run).get("leader", {}).get("name") == kept["name"], "it leads")


def elections(run: Run) -> list[dict[str, Any]]:
    """Elections that ``kvops events`` tells of, once both masters have won one."""
    events: list[dict[str, Any]] = json.loads(run("events", "-o", "json").stdout)["events"]
    found = [one for one in events if one["event"] == "master.elected"]
    return found if len({one["subject"] for one in found}) == 2 else []


def test_an_etcd_with_tls_and_a_password(tmp_path: Path) -> None:
    """The right CA and password start a group; each that is wrong is named, and nothing is left running."""
    run = runner(environment(tmp_path))
    wrong_ca, _, _ = authority(tmp_path, "wrong")
    (tmp_path / "right").write_text("right\n")
    (tmp_path / "wrong").write_text("wrong\n")
    with closing(EtcdCluster(members=1, tls=True)) as etcd:
        etcd.demand_password("right")

        def start(ca: Path, password: str) -> subprocess.CompletedProcess[str]:
            login = ["--etcd-user", "root", "--etcd-password-file", str(tmp_path / password)]
            url = f"https://{etcd.endpoints[0]}"
            return run(
                "start",
                "--masters",
                "2",
                "--etcd",
                url,
                "--etcd-ca",
                str(ca),
                *login,
                "--segment-size",
                "16MiB",
            )

        bad_ca, bad_password = start(wrong_ca, "right"), start(etcd.ca, "wrong")
        assert (bad_ca.returncode, "check the endpoints, and TLS" in bad_ca.stderr) == (3, True)
        assert (bad_password.returncode, "turned us away" in bad_password.stderr) == (3, True)
        assert run("start", "--masters", "2", "--etcd", f"https://{etcd.endpoints[0]}").returncode == 2
        try:
            good = start(etcd.ca, "right")
            assert good.returncode == 0, good.stderr
            wait(lambda: set(masters(run)) == {"leader", "standby"}, "one leads and one follows")
        finally:
            assert run("stop", "--now").returncode == 0
