"""``kill -9`` of runner, guardian, both and target at every state of an injection's life."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvops.chaos.control import recover
from kvops.chaos.ledger import Book
from kvops.chaos.model import State
from kvops.chaos.picture import Process, Scope, differences, take
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.targets import build
from kvops.fleet.process import ProcessIdentity, is_running, is_stopped
from kvops.host import LocalHost
from tests.chaos.victims import Victim, victims
from tests.pool import ROOT
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process
STATES = [state for state in State if state not in (State.PLANNED, State.DIRTY)]
WHOM = ["runner", "guardian", "both", "target"]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Victim]]:
    """A target and its neighbour."""
    with victims(2) as found:
        yield found


def run(
    servers: list[Victim], state_dir: Path, at: str, whom: str, fault: str = "process.pause"
) -> subprocess.CompletedProcess[str]:
    """One experiment in a process of its own."""
    targets = [one.target for one in servers]
    words = [
        word
        for one, server in zip(targets, servers, strict=True)
        for word in (str(one.leader.pid), str(server.port))
    ]
    return subprocess.run(
        [sys.executable, "-m", "tests.chaos.crasher", str(state_dir), fault, *words, at, whom],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )


def scope_of(identity: ProcessIdentity) -> Scope:
    """The target's own state: everything else carries a token that dies with the experiment."""
    return Scope(
        tokens=[],
        processes=[Process(pid=identity.pid, started_ticks=identity.started_ticks, boot_id=identity.boot_id)],
    )


@pytest.mark.parametrize(("at", "whom"), list(itertools.product(STATES, WHOM)), ids=lambda value: str(value))
def test_crash_point(servers: list[Victim], tmp_path: Path, at: State, whom: str) -> None:
    """Whoever dies whenever: the target runs on in the end, or the ledger says dirty and recover makes it clean."""
    for server in servers:
        if not server.alive:
            server.start()
    identity = servers[0].target.leader
    before = take(scope_of(identity))

    ended = run(servers, tmp_path, str(at), whom)

    book = Book(tmp_path)
    experiment = book.experiment("crash")
    assert str(at) in ended.stdout.split(), ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    if whom == "both":
        if experiment.dirty:
            assert [step.command() for step in experiment.undo_steps()[0]] == [f"kill -CONT {identity.pid}"]
            assert [one.clean for one in recover(tmp_path)] == [True]
    else:
        until(lambda: not book.dirty(), f"clean after {whom} died at {at}")
    assert not book.dirty()
    assert differences(before, take(scope_of(identity))) == []
    assert is_running(identity) is (whom != "target")
    assert not is_stopped(identity)
    until(lambda: book.run_by() is None, "nobody holds the ledger")
    until(lambda: not guardians(tmp_path), "no guardian is left")


@pytest.mark.parametrize("at", [State.INJECTED, State.ACTIVE, State.UNDOING])
@pytest.mark.parametrize("fault", ["process.slow", "net.partition", "net.delay", "disk.eio"])
def test_all_are_killed(servers: list[Victim], tmp_path: Path, fault: str, at: State) -> None:
    """With runner and guardian killed, recover takes back groups, rules, proxies and tracers from the ledger alone."""
    for server in servers:
        if not server.alive:
            server.start()
    targets = [one.target for one in servers]
    reason = build(fault, {}, target=targets[0], control=targets[1]).unavailable(LocalHost())
    if reason is not None:
        pytest.skip(reason)

    ended = run(servers, tmp_path, str(at), "both", fault)
    taken = recover(tmp_path)

    entries = Book(tmp_path).experiment("crash").entries()
    scope = next(entry.facts["scope"] for entry in entries if "scope" in entry.facts)
    before = next(entry.picture for entry in entries if entry.picture)
    assert str(at) in ended.stdout.split(), ended.stdout + ended.stderr
    assert [one.clean for one in taken] == [True], taken
    assert differences(before, take(msgspec.convert(scope, Scope))) == []
    assert ask_target(targets[0], timeout_s=WAIT_S).ending is Ending.ANSWERED


def guardians(state_dir: Path) -> list[int]:
    """Guardians of experiments under this folder: they write their log there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd/1").readlink().is_relative_to(state_dir):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
