"""``kvops chaos run`` with what people get wrong, and with what breaks meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvops.chaos.faults.net import netem_missing
from kvops.chaos.history import read_run
from kvops.chaos.ledger import Book
from kvops.chaos.model import State
from kvops.chaos.runner import one_at_a_time
from kvops.chaos.steps import RestoreFile
from tests.cli.conftest import Run, Started
from tests.waiting import WAIT_S, until

PAUSE = ("process_pause", {})
FAULTS = "kvops.chaos.faults"
BLIND_AFTER = {"probe": "telemetry_age", "above": "1200ms", "times": 3, "every": "200ms"}


def call(func: str, arguments: dict[str, Any], module: str = FAULTS) -> dict[str, Any]:
    """An action that calls a function."""
    provider = {"type": "python", "module": module, "func": func, "arguments": arguments}
    return {"type": "action", "provider": provider}


def written(folder: Path, *faults: tuple[str, dict[str, Any]], **ours: Any) -> str:
    """The file of one short experiment; ``ours`` are parts of its ``kvops`` block."""
    block = {
        "pool": {"stores": 2, "engines": 2, "segment_size": "16MiB"},
        "workload": {
            "rps": 16,
            "arms": ["baseline", "fault"],
            "windows": "1x6s",
            "warmup": "500ms",
            "register_rps": 4,
        },
        "scope": {"max_capacity_fraction": 0.5},
        "verify": {"timeout": "20s"},
        "deadlines": {"fault": "4s", "lease": "10s"},
        "guards": [BLIND_AFTER],
    }
    for name, part in ours.items():
        block[name] = {**block.get(name, {}), **part} if isinstance(part, dict) else part
    experiment = {
        "title": "a store hangs",
        "description": "a short run",
        "method": [call(func, arguments) for func, arguments in faults],
        "kvops": block,
    }
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump(experiment))
    return str(file)


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[None]:
    """Afterwards no run has left a folder, and no pool was started."""
    yield
    assert not list((tmp_path / "runs").glob("*"))
    assert not list(tmp_path.glob("kvops-chaos-*"))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("faults", "ours", "code", "says"),
    [
        pytest.param(
            [("process_slow", {"cpu_shar": 0.5})],
            {},
            2,
            ["no argument 'cpu_shar'", "did you mean cpu_share?"],
            id="typo in an argument",
        ),
        pytest.param(
            [("process_pause", {"target": "stor-1"})],
            {},
            2,
            ["no member is called 'stor-1'", "did you mean store-1?"],
            id="target that is not there",
        ),
        pytest.param(
            [PAUSE],
            {"scope": {"select": {"role": "store", "host": "host-9"}}},
            2,
            ["matches nothing: role store, host host-9", "g1/store-1"],
            id="scope that matches nothing",
        ),
        pytest.param(
            [PAUSE, ("process_kill", {})],
            {},
            2,
            ["process.pause and process.kill on one target", "compose: true"],
            id="conflict",
        ),
        pytest.param(
            [PAUSE, ("process_kill", {"target": "store-1"})],
            {"scope": {"select": {"name": "store-1"}}},
            2,
            ["process.pause and process.kill on one target (g1/store-1)"],
            id="conflict under two names",
        ),
        pytest.param(
            [PAUSE],
            {"environment": {"must_match": "production"}},
            5,
            ["'production' (environment.must_match)"],
            id="for production",
        ),
        pytest.param(
            [PAUSE],
            {"environment": {"forbid_labels": ["local"]}},
            5,
            ["forbid_labels names 'local'"],
            id="forbidden label",
        ),
        pytest.param(
            [PAUSE],
            {"scope": {"max_capacity_fraction": 0.3}},
            5,
            ["50% of the capacity", "allows 30%"],
            id="too large",
        ),
        pytest.param(
            [PAUSE],
            {"scope": {"protect": ["store"]}},
            5,
            ["is protected by scope.protect"],
            id="protected",
        ),
    ],
)
def test_what_is_refused(
    run: Run,
    tmp_path: Path,
    faults: list[tuple[str, dict[str, Any]]],
    ours: dict[str, Any],
    code: int,
    says: list[str],
) -> None:
    """Each mistake is named, with what to write instead, before anything is touched."""
    done = run("chaos", "run", written(tmp_path, *faults, **ours), "--runs", str(tmp_path / "runs"))

    assert done.returncode == code, done.stderr
    for text in says:
        assert text in done.stderr


@pytest.mark.usefixtures("untouched")
def test_another_experiment_runs(run: Run, kvops_env: dict[str, str], tmp_path: Path) -> None:
    """While one runs a second is refused, and the first is named with how to end it."""
    with one_at_a_time(Path(kvops_env["KVOPS_STATE_DIR"]), "1130T0000-7-beef"):
        done = run("chaos", "run", written(tmp_path, PAUSE), "--runs", str(tmp_path / "runs"))

    assert done.returncode == 5
    assert "1130T0000-7-beef is running" in done.stderr
    assert "kvops chaos abort" in done.stderr


@pytest.mark.usefixtures("untouched")
def test_locked(run: Run, tmp_path: Path) -> None:
    """While the lever is pulled nothing runs, and the reason is said; afterwards it is as if it had not been."""
    assert run("chaos", "lock", "--reason", "release week").returncode == 0
    done = run("chaos", "run", written(tmp_path, PAUSE), "--runs", str(tmp_path / "runs"))

    assert done.returncode == 5
    assert "release week" in done.stderr
    assert "kvops chaos unlock" in done.stderr


@pytest.mark.usefixtures("untouched")
def test_something_is_left_behind(run: Run, kvops_env: dict[str, str], tmp_path: Path) -> None:
    """While an earlier experiment may have left something nothing new is begun, and the way out is said."""
    file = tmp_path / "setting"
    file.write_text("good")
    earlier = Book(Path(kvops_env["KVOPS_STATE_DIR"])).create("earlier")
    earlier.append(State.JOURNALLED, by="runner", undo=[RestoreFile.of(file)])
    earlier.append(State.INJECTING, by="runner")
    file.write_text("bad")

    refused = run("chaos", "run", written(tmp_path, PAUSE), "--runs", str(tmp_path / "runs"))

    assert refused.returncode == 5
    assert "earlier" in refused.stderr
    assert "kvops chaos recover" in refused.stderr


@pytest.mark.skipif(netem_missing() is None, reason="this kernel can do all that is needed here")
def test_what_this_kernel_cannot_do(run: Run, tmp_path: Path) -> None:
    """UNSUPPORTED with the reason and exit code 14, never a PASS, and no pool is started to find that out."""
    done = run(
        "chaos",
        "run",
        written(tmp_path, ("net_netem", {"delay_ms": 20})),
        "--runs",
        str(tmp_path / "runs"),
        "-o",
        "json",
    )

    said = json.loads(done.stdout)
    assert done.returncode == 14, done.stderr
    assert said["verdict"] == "UNSUPPORTED"
    assert str(netem_missing()) in said["reasons"][0]
    assert "start" not in [row["what"] for row in said["timeline"]]


def test_nothing_to_compare_with(run: Run, tmp_path: Path) -> None:
    """Without a baseline arm the run is BASELINE_NOT_STEADY, exit code 10, and nothing was started for it."""
    file = written(tmp_path, PAUSE, workload={"arms": ["fault"]})
    done = run("chaos", "run", file, "--runs", str(tmp_path / "runs"))

    assert done.returncode == 10, done.stderr
    assert "BASELINE_NOT_STEADY" in done.stdout + done.stderr
    assert "no baseline arm" in done.stdout + done.stderr
    assert "start" not in {line.split()[0] for line in done.stderr.splitlines() if line}


FOREIGN = {
    "title": "somebody else's",
    "description": "written for the Chaos Toolkit",
    "steady-state-hypothesis": {
        "title": "up",
        "probes": [
            {
                "type": "probe",
                "name": "front page",
                "tolerance": 200,
                "provider": {"type": "http", "url": "http://127.0.0.1:1/"},
            }
        ],
    },
    "method": [
        {
            "type": "action",
            "name": "stop it",
            "provider": {"type": "process", "path": "false", "arguments": ""},
        }
    ],
    "rollbacks": [
        {
            "type": "action",
            "name": "start it",
            "provider": {"type": "process", "path": "false", "arguments": ""},
        }
    ],
}
DIFFERENCES = (
    "no kvops: block",
    "front page: is not asked",
    "stop it: process false is not called",
    "rollbacks are not run",
)


@pytest.mark.usefixtures("untouched")
def test_a_foreign_file_that_injects_nothing(run: Run, tmp_path: Path) -> None:
    """A file of the Chaos Toolkit is valid, each difference is named; to run it would prove nothing, and is refused."""
    file = tmp_path / "foreign.yaml"
    file.write_text(yaml.safe_dump(FOREIGN))

    validated = run("chaos", "validate", str(file))
    planned = run("chaos", "plan", str(file))
    ran = run("chaos", "run", str(file), "--runs", str(tmp_path / "runs"))

    assert (validated.returncode, ran.returncode) == (0, 2), validated.stderr + ran.stderr
    for text in DIFFERENCES:
        assert text in validated.stdout
        assert text in planned.stdout
        assert text in ran.stderr


@pytest.mark.skipif(netem_missing() is None, reason="this kernel can do all that is needed here")
def test_a_foreign_file_with_a_fault_of_ours(run: Run, tmp_path: Path) -> None:
    """It is run with the defaults, and what is done otherwise is said while it runs and in its report."""
    file = tmp_path / "foreign.yaml"
    method = [*FOREIGN["method"], call("net_netem", {"delay_ms": 20})]
    file.write_text(yaml.safe_dump({**FOREIGN, "method": method}))

    done = run("chaos", "run", str(file), "--runs", str(tmp_path / "runs"), "-o", "json")

    said = json.loads(done.stdout)
    timeline = " ".join(row["text"] for row in said["timeline"])
    assert done.returncode == 14
    for text in DIFFERENCES:
        assert text in done.stderr
        assert text in timeline


def test_a_group_that_is_labelled_production(started: Started) -> None:
    """No fault is injected into a group whose own state, or whose context here, says production or protected."""
    context = started.folder / "config" / "kvops" / "config.yaml"
    context.parent.mkdir(parents=True)
    context.write_text("contexts: {elsewhere: {environment: Production}, shielded: {protect: true}}\n")
    by_context = [
        started.run("-g", name, "chaos", "inject", "process.pause", "store-0", "--for", "1s")
        for name in ("elsewhere", "shielded")
    ]
    state = started.folder / "state" / "groups" / "local" / "group.yaml"
    before = state.read_text()
    try:
        state.write_text(before.replace("environment: local", "environment: production"))
        assert state.read_text() != before
        by_state = started.run("chaos", "inject", "process.pause", "store-0", "--for", "1s")
    finally:
        state.write_text(before)
        context.unlink()

    for done in (*by_context, by_state):
        assert done.returncode == 5, done.stderr
        assert "no faults there" in done.stderr


def test_its_own_path_is_not_cut(started: Started) -> None:
    """A fault on the port that carries the SSH session in which it was asked for is refused."""
    (store, *_) = [
        one
        for one in json.loads(started.run("status", "-o", "json").stdout)["stores"]
        if one["name"] == "store-0"
    ]
    port = str(store["address"]).rpartition(":")[2]
    session = {"SSH_CONNECTION": f"127.0.0.1 50000 127.0.0.1 {port}"}

    done = started.run("chaos", "inject", "net.blackhole", "store-0", "--for", "1s", env=session)

    assert done.returncode == 5, done.stderr
    assert "would cut kvops off" in done.stderr


def clients_of(folder: Path) -> list[int]:
    """Pids of the load's processes of a run's fault arm."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kvops.chaos.client" in words and any(
                word.startswith(os.fsencode(folder)) and b"/fault-" in word for word in words
            ):
                found.append(int(entry.name))
    return sorted(found)


@dataclass(slots=True)
class Holding:
    """A run that holds its fault."""

    process: subprocess.Popen[str]
    said: str = ""

    def end(self) -> str:
        """Wait for its end; returns all that it said."""
        rest, _ = self.process.communicate(timeout=2 * WAIT_S)
        self.said += rest
        return self.said


@contextmanager
def holding(env: dict[str, str], *words: str) -> Iterator[Holding]:
    """``kvops`` with these words, once it says that it holds its fault; it does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvops", *words],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    one = Holding(process)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            one.said += line
            if line.startswith("hold"):
                break
        assert process.poll() is None, one.said
        yield one
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
@pytest.mark.parametrize(
    ("signum", "guards", "says"),
    [
        pytest.param(signal.SIGSTOP, [BLIND_AFTER], "is silent", id="stopped"),
        pytest.param(signal.SIGKILL, [BLIND_AFTER], "ended", id="killed"),
        pytest.param(signal.SIGTERM, [], "not on record of client g1e", id="ended early"),
    ],
)
def test_a_client_is_lost(
    kvops_env: dict[str, str],
    run: Run,
    tmp_path: Path,
    signum: signal.Signals,
    guards: list[dict[str, Any]],
    says: str,
) -> None:
    """A client that says nothing any more, or not all, ends the run: ABORTED, undone, no verdict on the pool."""
    file = written(tmp_path, PAUSE, guards=guards)
    with holding(kvops_env, "chaos", "run", file, "--runs", str(tmp_path / "runs")) as one:
        os.kill(clients_of(tmp_path)[0], signum)
        said = one.end()

    assert one.process.returncode == 12, said
    assert "ABORTED" in said
    assert "telemetry lost" in said
    assert says in said
    (folder,) = (tmp_path / "runs").iterdir()
    gaps = read_run(folder).gaps
    assert len(gaps) == (0 if signum is signal.SIGTERM else 1), "what it did last, nobody knows"
    assert not Book(Path(kvops_env["KVOPS_STATE_DIR"])).dirty()
    assert run("chaos", "status").returncode == 0
    until(lambda: not clients_of(tmp_path), "no client is left")
    assert not list(tmp_path.glob("kvops-chaos-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "kvops-test", str(folder)]
    subprocess.run(mount, check=True, timeout=WAIT_S)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=WAIT_S)


@pytest.mark.process
def test_the_disk_of_the_histories_is_full(
    kvops_env: dict[str, str], run: Run, small_disk: Path, tmp_path: Path
) -> None:
    """When nothing can be written down any more the run is ABORTED and undone, and its own last rows are there."""
    file = written(tmp_path, PAUSE)
    with holding(kvops_env, "chaos", "run", file, "--runs", str(small_disk)) as one:
        with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        said = one.end()

    (folder,) = (path for path in small_disk.iterdir() if path.is_dir())
    (small_disk / "ballast").unlink()
    shown = run("chaos", "report", str(folder), "-o", "json")
    assert one.process.returncode == 12, said
    assert "telemetry lost" in said
    assert json.loads(shown.stdout)["verdict"] == "ABORTED"
    assert json.loads(shown.stdout)["undone"] is True
    assert not Book(Path(kvops_env["KVOPS_STATE_DIR"])).dirty()
    assert not list(tmp_path.glob("kvops-chaos-*"))
