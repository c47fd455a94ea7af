"""A rolling restart of real masters and stores, from the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvops
from kvops.fleet.local import LocalGroup
from kvops.store.control import ControlClient
from tests.cli.conftest import Started, environment, runner, wait_prepared
from tests.etcd import needs_etcd
from tests.pool import CALL_MS
from tests.waiting import WAIT_S

pytestmark = pytest.mark.process
STORES = ("store-0", "store-1", "store-2")
QUICKLY = ("--window", "0s")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One master and three stores; each test leaves them healthy."""
    folder = tmp_path_factory.mktemp("group")
    env = environment(folder)
    run = runner(env)
    done = run("start", "--stores", "3", "--segment-size", "16MiB")
    try:
        assert done.returncode == 0, done.stderr
        wait_prepared(run)
        yield Started(run, folder, env)
    finally:
        assert run("stop", "--now").returncode == 0


def pids(group: Started) -> dict[str, int]:
    """Who runs as which process."""
    state = LocalGroup(group.folder / "state", "local").require()
    return {member.name: member.pid for member in state.members if member.running}


def steps(group: Started) -> dict[str, str]:
    """How far each member of the last rollout is."""
    document: dict[str, Any] = json.loads(group.run("rollout", "status", "-o", "json").stdout)
    return {node["name"]: node["step"] for node in document["nodes"]}


class Watcher:
    """A client that puts and gets all the time, beside an operator who counts the stores that serve."""

    def __init__(self, group: Started) -> None:
        local = LocalGroup(group.folder / "state", "local")
        (master,) = [member for member in local.require().members if member.role == "master"]
        self._master, self._secret_file = master.addresses, local.secret_file
        self._ended = threading.Event()
        self.serving: list[int] = []
        self.hits = 0
        self.wrong = 0
        self._threads = [threading.Thread(target=self._use), threading.Thread(target=self._count)]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def connect(self) -> Any:
        """A client of the group."""
        return kvops.connect(
            self._master["listen"], deadline_ms=CALL_MS, secret_file=self._secret_file, group="local"
        )

    def _use(self) -> None:
        with self.connect() as pool:
            number = 0
            while not self._ended.is_set():
                number += 1
                data = number.to_bytes(8, "little") * 64
                pool.put(f"during/{number}", data)
                found = pool.get(f"during/{number}")
                self.hits += found == data
                self.wrong += found not in (None, data)
                self._ended.wait(0.01)

    def _count(self) -> None:
        with ControlClient(
            self._master["control"], bytes.fromhex(Path(self._secret_file).read_text()), timeout_s=WAIT_S
        ) as client:
            while not self._ended.is_set():
                newest = {
                    store.name: store for store in sorted(client.status().stores, key=lambda one: one.id)
                }
                self.serving.append(sum(store.state in ("ready", "announcing") for store in newest.values()))
                self._ended.wait(0.02)


def test_the_others_serve_while_one_is_away(three: Started) -> None:
    """Never fewer than two of three stores serve, no client gets wrong bytes; what was migrated is still there."""
    before = pids(three)
    kept = {f"kept/{number}": number.to_bytes(8, "little") * 512 for number in range(50)}

    with Watcher(three) as watcher:
        with watcher.connect() as pool:
            assert all(pool.put(key, data).ok for key, data in kept.items())
        done = three.run("rollout", "restart", *STORES, *QUICKLY, "--migrate", "-o", "json")
        with watcher.connect() as pool:
            found = {key: pool.get(key) for key in kept}

    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(node["name"], node["step"]) for node in document["nodes"]] == [(name, "done") for name in STORES]
    assert min(watcher.serving) == 2
    assert found == kept
    assert watcher.hits > 0
    assert watcher.wrong == 0
    after = pids(three)
    assert all(after[name] != before[name] for name in STORES)
    assert after["master-0"] == before["master-0"]
    status = json.loads(three.run("status", "-o", "json").stdout)
    assert (status["health"], status["holds"]) == ("healthy", [])


def test_a_store_that_does_not_come_back_stops_it_and_a_resume_goes_on(three: Started) -> None:
    """Exit code 1 and the store's name; the stores behind it are untouched; repaired, only the rest is restarted."""
    config = LocalGroup(three.folder / "state", "local").config_file("store-1")
    good = config.read_text()
    before = pids(three)
    config.write_text(good + "segment_sise_bytes: 1\n")
    try:
        stopped = three.run("rollout", "restart", *QUICKLY)
        halfway = pids(three)
        status = three.run("rollout", "status")
    finally:
        config.write_text(good)

    assert stopped.returncode == 1
    assert "stopped at store-1, 1 of 4 done" in stopped.stderr
    assert "segment_sise_bytes" in stopped.stderr
    assert status.returncode == 1
    assert steps(three) == {
        "master-0": "pending",
        "store-0": "done",
        "store-1": "restarting",
        "store-2": "pending",
    }
    assert halfway["store-2"] == before["store-2"]
    assert "store-1" not in halfway
    named = three.run("rollout", "restart", "store-2", *QUICKLY)
    assert named.returncode == 5
    assert "--fresh" in named.stderr

    done = three.run("rollout", "restart", *QUICKLY)

    assert done.returncode == 0, done.stderr
    assert "going on with the rollout of" in done.stderr
    after = pids(three)
    assert after["store-0"] == halfway["store-0"]
    assert after["store-2"] != before["store-2"]
    assert after["master-0"] != before["master-0"]
    assert set(steps(three).values()) == {"done"}
    assert three.run("status", "--wait", "healthy").returncode == 0


def test_a_dry_run_changes_nothing(three: Started) -> None:
    """The steps are in the order in which they would be done; no process and no file is touched."""
    before = pids(three)
    progress = LocalGroup(three.folder / "state", "local").folder / "rollout.yaml"
    kept = progress.read_bytes() if progress.exists() else None

    done = three.run("rollout", "restart", "--dry-run", "--fresh", "--migrate", "-o", "json")

    lines = json.loads(done.stdout)["steps"]
    assert lines[0] == "kvops drain store-0 --migrate, and wait for its end"
    assert lines[1] == f"send SIGTERM to store-0 (pid {before['store-0']}) and wait for its end"
    assert "master-0" in lines[-1]
    assert pids(three) == before
    assert (progress.read_bytes() if progress.exists() else None) == kept


@needs_etcd
def test_who_leads_is_restarted_last(tmp_path: Path) -> None:
    """Three masters and etcd: each is restarted while another leads, and in the end all three could lead."""
    run = runner(environment(tmp_path))
    group = Started(run, tmp_path, environment(tmp_path))
    try:
        assert (
            run(
                "start", "--masters", "3", "--etcd", "auto", "--stores", "1", "--segment-size", "16MiB"
            ).returncode
            == 0
        )
        before = pids(group)
        done = run("rollout", "restart", "master-0", "master-1", "master-2", *QUICKLY)

        assert done.returncode == 0, done.stderr
        ready = [line.split()[0] for line in done.stderr.splitlines() if " ready in " in line]
        # Who leads may have changed before its turn came; whoever does then is the last, and hands over.
        handed = [
            line.split()[0]
            for line in done.stderr.splitlines()
            if line.endswith("leads: another master takes over first")
        ]
        assert (sorted(ready), ready[-1]) == (["master-0", "master-1", "master-2"], handed[-1])
        after = pids(group)
        assert {name for name in before if after[name] != before[name]} == {
            "master-0",
            "master-1",
            "master-2",
        }
        assert run("status", "--wait", "healthy").returncode == 0
    finally:
        assert run("stop", "--now").returncode == 0
