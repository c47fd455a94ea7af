"""A lab: nodes of their own, a group on them, and nothing left afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.chaos import lab, netns
from kvops.chaos.lifecycle import Injection
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.targets import Target, build, of_group, select
from kvops.fleet.local import LocalGroup
from kvops.host import LocalHost
from tests.pool import CALL_MS, ROOT
from tests.waiting import WAIT_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(lab.missing() is not None, reason=f"needs namespaces: {lab.missing()}"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("ip", "nft"))), reason="needs: apt install iproute2 nftables"
    ),
]
MIB = 1 << 20


def quiet(name: str, text: str) -> None:
    """Nobody listens."""


def named() -> set[str]:
    """Namespaces that have a name."""
    return {path.name for path in netns.NAMED.iterdir()} if netns.NAMED.is_dir() else set()


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of two stores; its namespaces are gone afterwards."""
    folder = tmp_path_factory.mktemp("lab")
    made = lab.up(folder, "lab", stores=2, segment_size_bytes=16 * MIB, timeout_s=WAIT_S, tell=quiet)
    try:
        yield folder
    finally:
        lab.down(folder, "lab", tell=quiet)
        assert not {node.netns for node in made.nodes} & named()
        assert lab.down(folder, "lab", tell=quiet) == []


def test_nodes_are_apart(state_dir: Path) -> None:
    """Each member is in a namespace of its own, answers on its own address, and up again changes nothing."""
    targets = of_group(LocalGroup(state_dir, "lab"))

    again = lab.up(state_dir, "lab", stores=2, segment_size_bytes=16 * MIB, timeout_s=WAIT_S, tell=quiet)

    assert len({one.netns for one in targets}) == len(targets) == 3
    assert {one.addresses["http"].rpartition(":")[0] for one in targets} == {
        again.node(one.name).address for one in targets
    }
    assert all(
        ask_target(one, timeout_s=WAIT_S, from_netns=targets[0].netns).ending is Ending.ANSWERED
        for one in targets
    )


CLIENT = """
import sys, kvops
address, secret, what, deadline_ms = sys.argv[1:]
keys = [f"key-{index}" for index in range(20)]
data = bytes(range(256)) * 16
with kvops.connect(address, deadline_ms=int(deadline_ms), secret_file=secret, group="lab", host="client") as pool:
    if what == "put":
        assert all(pool.put(key, data).ok for key in keys)
        print(*[pool.stat(key)["store"] for key in keys])
    else:
        found = [pool.get(key) for key in keys]
        assert all(one in (None, data) for one in found)
        print(*["hit" if one else "miss" for one in found])
"""


def client(state_dir: Path, master: Target, what: str, *, deadline_ms: int = CALL_MS) -> list[str]:
    """What a client on the node for clients says of each key."""
    made = lab.read(state_dir, "lab")
    assert made is not None
    enter = ["nsenter", f"--net={netns.NAMED / made.node(lab.CLIENT_NODE).netns}"]
    words = [
        master.addresses["listen"],
        str(LocalGroup(state_dir, "lab").secret_file),
        what,
        str(deadline_ms),
    ]
    result = subprocess.run(
        [*enter, sys.executable, "-c", CLIENT, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_a_cut_costs_its_own_share(state_dir: Path, tmp_path: Path) -> None:
    """While one node is cut off, the other's objects are hits and its own are misses; afterwards all are hits."""
    targets = of_group(LocalGroup(state_dir, "lab"))
    master = select(targets, role="master")[0]
    stores = client(state_dir, master, "put")
    cut = select(targets, name=stores[0])[0]
    control = next(one for one in targets if one.role == "store" and one.name != cut.name)
    fault = build("net.partition", {}, target=cut, control=control)

    with Injection([fault], host=LocalHost(), state_dir=tmp_path, lease_s=20) as one:
        one.inject()
        during = client(state_dir, master, "get", deadline_ms=1_500)
        one.undo()

    assert [answer == "miss" for answer in during] == [name == cut.name for name in stores]
    until(
        lambda: client(state_dir, master, "get") == ["hit"] * len(stores),
        "its store has come back with everything",
    )


def test_killed_member_comes_back_on_its_node(state_dir: Path, tmp_path: Path) -> None:
    """What starts a killed store again puts it where it was."""
    targets = of_group(LocalGroup(state_dir, "lab"))
    store = select(targets, name="store-1")[0]
    fault = build("process.kill", {}, target=store, control=select(targets, name="store-0")[0])

    with Injection([fault], host=LocalHost(), state_dir=tmp_path, lease_s=20) as one:
        one.inject()
        one.undo()
    back = select(of_group(LocalGroup(state_dir, "lab")), name="store-1")[0]

    assert back.netns == store.netns
    assert back.leader.pid != store.leader.pid
