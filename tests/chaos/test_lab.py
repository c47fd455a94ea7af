"""A lab: nodes of their own, a group on them, and nothing left afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvops.chaos import lab, netns
from kvops.chaos.history import read_run
from kvops.chaos.ledger import Book
from kvops.chaos.lifecycle import Injection
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.targets import Target, build, of_group, select
from kvops.chaos.verdict import judge
from kvops.files import write_yaml
from kvops.fleet.local import LocalGroup
from kvops.fleet.start_plan import StartPlan
from kvops.host import LocalHost
from tests.chaos.faults.rounds import VERIFY_S
from tests.chaos.test_runner import SHORT, processes_of, wait_for
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
PLAN = StartPlan(stores=2, segment_size_bytes=16 * MIB)


def quiet(name: str, text: str) -> None:
    """Nobody listens."""


def named() -> set[str]:
    """Namespaces that have a name."""
    return {path.name for path in netns.NAMED.iterdir()} if netns.NAMED.is_dir() else set()


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of two stores; its namespaces are gone afterwards."""
    folder = tmp_path_factory.mktemp("lab")
    made = lab.up(folder, "lab", PLAN, timeout_s=WAIT_S, tell=quiet)
    try:
        yield folder
    finally:
        lab.down(folder, "lab", tell=quiet)
        assert not {node.netns for node in made.nodes} & named()
        assert lab.down(folder, "lab", tell=quiet) == []


def test_nodes_are_apart(state_dir: Path) -> None:
    """Each member is in a namespace of its own, answers on its own address, and up again changes nothing."""
    targets = of_group(LocalGroup(state_dir, "lab"))

    again = lab.up(state_dir, "lab", PLAN, timeout_s=WAIT_S, tell=quiet)

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
from tests.waiting import until
address, secret, what, deadline_ms = sys.argv[1:]
keys = [f"key-{index}" for index in range(20)]
data = bytes(range(256)) * 16
with kvops.connect(address, deadline_ms=int(deadline_ms), secret_file=secret, group="lab", host="client") as pool:
    if what == "put":
        for key in keys:
            until(lambda: pool.put(key, data).ok, f"{key} is stored")
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

    with Injection(
        [fault], host=LocalHost(), state_dir=tmp_path, lease_s=100, verify_timeout_s=VERIFY_S
    ) as one:
        one.inject()
        during = client(state_dir, master, "get", deadline_ms=5_000)
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

    with Injection(
        [fault], host=LocalHost(), state_dir=tmp_path, lease_s=100, verify_timeout_s=VERIFY_S
    ) as one:
        one.inject()
        one.undo()
    back = select(of_group(LocalGroup(state_dir, "lab")), name="store-1")[0]

    assert back.netns == store.netns
    assert back.leader.pid != store.leader.pid


def experiment(folder: Path, func: str, *, fault_s: float, window_s: float = 5) -> Path:
    """A short experiment for pools of two stores."""
    path = folder / "experiment.yaml"
    path.write_text(
        SHORT.format(func=func, arms="baseline, fault", window=window_s, fault=fault_s, guards="", verify=20)
    )
    return path


def kvops(state_dir: Path, *words: str) -> subprocess.Popen[str]:
    """The command, from outside the lab's namespaces."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvops", "--state-dir", str(state_dir), "-g", "lab", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.timeout(300)  # a whole run, on a machine that may be busy
def test_an_experiment_on_a_lab(state_dir: Path, tmp_path: Path) -> None:
    """A node is cut off, proven and given back while clients go on; status sees the lab from outside."""
    file = experiment(tmp_path, "net_partition", fault_s=2)

    run = kvops(state_dir, "chaos", "run", str(file), "--lab", "--runs", str(tmp_path / "runs"))
    said, _ = run.communicate(timeout=2 * WAIT_S)
    seen, _ = kvops(state_dir, "status", "--wait", "healthy", "--timeout", "60s").communicate(
        timeout=2 * WAIT_S
    )

    (folder,) = (tmp_path / "runs").iterdir()
    record = read_run(folder)
    (window,) = record.fault_windows()
    assert window.t_active_ns is not None, said
    assert window.t_clean_ns is not None, said
    assert window.target.startswith("store-")
    assert not judge(record).safety, said
    assert "lab (local, lab)  healthy" in seen
    assert "kvops -g lab chaos run" in record.run.command


def left_of(tokens: list[str], folder: Path) -> list[str]:
    """What an experiment left on this machine: all that it makes has its token in its name."""
    rules = subprocess.run(
        ["nft", "list", "tables"], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    places = [*rules.stdout.splitlines(), *map(str, Path("/dev/shm").iterdir()), *processes_of(folder)]
    for parent, names, _ in os.walk("/sys/fs/cgroup"):  # others' groups come and go meanwhile
        places += [f"{parent}/{name}" for name in names if name.startswith("kvops_")]
    return [one for one in places if str(folder) in one or any(token in one for token in tokens)]


@pytest.mark.timeout(300)  # as above
@pytest.mark.parametrize("func", ["net_delay", "process_pause"])
def test_nothing_is_left_after_a_storm(tmp_path: Path, func: str) -> None:
    """With runner and guardian killed in the middle of a fault, taking the lab down leaves the machine as it was."""
    file = experiment(tmp_path, func, fault_s=9, window_s=11)
    made = lab.up(tmp_path, "lab", PLAN, timeout_s=WAIT_S, tell=quiet)
    try:
        run = kvops(tmp_path, "chaos", "run", str(file), "--lab", "--runs", str(tmp_path / "runs"))
        wait_for(run, "hold")
        run.send_signal(signal.SIGSTOP)  # neither may see the other die: it would undo
        entries = Book(tmp_path).dirty()[0].entries()
        guardian = next(one.facts["guardian"] for one in entries if "guardian" in one.facts)
        scope = next(one.facts["scope"] for one in entries if "scope" in one.facts)
        os.kill(guardian["pid"], signal.SIGKILL)
        run.kill()
        run.communicate(timeout=2 * WAIT_S)
    finally:
        lab.down(tmp_path, "lab", tell=quiet)

    until(lambda: not left_of(scope["tokens"], tmp_path), "everything is gone")
    assert not {node.netns for node in made.nodes} & named()
    assert not Book(tmp_path).dirty()
    assert not (tmp_path / "groups" / "lab").exists()


def test_a_lab_that_ended_is_forgotten(tmp_path: Path) -> None:
    """Of a lab whose namespaces ended with the machine, status says so, and taking it down forgets it."""
    gone = lab.Lab(group="lab", tag="0", nodes=[lab.Node(name=lab.CLIENT_NODE, netns="kvops-gone-0")])
    path = lab.lab_file(tmp_path, "lab")
    path.parent.mkdir(parents=True)
    write_yaml(path, gone)

    looked = kvops(tmp_path, "status")
    said, _ = looked.communicate(timeout=2 * WAIT_S)
    removed = lab.down(tmp_path, "lab", tell=quiet)

    assert looked.returncode == 3
    assert "kvops -g lab chaos lab down" in said
    assert removed == []
    assert lab.read(tmp_path, "lab") is None
