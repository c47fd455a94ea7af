"""Faults on another machine over SSH: a real sshd, the injector, its ledger and its guardian beside it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvops.chaos.agent import Order
from kvops.chaos.ledger import Book, Entry
from kvops.chaos.model import State
from kvops.chaos.remote import RemoteInjection
from kvops.chaos.steps import SignalProcess
from kvops.errors import Aborted, Refused, Unreachable, Unsupported, UsageError
from kvops.files import write_yaml
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.local import LocalGroup
from kvops.fleet.process import identify, is_stopped
from kvops.host import SshHost
from tests.chaos.victims import Victim
from tests.diag.hosts import Fleet, fleet_of, needed
from tests.pool import ROOT
from tests.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(needed()), reason=needed()),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs: apt install nftables"),
]
HOST = "h01"
GROUP = "servers"
LONG_S = 100.0  # a lease that nothing here waits for: what is undone earlier was not undone by it
assert LONG_S > WAIT_S


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One host with an sshd, and with kvops on its PATH."""
    with fleet_of(tmp_path_factory.mktemp("fleet"), 1) as made:
        wrapper = made.folder / "bin" / "kvops"
        state = made.folder / "there"
        words = f"PYTHONPATH={ROOT} KVOPS_STATE_DIR={state} exec {sys.executable} -m kvops"
        wrapper.write_text(f'#!/bin/sh\n{words} "$@"\n')
        wrapper.chmod(0o755)
        yield made


@pytest.fixture(scope="module")
def book(fleet: Fleet) -> Book:
    """The ledgers of that host."""
    return Book(fleet.folder / "there")


@pytest.fixture(scope="module")
def servers(fleet: Fleet) -> Iterator[list[Victim]]:
    """Two servers on that host, members of a group there, as is its sshd."""
    with ExitStack() as stack:
        found = []
        for index in range(2):
            one = Victim(
                f"server-{index}", fleet.folder, host=fleet.address(HOST), netns=fleet.namespace(HOST)
            )
            stack.callback(one.end)
            found.append(one)
        where = {one.name: (one.target.leader, one.target.addresses["http"]) for one in found}
        sshd = identify(fleet.pids[HOST])
        assert sshd is not None
        where["sshd"] = (sshd, found[0].target.addresses["http"])
        members = [
            Member(
                name=name,
                role="store",
                host=HOST,
                pid=process.pid,
                started_ticks=process.started_ticks,
                boot_id=process.boot_id,
                ready=True,
                addresses={"http": http},
            )
            for name, (process, http) in where.items()
        ]
        group = LocalGroup(fleet.folder / "there", GROUP)
        group.folder.mkdir(parents=True)
        write_yaml(group.state_file, GroupState(group=GROUP, members=members))
        yield found


@pytest.fixture
def ssh(fleet: Fleet) -> Iterator[SshHost]:
    """A connection to that host."""
    with closing(fleet.connect(HOST)) as made:
        yield made


def order(fault: str = "process.pause", *, name: str, lease_s: float = LONG_S) -> Order:
    """A fault on the first server, of which the second must stay well."""
    return Order(
        fault=fault,
        target="server-0",
        group=GROUP,
        control="server-1",
        lease_s=lease_s,
        deadline_s=2 * LONG_S,
        name=name,
    )


def entries(book: Book, name: str) -> list[Entry]:
    """What the ledger there says of an experiment."""
    return book.experiment(name).entries()


@pytest.mark.parametrize("fault", ["process.pause", "net.blackhole"])
def test_there_and_back(servers: list[Victim], ssh: SshHost, book: Book, fault: str) -> None:
    """A fault is proven, held and taken back on that host, with its ledger there."""
    name = f"back-{fault}"
    with RemoteInjection(ssh, order(fault, name=name)) as one:
        evidence = one.inject()
        one.beat()
        again = one.recheck()
        undone = one.undo()

    assert "request to server-0" in evidence[0]
    assert len(again) == 1
    assert undone.by == "runner"
    assert one.experiment == name
    assert entries(book, name)[-1].state is State.CLEAN
    assert not is_stopped(servers[0].target.leader)


def test_the_connection_ends(servers: list[Victim], ssh: SshHost, book: Book) -> None:
    """When the connection is gone the guardian there undoes at once, long before the lease is over."""
    one = RemoteInjection(ssh, order(name="ended"))
    one.__enter__()
    one.inject()
    assert is_stopped(servers[0].target.leader)

    ssh.close()

    until(lambda: not book.dirty(), "the guardian has undone")
    last = entries(book, "ended")[-1]
    assert (last.state, last.by) == (State.CLEAN, "guardian")
    assert not is_stopped(servers[0].target.leader)
    with pytest.raises(Unreachable, match="h01"):
        one.beat()


def test_the_connection_falls_silent(fleet: Fleet, servers: list[Victim], ssh: SshHost, book: Book) -> None:
    """With the network down nothing ends, but no lease is renewed: the guardian there undoes."""
    one = RemoteInjection(ssh, order(name="silent", lease_s=5.0))
    one.__enter__()
    one.inject()
    one.beat()

    subprocess.run(["ip", "-n", fleet.hub, "link", "set", f"r0{HOST}", "down"], check=True, timeout=WAIT_S)
    try:
        until(lambda: not book.dirty(), "the guardian has undone")
        with pytest.raises(Unreachable):
            one.beat()
    finally:
        subprocess.run(["ip", "-n", fleet.hub, "link", "set", f"r0{HOST}", "up"], check=True, timeout=WAIT_S)

    last = entries(book, "silent")[-1]
    assert (last.by, last.detail) == ("guardian", "the runner did not renew its lease")
    assert not is_stopped(servers[0].target.leader)
    with pytest.raises((Aborted, Unreachable)):
        one.beat()


@pytest.mark.parametrize("fault", ["net.blackhole", "net.partition", "process.pause", "process.kill"])
@pytest.mark.usefixtures("servers")
def test_its_own_path_is_not_cut(ssh: SshHost, book: Book, fault: str) -> None:
    """A fault on the sshd that carries the order is refused before anything is touched."""
    before = len(book.experiments())
    sshd = Order(fault=fault, target="sshd", group=GROUP, control="server-1")

    for touch in (RemoteInjection.check, RemoteInjection.inject):
        with RemoteInjection(ssh, sshd) as one, pytest.raises(Refused, match="cut kvops off"):
            touch(one)

    assert len(book.experiments()) == before


@pytest.mark.usefixtures("servers")
def test_what_cannot_be(ssh: SshHost) -> None:
    """A misspelt fault, a target that is not there, and a host without kvops are told apart, and touch nothing."""
    wrong = order("process.pawse", name="wrong")
    nobody = Order(fault="process.pause", target="store-9", group="nothing")

    with pytest.raises(UsageError, match="h01: there is no fault"), RemoteInjection(ssh, wrong):
        pass
    with pytest.raises(Unreachable, match="h01"), RemoteInjection(ssh, nobody):
        pass
    with (
        pytest.raises(Unsupported, match="has no no-such-program"),
        RemoteInjection(ssh, order(name="none"), command=("no-such-program",)),
    ):
        pass


def test_a_group_on_a_host(fleet: Fleet, book: Book) -> None:
    """The command breaks a store of the group that runs on that host, and says what it saw there."""
    enter = ["ip", "netns", "exec", fleet.namespace(HOST), str(fleet.folder / "bin" / "kvops")]
    words = ["start", "--stores", "2", "--segment-size", "16MiB", "--timeout", "90s"]
    subprocess.run([*enter, *words], check=True, capture_output=True, timeout=2 * WAIT_S)
    try:
        done = fleet.kvops(
            *("chaos", "inject", "process.pause", "store-1", "--for", "1s", "--lease", "20s"),
            *("--host", HOST, "--inventory", str(fleet.inventory)),
        )
    finally:
        subprocess.run([*enter, "stop"], check=True, capture_output=True, timeout=2 * WAIT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "h01: " in done.stderr
    assert "request to store-1: connected, then silent" in done.stderr
    assert "nothing left" in done.stdout + done.stderr
    assert not book.dirty()


def test_recover_on_a_host(fleet: Fleet, servers: list[Victim], book: Book) -> None:
    """What an experiment left on another machine is taken back there, and a machine that cannot be asked is named."""
    process = servers[0].target.leader
    experiment = book.create("dead-there")
    step = SignalProcess(pid=process.pid, started_ticks=process.started_ticks, boot_id=process.boot_id)
    experiment.append(State.JOURNALLED, by="runner", undo=[step])
    experiment.append(State.INJECTING, by="runner")
    os.kill(process.pid, signal.SIGSTOP)

    done = fleet.kvops("chaos", "recover", "--host", HOST, "--inventory", str(fleet.inventory))
    away = fleet.kvops("chaos", "recover", "--host", "10.77.0.99:1", "--known-hosts", str(fleet.known_hosts))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "dead-there" in done.stdout
    assert not is_stopped(process)
    assert not book.dirty()
    assert away.returncode == 3
    assert "10.77.0.99" in away.stdout
