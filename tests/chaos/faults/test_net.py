"""Faults of the network, in namespaces and between processes that share one."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvops.chaos import lab, nft
from kvops.chaos.faults import catalogue
from kvops.chaos.lifecycle import Injection
from kvops.chaos.model import State
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.targets import build
from kvops.errors import FaultNotApplied, NotInjected
from kvops.host import LocalHost
from tests.chaos.faults.rounds import LEASE_S, VERIFY_S
from tests.chaos.victims import Victim, victims
from tests.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(lab.missing() is not None, reason=f"needs namespaces: {lab.missing()}"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("nft", "ip", "ss"))), reason="needs: apt install nftables iproute2"
    ),
]
HOST = LocalHost()
CASES: list[tuple[str, dict[str, Any]]] = [
    ("net.partition", {}),
    ("net.oneway", {"direction": "in"}),
    ("net.oneway", {"direction": "out"}),
    ("net.loss", {"percent": 30}),
    ("net.blackhole", {}),
    ("net.fast_fail", {}),
    ("net.reset", {}),
    ("net.delay", {"delay_ms": 60}),
    ("net.bandwidth", {"kbytes_per_s": 200}),
    ("net.corrupt", {"share": 0.5}),
    ("net.netem", {"delay_ms": 40}),
    ("net.netem", {"delay_ms": 20, "loss_percent": 30}),
]
IDS = [" ".join([name, *map(str, arguments.values())]) for name, arguments in CASES]


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Victim]]:
    """Two servers in this host's namespace, on loopback."""
    with victims(2) as found:
        yield found


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Victim]]:
    """Two servers, each on a node of its own, joined by a bridge."""
    tag = f"kvt{uuid.uuid4().hex[:6]}"
    made = [f"{tag}-sw", f"{tag}-0", f"{tag}-1"]

    def run(*argv: str) -> None:
        subprocess.run(argv, check=True, timeout=WAIT_S)

    with ExitStack() as ends:  # each is ended, whatever becomes of the others
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvops-")))
        found: list[Victim] = []
        for name in made:
            run("ip", "netns", "add", name)
            ends.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", made[0], "link", "add", "br0", "type", "bridge")
        run("ip", "-n", made[0], "link", "set", "br0", "up")
        for index, name in enumerate(made[1:]):
            wire = ["type", "veth", "peer", "name", f"p{index}", "netns", made[0]]
            run("ip", "-n", name, "link", "add", "eth0", *wire)
            run("ip", "-n", made[0], "link", "set", f"p{index}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"10.99.0.{index + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            victim = Victim(f"node-{index}", folder, host=f"10.99.0.{index + 1}", netns=name)
            ends.callback(victim.end)
            found.append(victim)
        yield found


@pytest.fixture(params=["shared", "nodes"])
def pair(request: pytest.FixtureRequest) -> list[Victim]:
    """A target and its neighbour, in one namespace or in two."""
    found: list[Victim] = request.getfixturevalue(request.param)
    return found


def fault_on(pair: list[Victim], name: str, arguments: dict[str, Any]) -> Any:
    """A fault on the first server; the second must stay well."""
    fault = build(name, arguments, target=pair[0].target, control=pair[1].target)
    reason = fault.unavailable(HOST)
    if reason is not None:
        pytest.skip(reason)
    return fault


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=IDS)
def test_inject_verify_undo_undo(
    pair: list[Victim], tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    """A fault is proved, taken back, taken back again without harm, and then its own proof refuses."""
    fault = fault_on(pair, name, arguments)

    with Injection([fault], host=HOST, state_dir=tmp_path, lease_s=LEASE_S, verify_timeout_s=VERIFY_S) as one:
        evidence = one.inject()
        again = one.recheck()
        proof = one.undo()
        repeated = one.undo()

    assert len(evidence[0].signals) >= 2
    assert len(again) == (1 if fault.lasting else 0)
    assert all(step.done for step in proof.steps)
    assert not any(step.acted for step in repeated.steps)
    assert one.state is State.CLEAN
    answer = ask_target(fault.target, timeout_s=WAIT_S, from_netns=pair[1].target.netns)
    assert answer.ending is Ending.ANSWERED
    with pytest.raises(FaultNotApplied):
        one.faults[0].verify(HOST)


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=IDS)
def test_noop_is_not_injected(
    shared: list[Victim], tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    """An injector that does nothing is found out, whatever it says."""
    fault = fault_on(shared, name, arguments)
    noop = type("Noop", (type(fault),), {"inject": lambda self, host: None, "__slots__": ()})
    sham = noop(**{one.name: getattr(fault, one.name) for one in dataclasses.fields(fault)})

    with (
        pytest.raises(NotInjected),
        Injection([sham], host=HOST, state_dir=tmp_path, verify_timeout_s=0.2, lease_s=LEASE_S) as one,
    ):
        one.inject()

    assert one.state is State.CLEAN


def test_partition_covers_new_connections_of_the_target(shared: list[Victim], tmp_path: Path) -> None:
    """A node that shares its namespace cannot get out by a connection that it begins after the cut."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        fault = fault_on(shared, "net.partition", {})
        with Injection(
            [fault], host=HOST, state_dir=tmp_path, lease_s=LEASE_S, verify_timeout_s=VERIFY_S
        ) as one:
            one.inject()
            # A child of the target is in its control group: it connects as the target would.
            group = Path(str(nft.cgroup2_root())) / fault.token
            said = subprocess.run(
                [sys.executable, "-c", CONNECT, str(group), str(server.getsockname()[1])],
                capture_output=True,
                text=True,
                timeout=WAIT_S,
                check=True,
            ).stdout
            one.undo()

    assert said.strip() == "TimeoutError"
    assert not group.exists()


CONNECT = """
import os, socket, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2])), 0.4)
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def test_only_from_some_peers(nodes: list[Victim], tmp_path: Path) -> None:
    """A partition from named peers cuts those off."""
    fault = fault_on(nodes, "net.partition", {"peers": [nodes[1].host]})

    with Injection([fault], host=HOST, state_dir=tmp_path, lease_s=LEASE_S, verify_timeout_s=VERIFY_S) as one:
        evidence = one.inject()
        one.undo()

    assert "no connection" in str(evidence[0])


def test_rules_heal_by_themselves(nodes: list[Victim]) -> None:
    """With nobody left alive to undo it, a cut ends when its time is over, and its proof refuses from then on."""
    fault = dataclasses.replace(fault_on(nodes, "net.partition", {}), expires_s=8.0)
    try:
        fault.inject(HOST)
        cut = ask_target(fault.target, from_netns=fault.control.netns).ending
        until(
            lambda: ask_target(fault.target, from_netns=fault.control.netns).ending is Ending.ANSWERED,
            "the kernel heals it",
        )
        with pytest.raises(FaultNotApplied, match="time"):
            fault.verify(HOST)
    finally:
        for step in fault.undo():
            step.act()

    assert cut is Ending.NO_CONNECTION


def test_every_net_fault_is_tried() -> None:
    """No fault of the network is in the catalogue without a row here."""
    assert {name for name in catalogue() if name.startswith("net.")} == {name for name, _ in CASES}
