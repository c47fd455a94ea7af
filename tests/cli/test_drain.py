"""drain, undrain, cordon and ok-to-stop from the command line, on a real group."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvops.cli.context import Target
from kvops.cli.guard import confirm
from kvops.errors import Refused
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Run, Started


@pytest.fixture
def group(started: Started) -> Started:
    """Two stores that nobody holds, before and after."""
    lift(started.run)
    return started


def lift(run: Run) -> None:
    held = [hold["target"] for hold in document(run, "status")["holds"]]
    if held:
        assert run("undrain", *held).returncode == 0


def document(run: Run, *args: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    found: dict[str, Any] = json.loads(run(*args, "-o", "json").stdout)
    return found


def put_one(run: Run, key: str) -> str:
    """Put an object; the store that has it."""
    assert run("object", "put", key, stdin=b"x" * 1_000).returncode == 0
    store: str = document(run, "object", "stat", key)["objects"][0]["store"]
    return store


@pytest.mark.process
def test_a_drain_from_price_to_receipt(group: Started) -> None:
    """It says what it costs, waits until nothing is left, and status shows the hold and its reason."""
    run = group.run
    name = put_one(run, "drain/a")

    done = run("drain", name, "--reason", "INC-4412")
    status = run("status", "-o", "json")

    assert done.returncode == 0, done.stderr
    assert "holds   1 object" in done.stderr
    assert "hidden    1 store in" in done.stderr
    assert "counted again: 0 left" in done.stderr
    assert "SAFE TO POWER OFF" in done.stderr
    (hold,) = json.loads(status.stdout)["holds"]
    assert (hold["target"], hold["kind"], hold["state"], hold["left"]) == (name, "drain", "drained", 0)
    assert hold["reason"] == "INC-4412"
    assert status.returncode == 1, "a pool without one of its stores is degraded"
    reason = next(one for one in json.loads(status.stdout)["reasons"] if one["subject"] == name)
    assert (reason["code"], "INC-4412" in reason["text"]) == ("store.draining", True)


@pytest.mark.process
def test_json_of_a_drain_and_of_its_repetition(group: Started) -> None:
    """The keys that scripts rely on are there, a repeated drain shows the first one's figures, undrain lifts it."""
    run = group.run
    name = put_one(run, "drain/b")

    first = document(run, "drain", name)
    again = document(run, "drain", name)

    for found in (first, again):
        (row,) = found["targets"]
        assert (row["target"], row["state"], row["swept"], row["left"]) == (name, "drained", 1, 0)
        assert (found["objects_at_call"], found["swept"], found["left"], found["migrated"]) == (1, 1, 0, 0)
        assert (found["state"], found["hold"]) == ("drained", first["hold"])
        assert found["call_ms"] > 0
    assert (first["unchanged"], again["unchanged"]) == ([], [name])
    assert run("object", "get", "drain/b").returncode == 1
    assert document(run, "undrain", name)["targets"][0]["state"] == "lifted"


@pytest.mark.process
def test_the_last_store_is_refused(group: Started) -> None:
    """A drain that leaves nothing is exit code 5 with the way around it, ok-to-stop says no; forced, it is done."""
    run = group.run
    both = run("drain", "store-[0-1]")
    asked = run("ok-to-stop", "store-0,store-1")

    assert both.returncode == 5
    assert "--force last-store" in both.stderr
    assert "unsafe  no store would be left" in both.stderr
    assert asked.returncode == 1
    assert document(run, "status")["holds"] == []
    assert run("ok-to-stop", "store-0").returncode == 0
    assert document(run, "drain", "store-[0-1]", "--force", "last-store")["state"] == "drained"
    assert run("drain", "store-0", "--force", "quorum").returncode == 2


@pytest.mark.process
def test_dry_runs_change_nothing(group: Started) -> None:
    """Each prints its steps or rows, and nothing is held afterwards; where it would be refused, it says so."""
    run = group.run
    steps = document(run, "drain", "host-0", "--dry-run")["steps"]

    assert any("hide store-0" in step for step in steps)
    assert run("drain", "store-[0-1]", "--dry-run").returncode == 5
    assert document(run, "cordon", "store-0", "--dry-run")["targets"][0]["target"] == "store-0"
    assert document(run, "status")["holds"] == []


@pytest.mark.process
def test_cordon(group: Started) -> None:
    """A cordoned store stays healthy and is listed as held; undrain ends that, and again is a success too."""
    run = group.run
    held = document(run, "cordon", "store-1", "--reason", "new NIC")
    status = run("status", "-o", "json")
    shown = {
        line.split("\t")[0]: line.split("\t")[3]
        for line in run("status", "-o", "tsv").stdout.splitlines()[1:]
    }

    assert (held["state"], held["targets"][0]["reason"]) == ("cordoned", "new NIC")
    assert shown["store-1"] == "cordoned"
    assert status.returncode == 0
    assert [hold["kind"] for hold in json.loads(status.stdout)["holds"]] == ["cordon"]
    assert run("undrain", "store-1").returncode == 0
    assert document(run, "undrain", "store-1")["unchanged"] == ["store-1"]


@pytest.mark.process
@pytest.mark.parametrize("command", ["drain", "undrain", "cordon", "ok-to-stop"])
def test_unknown_targets(group: Started, command: str) -> None:
    """A name that nobody has is exit code 2, and nothing is done to the others that were named."""
    done = group.run(command, "store-0", "store-77")

    assert done.returncode == 2
    assert "store-77" in done.stderr
    assert document(group.run, "status")["holds"] == []


@pytest.mark.process
def test_ctrl_c_stops_watching_not_the_drain(group: Started) -> None:
    """Interrupted while readers' leases last, the command ends with 130 and the drain goes on to its end."""
    run = group.run
    name = put_one(run, "ctrl/c")
    assert run("object", "get", "ctrl/c").returncode == 0  # a lease of a second
    argv = [sys.executable, "-m", "kvops", "drain", name]
    with subprocess.Popen(argv, env=group.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b"hidden" in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_S)

    assert process.returncode in (130, 0)  # 0: it was done before the signal came
    assert document(run, "drain", name)["state"] == "drained"


@pytest.mark.process
def test_no_group(run: Run) -> None:
    """Without a group that runs there is nobody to ask: exit code 3."""
    assert run("drain", "store-0").returncode == 3


PROD = "contexts: {prod: {masters: ['%s'], control: ['%s'], environment: production, secret_file: %s}}\n"


@pytest.fixture
def prod(group: Started, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody for whom that group runs elsewhere, unprotected."""
    (master,) = document(group.run, "status")["masters"]
    secret = next((group.folder / "state").rglob("secret*"))
    path = tmp_path / "config/kvops/config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(PROD % (master["address"], master["control"], secret))
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "KVOPS_STATE_DIR": str(tmp_path / "none")}


@pytest.mark.process
def test_half_a_pool_is_asked_for(group: Started, prod: dict[str, str]) -> None:
    """More than a fifth of a group elsewhere: refused at once without a terminal, done with --yes."""
    refused = group.run("-g", "prod", "drain", "store-0", env=prod)
    done = group.run("-g", "prod", "drain", "store-0", "--yes", "-o", "json", env=prod)

    assert refused.returncode == 5
    assert "50% of its capacity" in refused.stderr
    assert "--yes" in refused.stderr
    assert json.loads(done.stdout)["state"] == "drained"


@pytest.mark.parametrize(("answer", "goes_on"), [(b"prod\n", True), (b"yes\n", False)], ids=["name", "yes"])
def test_the_groups_name_is_the_answer(answer: bytes, goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only the group's own name lets a protected group be changed."""
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "r") as stdin, os.fdopen(controller, "wb", buffering=0) as keys:
        monkeypatch.setattr(sys, "stdin", stdin)
        keys.write(answer)
        target = Target(name="prod", environment="production", protect=True)
        if goes_on:
            confirm(target, "all of it", yes=False)
        else:
            with pytest.raises(Refused, match="not confirmed"):
                confirm(target, "all of it", yes=False)
