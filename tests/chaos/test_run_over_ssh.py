"""Whole experiments with load on a group that serves on other hosts: real sshd, masters, stores, clients, a verdict."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest

from kvops.chaos.agent import Order
from kvops.chaos.history import read_run
from kvops.chaos.ledger import Book, one_at_a_time
from kvops.chaos.model import State
from kvops.chaos.procs import command_lines
from kvops.chaos.remote import Conversation, RemoteInjection
from kvops.chaos.verdict import EXIT_CODES, RunVerdict
from kvops.errors import Unreachable, Unsupported
from kvops.files import write_private, write_yaml
from kvops.fleet.process import identify, is_stopped
from kvops.host import SshHost
from kvops.store.config import MasterConfig, StoreConfig
from tests.diag.hosts import Fleet, fleet_of, needed
from tests.pool import ROOT
from tests.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(needed()), reason=needed()),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs: apt install nftables"),
]
GROUP = "staging-b"
NEAR, FAR = "h01", "h02"  # the master and a store; the store that is broken
VICTIM = "store-far"
# Each host has a state folder of its own: sshd says by which address it was reached.
WRAPPER = """#!/bin/sh
rest=${{SSH_CONNECTION#* * }}
PYTHONPATH={root} KVOPS_STATE_DIR={folder}/there-${{rest%% *}} exec {python} -P -m kvops "$@"
"""
EXPERIMENT = """
title: a store on another host
description: a short run
method:
  - type: action
    provider: {{type: python, module: kvops.chaos.faults, func: {func}, arguments: {{target: store-far}}}}
kvops:
  environment: {{must_match: {environment}}}
  pool: {{engines: 2}}
  scope: {{max_capacity_fraction: 0.5}}
  workload: {{rps: 16, arms: [baseline, fault], windows: 1x{window}s, warmup: 500ms, register_rps: 4}}
  verify: {{timeout: 20s}}
  deadlines: {{fault: {fault}s, lease: 10s}}
  guards: []
"""

LATE = """
import json
words = [input(), input()]
for word in words:
    print(json.dumps({"what": f"to {word}"}), flush=True)
"""


class Group:
    """A master and two stores on two hosts, served in the foreground as by systemd."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.folder = fleet.folder
        self.secret = self.folder / "secret"
        self.runs = self.folder / "runs"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Everything up, and healthy."""
        write_private(self.secret, secrets.token_hex(32).encode())
        wrapper = self.folder / "bin" / "kvops"
        wrapper.write_text(WRAPPER.format(root=ROOT, folder=self.folder, python=sys.executable))
        wrapper.chmod(0o755)
        master = self.fleet.address(NEAR)
        common = {"group": GROUP, "secret_file": str(self.secret)}
        self._serve(
            NEAR,
            "master",
            MasterConfig(
                **common,
                state_dir=str(self.folder / "m"),
                listen=f"{master}:7800",
                control=f"{master}:7801",
                http=f"{master}:7802",
            ),
        )
        for host, name in ((NEAR, "store-near"), (FAR, VICTIM)):
            address = self.fleet.address(host)
            self._serve(
                host,
                "store",
                StoreConfig(
                    **common,
                    name=name,
                    host=f"rack-{host}",
                    state_dir=str(self.folder / name),
                    masters=[f"{master}:7800"],
                    listen=f"{address}:0",
                    http=f"{address}:0",
                    segment_size_bytes=32 << 20,
                    transports=["tcp"],
                ),
            )
        self.label("staging")

        def healthy() -> bool:
            said = self.kvops("status", "-o", "json")
            found = json.loads(said.stdout) if said.stdout else {}
            return found.get("health") == "healthy" and len(found["stores"]) == 2

        until(healthy, "the group is healthy")

    def _serve(self, host: str, role: str, config: MasterConfig | StoreConfig) -> None:
        Path(config.state_dir).mkdir()
        file = self.folder / f"{config.name}.yaml"
        write_yaml(file, config)
        argv = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-P", "-m", "kvops", "serve", role)
        self._started.append(self.fleet.popen(host, *argv, "--config", str(file)))

    def close(self) -> None:
        """End what was started; what the injector started again ends with its host."""
        for one in self._started:
            one.kill()
            one.communicate(timeout=WAIT_S)

    def label(self, environment: str) -> None:
        """What the context says that this group is."""
        master = self.fleet.address(NEAR)
        context = {
            "masters": [f"{master}:7800"],
            "control": [f"{master}:7801"],
            "secret_file": str(self.secret),
            "inventory": str(self.fleet.inventory),
            "environment": environment,
        }
        file = self.folder / "config" / "kvops" / "config.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_yaml(file, {"schema": 1, "contexts": {GROUP: context}})

    def kvops(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command, on this group."""
        return self.fleet.kvops("-g", GROUP, *words)

    def run(self, func: str, *, environment: str = "staging", json_: bool = True) -> list[str]:
        """The words of a run of some seconds."""
        file = self.folder / f"{func}-{environment}.yaml"
        file.write_text(EXPERIMENT.format(func=func, environment=environment, window=5, fault=2))
        words = ["chaos", "run", str(file), "--yes", "--runs", str(self.runs)]
        return words + ["-o", "json"] * json_

    def book(self, host: str) -> Book:
        """The ledgers of a host."""
        return Book(self.folder / f"there-{self.fleet.address(host)}")

    def pid(self, name: str) -> int:
        """Of a member, as it runs now; 0 when it does not."""
        file = os.fsencode(self.folder / f"{name}.yaml")
        return next(
            (pid for pid, words in command_lines() if file in words.split(b"\0") and b"serve" in words), 0
        )


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two hosts, each with an sshd and kvops on its PATH, and the group on them."""
    with fleet_of(tmp_path_factory.mktemp("fleet"), 2) as fleet, ExitStack() as stack:
        made = Group(fleet)
        stack.callback(made.close)
        made.start()
        yield made


@pytest.mark.parametrize("func", ["process_pause", "process_kill"])
def test_from_load_to_verdict(group: Group, func: str) -> None:
    """The store on the other host is broken, proved and healed there, under load from here, and the run is judged."""
    before = group.pid(VICTIM)

    done = group.kvops(*group.run(func))

    said = json.loads(done.stdout)
    verdict = RunVerdict(said["verdict"])
    record = read_run(max(group.runs.iterdir()))
    (window,) = record.fault_windows()
    assert verdict in (RunVerdict.PASS, RunVerdict.UNKNOWN, RunVerdict.FAIL), done.stderr
    assert done.returncode == EXIT_CODES[verdict]
    assert len(window.proof) >= 2
    assert window.t_clean_ns is not None
    assert (record.run.group, record.run.environment) == (GROUP, "staging")
    assert {one.name for one in record.run.domains} == {f"{GROUP}/rack-{NEAR}", f"{GROUP}/rack-{FAR}"}
    assert record.run.scope.domains == (f"{GROUP}/rack-{FAR}",)
    valid = {one["id"] for one in said["checkers"] if one["verdict"] == "valid"}
    assert valid >= {"S1", "S4", "S5", "S7", "S8", "S9"}, said["checkers"]
    assert record.events, "somebody noticed: a breaker, or the master"
    (experiment,) = [one for one in group.book(FAR).experiments() if one.id.startswith(record.run.run_id)]
    assert experiment.state is State.CLEAN
    assert group.book(NEAR).experiments() == []
    assert (group.pid(VICTIM) == before) is (func == "process_pause")
    assert group.kvops("status").returncode == 0


def test_the_agent_dies_meanwhile(group: Group) -> None:
    """When the way to the injector is lost, its guardian undoes, the run learns of that, and ends as ABORTED."""
    far, command = group.fleet, group.run("process_pause", json_=False)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KVOPS_STATE_DIR": str(group.folder / "state"),
        "XDG_CONFIG_HOME": str(group.folder / "config"),
    }
    process = subprocess.Popen(
        ["ip", "netns", "exec", far.hub, sys.executable, "-P", "-m", "kvops", "-g", GROUP, *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("hold"):
                break
        victim = identify(group.pid(VICTIM))
        assert victim is not None, said
        assert is_stopped(victim)
        agents = [pid for pid, words in command_lines() if words.split(b"\0")[-3:-1] == [b"chaos", b"agent"]]
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        rest, _ = process.communicate(timeout=4 * WAIT_S)
    finally:
        process.kill()

    assert len(agents) == 1
    assert process.returncode == EXIT_CODES[RunVerdict.ABORTED], "".join(said) + rest
    assert not is_stopped(victim)
    assert not group.book(FAR).dirty()
    assert group.book(FAR).experiments()[-1].entries()[-1].by == "guardian"


def test_what_is_refused_touches_nothing(group: Group) -> None:
    """A group in production, one that the file is not for, another run on any host of it, and a dirty ledger there."""
    here, before = group.run("process_pause"), len(group.book(FAR).experiments())
    refused: dict[str, subprocess.CompletedProcess[str]] = {}

    group.label("production")
    refused["labelled production"] = group.kvops(*here)
    group.label("staging")
    refused["must_match"] = group.kvops(*group.run("process_pause", environment="local"))
    state_dir = group.book(NEAR).folder.parent
    with one_at_a_time(state_dir, "another-run"):
        refused["another-run"] = group.kvops(*here)
    left = group.book(NEAR).create("left-there")
    left.append(State.INJECTING, by="runner")
    refused["left-there"] = group.kvops(*here)
    left.append(State.CLEAN, by="person")
    shutil.rmtree(left.folder)

    for name, done in refused.items():
        assert done.returncode == 5, (name, done.stdout + done.stderr)
        assert name in done.stdout + done.stderr
    assert len(group.book(FAR).experiments()) == before


@pytest.fixture
def near(group: Group) -> Iterator[SshHost]:
    """A connection to the first host."""
    with closing(group.fleet.connect(NEAR)) as made:
        yield made


def test_a_pid_that_is_somebody_elses(group: Group, near: SshHost) -> None:
    """A process that does not listen where the member does, or that nobody could start again, is not taken for it."""
    store = Order(
        fault="process.kill",
        target="store-near",
        group=GROUP,
        pid=group.pid("store-near"),
        listen=f"{group.fleet.address(NEAR)}:7800",  # the master's
        control_http=f"{group.fleet.address(NEAR)}:7802",
    )
    sshd = msgspec.structs.replace(store, pid=group.fleet.pids[NEAR])

    with pytest.raises(Unreachable, match="does not listen on"), RemoteInjection(near, store):
        pass
    with (
        pytest.raises(Unsupported, match="nobody knows how it is started again"),
        RemoteInjection(near, sshd),
    ):
        pass


def test_an_answer_that_nobody_waited_for(near: SshHost) -> None:
    """A word that was interrupted before its answer came does not leave that answer to the next word."""

    class Interrupted(BaseException):
        pass

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Conversation(near, ("python3", "-c", LATE), when_silent="look") as line:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Interrupted):
                line.say(b"beat", WAIT_S)  # answered only once the next word was said
            assert line.say(b"undo", WAIT_S).what == "to undo"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
