"""The guards before an injection, the guardian's reasons to undo, and what works without the runner."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.chaos.control import abort, recover, status
from kvops.chaos.ledger import Book
from kvops.chaos.lifecycle import Injection
from kvops.chaos.model import State
from kvops.chaos.targets import build, neighbour, select
from kvops.errors import Aborted, Refused, UsageError
from kvops.fleet.process import is_stopped
from kvops.host import LocalHost
from tests.chaos.crasher import LEASE_S_OF_A_WAITER
from tests.chaos.victims import Victim, victims
from tests.pool import ROOT
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process
HOST = LocalHost()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Victim]]:
    """A target and its neighbour."""
    with victims(2) as found:
        yield found


def pause(servers: list[Victim], state_dir: Path, **options: float) -> Injection:
    """An injection that stops the first server."""
    fault = build("process.pause", {}, target=servers[0].target, control=servers[1].target)
    return Injection([fault], host=HOST, state_dir=state_dir, **options)  # type: ignore[arg-type]


def stopped(servers: list[Victim]) -> bool:
    """Whether the first server is stopped."""
    return is_stopped(servers[0].target.leader)


def test_missed_lease_is_undone(servers: list[Victim], tmp_path: Path) -> None:
    """A runner that lives and says nothing loses its fault, and is told so when it speaks again."""
    with pause(servers, tmp_path, lease_s=2.0) as injection:
        injection.inject()
        assert stopped(servers)
        until(lambda: not stopped(servers), "the guardian undid it")
        until(lambda: not injection.book.dirty(), "and said so")
        with pytest.raises(Aborted, match="lease"):
            injection.beat()
        proof = injection.undo()

    assert proof.by == "guardian"
    assert injection.state is State.CLEAN


def test_deadline_is_kept(servers: list[Victim], tmp_path: Path) -> None:
    """However diligently the runner renews its lease, the deadline ends the fault."""
    injection = pause(servers, tmp_path, lease_s=3.5, deadline_s=4.0)
    pause_between = threading.Event()

    def hold() -> None:
        with injection:
            injection.inject()
            while True:  # the deadline ends it, or the test's own
                injection.beat()
                pause_between.wait(0.01)

    with pytest.raises(Aborted, match="deadline"):
        hold()

    assert not stopped(servers)


def test_abort_without_the_runner(servers: list[Victim], tmp_path: Path) -> None:
    """An abort from elsewhere undoes the fault while its runner lives, and the ledger keeps the reason."""
    with pause(servers, tmp_path) as injection:
        injection.inject()

        taken = abort(tmp_path, reason="INC-7")

        assert not stopped(servers)
        assert [(one.clean, one.by) for one in taken] == [(True, "guardian")]
        assert "INC-7" in taken[0].detail
        with pytest.raises(Aborted, match="INC-7"):
            injection.recheck()


def test_one_experiment_at_a_time(servers: list[Victim], tmp_path: Path) -> None:
    """A second experiment is refused while one runs, and named."""
    with pause(servers, tmp_path) as first:
        first.inject()
        with pytest.raises(Refused, match=first.id):
            pause(servers, tmp_path).inject()

        assert status(tmp_path)["running"] == first.id
        assert stopped(servers)


def test_dirty_ledger_refuses(servers: list[Victim], tmp_path: Path) -> None:
    """What a killed runner and guardian left refuses the next experiment, until recover has taken it back."""
    targets = [one.target for one in servers]
    words = [
        word
        for one, server in zip(targets, servers, strict=True)
        for word in (str(one.leader.pid), str(server.port))
    ]
    command = [
        sys.executable,
        "-m",
        "tests.chaos.crasher",
        str(tmp_path),
        "process.pause",
        *words,
        "active",
        "both",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert stopped(servers)

    with pytest.raises(Refused, match="recover"):
        pause(servers, tmp_path).inject()
    found = status(tmp_path)
    taken = recover(tmp_path)

    assert found["dirty"] == ["crash"]
    assert [one.clean for one in taken] == [True]
    assert not stopped(servers)
    assert recover(tmp_path) == []
    with pause(servers, tmp_path) as again:
        again.inject()


def test_lock_refuses(servers: list[Victim], tmp_path: Path) -> None:
    """The safety lever stops what comes after it, with its reason; nothing is touched."""
    Book(tmp_path).lock(by="ada", reason="release week")

    with pytest.raises(Refused, match="release week"):
        pause(servers, tmp_path).inject()

    assert not stopped(servers)
    assert Book(tmp_path).unlock()


@pytest.mark.parametrize("label", [{"environment": "production"}, {"protect": True}])
def test_production_refuses(servers: list[Victim], tmp_path: Path, label: dict[str, object]) -> None:
    """Nothing is ever injected into a group that is labelled production or protected."""
    target = dataclasses.replace(servers[0].target, **label)  # type: ignore[arg-type]
    fault = build("process.pause", {}, target=target, control=servers[1].target)

    with pytest.raises(Refused, match="no faults there"):
        Injection([fault], host=HOST, state_dir=tmp_path).inject()

    assert not stopped(servers)


def test_without_a_guardian_nothing_is_injected(
    servers: list[Victim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the guardian cannot start, the fault is refused before it is injected."""
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(Refused, match="guardian"):
        pause(servers, tmp_path).inject()

    assert not stopped(servers)
    assert not Book(tmp_path).dirty()


def test_runner_killed_is_undone_within_the_lease(servers: list[Victim], tmp_path: Path) -> None:
    """A runner that is killed while its fault is active loses it at once: nobody waits for the lease."""
    targets = [one.target for one in servers]
    words = [
        word
        for one, server in zip(targets, servers, strict=True)
        for word in (str(one.leader.pid), str(server.port))
    ]
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.chaos.crasher",
            str(tmp_path),
            "process.pause",
            *words,
            "active",
            "wait",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as runner:
        assert runner.stdout is not None
        for line in runner.stdout:
            if line.strip() == "active":
                break
        assert stopped(servers)
        runner.kill()

    assert LEASE_S_OF_A_WAITER > WAIT_S
    until(lambda: not stopped(servers), "undone")
    until(lambda: not Book(tmp_path).dirty(), "clean")


def test_conflicts_and_nothing(servers: list[Victim], tmp_path: Path) -> None:
    """Two faults that would hide one another, no fault at all, and a deadline past all bounds are misuse."""
    kill, stop = (
        build(name, {}, target=servers[0].target, control=servers[1].target)
        for name in ("process.kill", "process.pause")
    )

    with pytest.raises(UsageError, match="hide one another"):
        Injection([kill, stop], host=HOST, state_dir=tmp_path)
    with pytest.raises(UsageError, match="no fault"):
        Injection([], host=HOST, state_dir=tmp_path)
    with pytest.raises(UsageError, match="900"):
        Injection([kill], host=HOST, state_dir=tmp_path, deadline_s=3600)


def test_targets_are_never_guessed(servers: list[Victim]) -> None:
    """A target that matches nothing is misuse with the nearest name; one without a neighbour is refused."""
    targets = [one.target for one in servers]

    with pytest.raises(UsageError, match="did you mean server-1"):
        select(targets, name="servr-1")
    with pytest.raises(UsageError, match=r"did you mean process\.pause"):
        build("process.paus", {}, target=targets[0], control=targets[1])
    with pytest.raises(Refused, match="neighbour"):
        neighbour(targets[:1], targets[0])
    assert neighbour(targets, targets[0]).name == "server-1"


def test_leaving_by_an_exception_undoes(servers: list[Victim], tmp_path: Path) -> None:
    """Ctrl-C while a fault is held takes it back."""
    injection = pause(servers, tmp_path)

    def interrupted() -> None:
        with injection:
            injection.inject()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert injection.state is State.CLEAN
    assert not stopped(servers)
