"""A group's life from the command line: real masters and stores, started, looked at, used, broken and stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvops.fleet.local import LocalGroup
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Run, Started

pytestmark = pytest.mark.process
SMALL = ("start", "--stores", "2", "--segment-size", "16MiB")


def running(folder: Path) -> list[str]:
    """Names of the members of the local group that run."""
    state = LocalGroup(folder / "state", "local").read()
    return [member.name for member in state.members if member.running] if state else []


def document(run: Run, *args: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    found: dict[str, Any] = json.loads(run(*args, "-o", "json").stdout)
    return found


def test_objects(started: Started, tmp_path: Path) -> None:
    """Objects are put, seen, given back and removed, whatever their size; an object that is there stays."""
    run = started.run
    payload = bytes(range(256)) * 8192  # 2 MiB: more than the first read takes
    (tmp_path / "in").write_bytes(payload)

    assert run("object", "put", "big", str(tmp_path / "in")).returncode == 0
    assert run("object", "put", "small", stdin=b"hello\n").returncode == 0
    assert "EXISTS" in run("object", "put", "small", stdin=b"other\n").stderr
    assert run("object", "get", "small").stdout == "hello\n"
    assert run("object", "get", "big", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == payload
    assert {"big", "small"} <= set(run("object", "ls", "-o", "name").stdout.split())
    assert run("object", "ls", "--prefix", "bi", "-o", "name").stdout.split() == ["big"]
    assert document(run, "object", "stats")["objects"] >= 2
    assert document(run, "object", "stat", "small")["objects"][0]["size_bytes"] == 6
    assert run("object", "rm", "small", "--dry-run").returncode == 0
    assert run("object", "rm", "small").returncode == 0
    gone = run("object", "get", "small")
    assert (gone.returncode, gone.stdout) == (1, "")


def test_copies_and_removals_are_told_as_they_are(started: Started) -> None:
    """A put of two replicas says how many were written, a list tells objects from copies, a removal what it did."""
    run = started.run
    put = run("object", "put", "two/a", "--replicas", "2", stdin=b"x")
    machine = json.loads(run("object", "put", "two/b", "--replicas", "2", "-o", "json", stdin=b"x").stdout)
    listed = run("object", "ls", "--prefix", "two/", "-o", "wide").stdout
    removed = run("object", "rm", "two/a", "two/none", "-o", "wide")
    rows = document(run, "object", "rm", "two/b")["removed"]

    assert "2 of 2 replicas: store-" in put.stderr
    assert (machine["replicas"], machine["replicas_asked"]) == (2, 2)
    assert "2 objects, 4 copies" in listed
    assert removed.returncode == 1
    assert re.search(r"two/a +removed\n", removed.stdout)
    assert re.search(r"two/none +not there\n", removed.stdout)
    assert rows == [{"key": "two/b", "removed": True, "reason": "REMOVED"}]


def test_a_put_without_a_store(run: Run, tmp_path: Path) -> None:
    """With no store that lives, a put says so and is no question of space: exit code 3."""
    try:
        assert run("start", "--stores", "1", "--segment-size", "16MiB").returncode == 0
        state = LocalGroup(tmp_path / "state", "local").require()
        os.kill(state.member("store-0").pid, signal.SIGKILL)
        refused = run("object", "put", "k", "--timeout", "10s", stdin=b"x")
    finally:
        run("stop", "--now")

    assert refused.returncode == 3
    assert "STORE_DOWN" in refused.stderr
    assert "NO_SPACE" not in refused.stderr


def test_what_happened(started: Started) -> None:
    """Events and logs tell that the stores came."""
    assert "store.mounted" in [event["event"] for event in document(started.run, "events")["events"]]
    assert "store.mounted" in started.run("logs", "master").stdout


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_following_events_ends_quietly(started: Started, signum: signal.Signals, code: int) -> None:
    """Ctrl-C and SIGTERM are how events -f ends: the exit code says so, and nothing else."""
    argv = [sys.executable, "-m", "kvops", "events", "-f", "-q", "-o", "jsonl"]
    with subprocess.Popen(argv, env=started.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"]
        process.send_signal(signum)
        _, said = process.communicate(timeout=WAIT_S)

    assert (process.returncode, said) == (code, b"")


def test_start_and_stop(run: Run, tmp_path: Path) -> None:
    """A group that was started is shown as status shows it; once stopped, status says so; forgotten, it is gone."""
    begun = document(run, "start", "--stores", "1", "--segment-size", "16MiB")

    assert begun["schema"] == 1
    assert begun["health"] == "healthy"
    assert begun["masters"][0]["role"] == "leader"
    assert [store["state"] for store in begun["stores"]] == ["ready"]

    stopped = document(run, "stop")["stopped"]

    assert [(one["name"], one["how"]) for one in stopped] == [
        ("store-0", "terminated"),
        ("master-0", "terminated"),
    ]
    assert running(tmp_path) == []
    after = run("status", "-o", "json")
    assert after.returncode == 3
    assert json.loads(after.stdout)["reasons"][0]["code"] == "group.stopped"
    assert run("object", "ls").returncode == 3
    assert run("events").returncode == 3
    assert run("stop", "--forget").returncode == 0
    assert not LocalGroup(tmp_path / "state", "local").folder.exists()


def test_second_start(started: Started) -> None:
    """A second start says that the group runs, shows it, and changes nothing: exit code 5."""
    before = document(started.run, "status")

    human, machine = started.run(*SMALL), started.run(*SMALL, "-o", "json")

    assert human.returncode == machine.returncode == 5
    assert "runs already" in human.stderr
    assert "store-1" in human.stdout
    shown = json.loads(machine.stdout)
    assert shown["error"]["exit_code"] == 5
    assert [m["pid"] for m in shown["masters"] + shown["stores"]] == [
        m["pid"] for m in before["masters"] + before["stores"]
    ]


def test_lost_store(started: Started) -> None:
    """A store that was killed is shown first, with what to do; doing it makes the group healthy again."""
    (pid,) = [
        store["pid"] for store in document(started.run, "status")["stores"] if store["name"] == "store-1"
    ]
    os.kill(pid, signal.SIGKILL)

    broken = started.run("status", "-o", "json")

    assert broken.returncode == 1
    found = json.loads(broken.stdout)
    assert found["health"] == "degraded"
    assert found["reasons"][0]["code"] == "store.down"
    assert found["stores"][0]["name"] == "store-1"
    assert "kvops restart store-1" in started.run("status").stderr

    assert started.run("restart", "store-1").returncode == 0
    assert started.run("status").returncode == 0


def test_since_when(started: Started) -> None:
    """Whatever was stopped or killed keeps the time at which that was first seen, from look to look."""
    store = document(started.run, "status")["stores"][0]
    before = datetime.now(UTC)
    os.kill(store["pid"], signal.SIGSTOP)
    first, second = (document(started.run, "status")["reasons"][0] for _ in range(2))
    said = started.run("status").stderr
    os.kill(store["pid"], signal.SIGKILL)
    killed, later = (document(started.run, "status")["reasons"][0] for _ in range(2))
    assert started.run("restart", store["name"]).returncode == 0

    assert first == second
    assert (first["code"], killed["code"]) == ("store.stopped", "store.down")
    assert datetime.fromisoformat(first["since"]) >= before
    assert f"next: kill -CONT {store['pid']}, or kvops restart {store['name']}" in said
    assert killed == later
    assert document(started.run, "status")["reasons"] == []


def test_dead_master(started: Started) -> None:
    """While stores run and their master does not, commands name the master and what brings it back."""
    os.kill(document(started.run, "status")["masters"][0]["pid"], signal.SIGKILL)
    try:
        for args in (("object", "ls"), ("events",), ("replay", "--workload", "synth", "--requests", "5")):
            done = started.run(*args)
            assert done.returncode == 3, args
            assert "master-0 of group local is down" in done.stderr
            assert "fix:   kvops restart master-0" in done.stderr
    finally:
        assert started.run("restart", "master-0").returncode == 0


def test_restarted_master(started: Started) -> None:
    """A restart of the master alone returns when its stores have found it: healthy, exit code 0, nothing lost."""
    assert started.run("object", "put", "kept", "-", stdin=b"bytes").returncode == 0

    done = started.run("restart", "master-0", "-o", "json")

    found = json.loads(done.stdout)
    assert (done.returncode, found["health"], found["reasons"]) == (0, "healthy", [])
    assert started.run("object", "get", "kept").stdout == "bytes"


def test_silent_master(started: Started) -> None:
    """A master that is stopped is named at once as the reason, and the group is down: exit code 3."""
    pid = document(started.run, "status")["masters"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        silent = started.run("status", "-o", "json")
    finally:
        os.kill(pid, signal.SIGCONT)
        started.run("status", "--wait", "healthy", "--timeout", "60s")

    found = json.loads(silent.stdout)
    assert silent.returncode == 3
    assert [reason["code"] for reason in found["reasons"]] == ["master.stopped"]
    assert "master-0" in found["unseen"]


def test_interrupted_start(kvops_env: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C during a start: exit code 130, and nothing that was started is left."""
    code = (  # the signal comes when the first store has told of itself, however fast the others are
        "import signal, sys\n"
        "from kvops.cli import main, output\n"
        "note = output.Output.note\n"
        "def told(self, text):\n"
        "    note(self, text)\n"
        "    if text.startswith('store-'):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "output.Output.note = told\n"
        f"sys.exit(main.main({list(SMALL)!r}))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kvops_env,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )

    assert done.returncode == 130, done.stderr
    assert "store-" in done.stderr
    assert "interrupted" in done.stderr
    assert running(tmp_path) == []


def test_interrupted_while_a_start_settles(kvops_env: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C after the last member is ready, before start returns, leaves nothing running either."""
    code = (
        "import signal, sys\n"
        "from kvops.cli import main, start\n"
        "start.look_settled = lambda settings: signal.raise_signal(signal.SIGINT)\n"
        f"sys.exit(main.main({list(SMALL)!r}))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code],
        env=kvops_env,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )

    assert done.returncode == 130, done.stderr
    assert running(tmp_path) == []


def test_trouble_half_way(run: Run, tmp_path: Path) -> None:
    """Trouble after the master came up stops the master again, and is one clear error."""
    folder = tmp_path / "state/groups/local"
    folder.mkdir(parents=True)
    (folder / "store-1").touch()  # where the store's own folder should be

    done = run(*SMALL)

    assert done.returncode == 2
    assert "store-1" in done.stderr
    assert "Traceback" not in done.stderr
    assert running(tmp_path) == []


def test_port_in_use(run: Run, tmp_path: Path) -> None:
    """A port that is in use is refused by name before anything is started: exit code 5."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(*SMALL, "--listen", f"127.0.0.1:{port}")

    assert done.returncode == 5
    assert f"127.0.0.1:{port}: the port is in use" in done.stderr
    assert running(tmp_path) == []


def test_too_much_memory(run: Run) -> None:
    """Segments that the machine cannot hold are refused with a size that fits: exit code 5."""
    done = run("start", "--stores", "64", "--segment-size", "512GiB")

    assert done.returncode == 5
    assert "available" in done.stderr or "memory limit" in done.stderr


@pytest.mark.parametrize("command", ["status", "start", "stop", "logs"])
def test_unreadable_state_folder(command: str, run: Run, tmp_path: Path) -> None:
    """A state folder that is none is one clear error for every command: exit code 2."""
    (tmp_path / "file").touch()

    done = run(command, "--state-dir", str(tmp_path / "file"))

    assert done.returncode == 2
    assert "--state-dir" in done.stderr


def test_nothing_started(run: Run) -> None:
    """Before any start: status is down and says how to start, stop has nothing to do."""
    status = run("status", "-o", "json")

    assert status.returncode == 3
    assert json.loads(status.stdout)["reasons"][0]["code"] == "group.not_started"
    assert "kvops start" in run("status").stderr
    assert run("stop").returncode == 0


def test_dry_run(run: Run, tmp_path: Path) -> None:
    """A dry run prints every step and takes none."""
    steps = document(run, *SMALL, "--dry-run")["steps"]

    assert sum(step.startswith("run ") for step in steps) == 3
    assert not (tmp_path / "state").exists()


def test_binary_on_a_terminal(started: Started) -> None:
    """Bytes that would garble a terminal are refused there, and text is not."""
    started.run("object", "put", "binary", stdin=b"\x1b[2J\x00\xff")
    started.run("object", "put", "text", stdin="häuser\n".encode())
    results = {}
    for key in ("binary", "text"):
        ours, theirs = os.openpty()
        done = subprocess.run(
            [sys.executable, "-m", "kvops", "object", "get", key],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            env=started.env,
            check=False,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        try:
            shown = os.read(ours, 1000)
        except OSError:
            shown = b""  # the other end was closed without a word
        os.close(ours)
        results[key] = (done.returncode, shown)

    assert results["binary"] == (2, b"")
    assert results["text"] == (0, "häuser\r\n".encode())
