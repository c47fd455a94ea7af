"""The life of a local group: real processes of a stand-in daemon, real files, signals and sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvops.errors import (
    AlreadyRunning,
    ConfigError,
    Refused,
    StartFailed,
    Unreachable,
    UsageError,
)
from kvops.files import default_state_dir, load_yaml, read_secret, write_yaml
from kvops.fleet.group_folder import local_groups
from kvops.fleet.group_state import GroupState
from kvops.fleet.local import LocalGroup
from kvops.fleet.process import identify
from kvops.fleet.start_plan import StartPlan
from kvops.store.config import MasterConfig, StoreConfig
from kvops.store.topology import read_topology
from tests.waiting import WAIT_S

pytestmark = pytest.mark.process
MakeGroup = Callable[..., LocalGroup]
SMALL = StartPlan(stores=2, segment_size_bytes=1 << 20)


def running(group: LocalGroup) -> list[str]:
    """Names of the members whose processes run."""
    state = group.read()
    return [member.name for member in state.members if member.running] if state else []


def test_stores_are_dealt_to_numa_nodes(make_group: MakeGroup) -> None:
    """One after the other over the nodes, bound there with their huge pages as asked; else nobody is bound."""
    plan = StartPlan(stores=3, numa_nodes=(0, 2), one_host=True)
    node = read_topology().store_nodes[0].index
    group = make_group()
    bound = StartPlan(stores=1, segment_size_bytes=1 << 20, numa_nodes=(node,))

    group.start(bound, timeout_s=WAIT_S)
    store = load_yaml(group.config_file("store-0"), StoreConfig)

    stores = [member for member in plan.members() if member.role == "store"]
    assert [(member.host, member.numa_node) for member in stores] == [
        ("host-0", 0),
        ("host-0", 2),
        ("host-0", 0),
    ]
    assert (store.numa_node, store.numa_bind) == (node, True)
    group.stop()
    group.start(SMALL, timeout_s=WAIT_S)
    assert not load_yaml(group.config_file("store-0"), StoreConfig).numa_bind


def test_a_large_store_may_take_its_time_to_end() -> None:
    """The kernel frees small pages slowly: a store of a TiB is not called hung after ten seconds."""
    small = GroupState(group="g", segment_size_bytes=1 << 40)

    assert small.release_s == 1024
    assert msgspec.structs.replace(small, huge_page_bytes=1 << 30).release_s == 0


def test_start_and_stop(make_group: MakeGroup) -> None:
    """A started group runs, says where, and keeps a private secret; a stopped one leaves no process."""
    group = make_group()

    state = group.start(SMALL, timeout_s=WAIT_S)

    assert running(group) == ["master-0", "store-0", "store-1"]
    assert all(member.addresses["listen"] for member in state.members)
    assert len(read_secret(group.secret_file)) == 32
    assert [member.host for member in state.members if member.role == "store"] == ["host-0", "host-1"]
    store = load_yaml(group.config_file("store-1"), StoreConfig)
    assert store.masters == [state.member("master-0").addresses["listen"]]
    assert local_groups(group.state_dir) == ["local"]

    stopped = group.stop()

    assert [(one.name, one.how) for one in stopped] == [
        ("store-0", "terminated"),
        ("store-1", "terminated"),
        ("master-0", "terminated"),
    ]
    assert running(group) == []
    assert not group.runtime_dir().exists()
    assert group.stop() == []


def test_second_start(make_group: MakeGroup) -> None:
    """A group that runs is left alone by a second start, which says so."""
    group = make_group()
    before = group.start(SMALL, timeout_s=WAIT_S)

    with pytest.raises(AlreadyRunning) as caught:
        group.start(SMALL, timeout_s=WAIT_S)

    assert caught.value.exit_code == 5
    assert "kvops stop" in caught.value.fix
    assert group.read() == before
    assert len(running(group)) == 3


def test_start_beside_what_is_left(make_group: MakeGroup) -> None:
    """Where only some members run, a start says how to get the others back."""
    group = make_group()
    group.start(SMALL, timeout_s=WAIT_S)
    group.act("kill", "store-1")

    with pytest.raises(AlreadyRunning) as caught:
        group.start(SMALL, timeout_s=WAIT_S)

    assert "kvops restart store-1" in caught.value.fix


@pytest.mark.parametrize(("mode", "code"), [("die", 5), ("killed", 1)])
def test_store_that_ends_while_starting(mode: str, code: int, make_group: MakeGroup) -> None:
    """When one store fails, all that was started is stopped again, and the error shows that store's log."""
    group = make_group(modes={"store-1": mode})

    with pytest.raises(StartFailed) as caught:
        group.start(SMALL, timeout_s=WAIT_S)

    assert running(group) == []
    assert "store-1" in caught.value.what
    assert caught.value.exit_code == code
    assert "standing in for store-1" in caught.value.log_lines


def test_member_that_is_never_ready(make_group: MakeGroup) -> None:
    """A start that takes too long is given up, and leaves nothing running."""
    group = make_group(modes={"master-0": "hang"})

    with pytest.raises(Unreachable, match="master-0 was not ready in time"):
        group.start(SMALL, timeout_s=0.3)

    assert running(group) == []


def test_start_after_a_failed_one(make_group: MakeGroup) -> None:
    """A failed start leaves nothing in the way of the next, and the secret stays the same."""
    with pytest.raises(StartFailed):
        make_group(modes={"store-1": "die"}).start(SMALL, timeout_s=WAIT_S)
    group = make_group()
    secret = group.secret_file.read_bytes()

    group.start(SMALL, timeout_s=WAIT_S)

    assert len(running(group)) == 3
    assert group.secret_file.read_bytes() == secret


START = """
import json, sys
from pathlib import Path
from kvops.fleet.local import LocalGroup
from kvops.fleet.start_plan import StartPlan

standin, folder = sys.argv[1:]
modes = json.dumps({"store-1": "hang"})
group = LocalGroup(
    Path(folder),
    "local",
    command=lambda role, path: [sys.executable, "-c", standin, role, str(path), modes],
)
group.start(
    StartPlan(stores=2, segment_size_bytes=1 << 20),
    timeout_s=600,
    tell=lambda name, text: print(name, text, flush=True),
)
"""


def test_interrupted_start(tmp_path: Path, make_group: MakeGroup) -> None:
    """Ctrl-C in the middle of a start stops what was started, a second Ctrl-C notwithstanding."""
    standin = make_group()._command("store", Path("/x"))[2]
    with subprocess.Popen(
        [sys.executable, "-c", START, standin, str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if "populated" in line), "")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)

    assert said.startswith("store-1")
    assert process.returncode in (1, -signal.SIGINT)
    assert running(make_group()) == []


def test_deaf_member_is_killed(make_group: MakeGroup) -> None:
    """A member that ignores SIGTERM is killed after its grace, and the receipt says so."""
    group = make_group(modes={"store-0": "deaf"})
    group.start(SMALL, timeout_s=WAIT_S)

    how = {one.name: one.how for one in group.stop(grace_s=5.0)}

    assert how == {"store-0": "killed", "store-1": "terminated", "master-0": "terminated"}


def test_stopped_member_ends(make_group: MakeGroup) -> None:
    """A member held by SIGSTOP still ends cleanly when asked to."""
    group = make_group()
    group.start(SMALL, timeout_s=WAIT_S)
    group.act("pause", "store-0")

    how = {one.name: one.how for one in group.stop(grace_s=WAIT_S)}

    assert how["store-0"] == "terminated"


def test_stop_now(make_group: MakeGroup) -> None:
    """With now, nobody is asked."""
    group = make_group()
    group.start(SMALL, timeout_s=WAIT_S)

    assert {one.how for one in group.stop(now=True)} == {"killed"}


def test_killed_member_is_told_from_a_stopped_one(make_group: MakeGroup) -> None:
    """A member that had ended by itself is not claimed as stopped by us."""
    group = make_group()
    group.start(SMALL, timeout_s=WAIT_S)
    group.act("kill", "store-1")

    assert {one.name: one.how for one in group.stop()}["store-1"] == "had ended"


@pytest.mark.parametrize("stale", ["reused pid", "former boot"])
def test_stale_state(stale: str, make_group: MakeGroup) -> None:
    """After a reboot, or when a pid has been given to somebody else, that process is never signalled."""
    group = make_group()
    group.start(SMALL, timeout_s=WAIT_S)
    group.stop()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        identity = identify(stranger.pid)
        assert identity is not None
        state = group.require()
        ticks = identity.started_ticks - 1 if stale == "reused pid" else identity.started_ticks
        boot = identity.boot_id if stale == "reused pid" else "c0ffee00-0000-4000-8000-000000000000"
        member = msgspec.structs.replace(
            state.member("store-0"), pid=stranger.pid, started_ticks=ticks, boot_id=boot
        )
        write_yaml(group.state_file, state.with_member(member))

        with pytest.raises(Unreachable):
            group.act("kill", "store-0")
        assert {one.name: one.how for one in group.stop(now=True)} == {"store-0": "had ended"}
        group.start(SMALL, timeout_s=WAIT_S)

        assert stranger.poll() is None
        stranger.kill()


def test_restart_one(make_group: MakeGroup) -> None:
    """Restarting a member leaves the others alone."""
    group = make_group()
    before = group.start(SMALL, timeout_s=WAIT_S)
    group.act("kill", "store-1")

    after = group.restart(["store-1"], timeout_s=WAIT_S)

    assert len(running(group)) == 3
    assert after.member("store-1").pid != before.member("store-1").pid
    assert after.member("store-0") == before.member("store-0")


def test_restarted_master_keeps_its_addresses(make_group: MakeGroup) -> None:
    """Clients and stores find a restarted master where it was, though its ports were any free ones."""
    group = make_group()
    before = group.start(SMALL, timeout_s=WAIT_S).member("master-0")

    after = group.restart(["master-0"], timeout_s=WAIT_S).member("master-0")

    assert after.pid != before.pid
    assert after.addresses == before.addresses
    assert load_yaml(group.config_file("master-0"), MasterConfig).listen == before.addresses["listen"]


def test_failed_restart_spares_the_others(make_group: MakeGroup) -> None:
    """When a restarted member fails, those that were not named keep running."""
    make_group().start(SMALL, timeout_s=WAIT_S)
    group = make_group(modes={"store-1": "die"})

    with pytest.raises(StartFailed):
        group.restart(["store-1"], timeout_s=WAIT_S)

    assert running(group) == ["master-0", "store-0"]


def test_port_in_use(make_group: MakeGroup) -> None:
    """A port in use is found before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        plan = StartPlan(stores=1, segment_size_bytes=1 << 20, listen=f"127.0.0.1:{server.getsockname()[1]}")

        with pytest.raises(Refused, match="the port is in use"):
            make_group().start(plan, timeout_s=WAIT_S)

    assert make_group().read() is None


def test_one_change_at_a_time(make_group: MakeGroup) -> None:
    """Two commands that change a group do not mix: the second is refused, naming the first."""
    group = make_group()
    with group.lock(), pytest.raises(Refused, match=f"pid {os.getpid()}"), make_group().lock(timeout_s=0):
        pass

    with group.lock():
        pass  # free again


def test_simultaneous_starts(make_group: MakeGroup) -> None:
    """Of two starts at once, one starts the group and the other finds it running."""
    results: list[str] = []

    def start() -> None:
        try:
            make_group().start(SMALL, timeout_s=WAIT_S)
            results.append("started")
        except AlreadyRunning:
            results.append("running")

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == ["running", "started"]
    assert len(running(make_group())) == 3


def test_groups_are_apart(make_group: MakeGroup) -> None:
    """Stopping one group leaves another alone."""
    one, other = make_group("one"), make_group("other")
    one.start(SMALL, timeout_s=WAIT_S)
    other.start(SMALL, timeout_s=WAIT_S)

    one.stop()

    assert len(running(other)) == 3


def test_unreadable_state(tmp_path: Path) -> None:
    """A file in place of the state folder, and a state file that is none, are one clear error each."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        LocalGroup(tmp_path / "file", "local").read()

    group = LocalGroup(tmp_path, "local")
    group.folder.mkdir(parents=True)
    group.state_file.write_text("members: 7\n")
    with pytest.raises(ConfigError, match=r"group\.yaml"):
        group.read()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything; run as another user")
def test_forbidden_state(tmp_path: Path) -> None:
    """A state folder that may not be entered is one clear error."""
    tmp_path.chmod(0)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            LocalGroup(tmp_path, "local").read()
    finally:
        tmp_path.chmod(0o700)


def test_newer_state(tmp_path: Path) -> None:
    """State of a newer version: unknown keys are passed over, another schema is refused."""
    group = LocalGroup(tmp_path, "local")
    group.folder.mkdir(parents=True)
    group.state_file.write_text("schema: 1\ngroup: local\nlater: 1\n")
    assert group.read() == GroupState(group="local")

    group.state_file.write_text("schema: 2\ngroup: local\n")
    with pytest.raises(ConfigError, match="newer kvops"):
        group.read()


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "-a", "x" * 64, "ä"])
def test_bad_name(name: str, tmp_path: Path) -> None:
    """A group's name is a plain word: it becomes a folder."""
    with pytest.raises(UsageError):
        LocalGroup(tmp_path, name)


def test_nothing_is_left_for_sockets(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the last group takes the folder of all groups' sockets along, and not before."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # sockets' paths are short
        private = Path(name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        group = make_group()
        group.start(SMALL, timeout_s=WAIT_S)
        other = group.runtime_dir().parent / "other"
        other.mkdir()

        group.stop()
        left = list(other.parent.iterdir())
        other.rmdir()
        group.start(SMALL, timeout_s=WAIT_S)
        group.stop()

        assert left == [other]
        assert list(private.iterdir()) == []


def test_foreign_runtime_folder(
    tmp_path: Path, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime folder that others can enter is not used for sockets."""
    open_to_all = tmp_path / "run"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(open_to_all))

    assert not make_group().runtime_dir().is_relative_to(open_to_all)


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"KVOPS_STATE_DIR": "/a"}, "/a"),
        ({"XDG_STATE_HOME": "/b"}, "/b/kvops"),
        ({"XDG_STATE_HOME": "relative"}, str(Path("~/.local/state/kvops").expanduser())),
    ],
)
def test_state_folder(env: dict[str, str], folder: str) -> None:
    """Where local groups live follows our variable, then the XDG specification."""
    assert str(default_state_dir(env)) == folder
