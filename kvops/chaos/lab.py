"""
A staging fleet on one machine: a network namespace with an address of its own for each node of a local group.

::

    kvops-<tag>-sw      the switch: a bridge, nothing else
    kvops-<tag>-<node>  a node: eth0 (10.78.0.x), one end of a veth pair whose other end is on the bridge

The group in it is an ordinary local group: ``kvops status``, ``logs`` and ``replay`` know it, and look at it from
the node for clients. What was made is written down before it is made, so that ``down`` also removes what a
killed ``up`` left.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvops.chaos import netns
from kvops.chaos.ledger import Book
from kvops.chaos.procs import pids
from kvops.errors import KvopsError, LeftBehind, Refused, Unreachable, Unsupported, UsageError
from kvops.files import load_yaml, write_yaml
from kvops.fleet.bring_up import Tell
from kvops.fleet.group_folder import DEFAULT_GROUP
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.local import LocalGroup
from kvops.fleet.process import identify, send_signal, wait_ended
from kvops.fleet.programs import Command, serve_command
from kvops.fleet.start_plan import StartPlan

if TYPE_CHECKING:
    from kvops.store.config import MasterConfig, StoreConfig

NODES_MAX: Final = 64
NETWORK: Final = "10.78.0"
COMMAND_TIMEOUT_S: Final = 10.0
RESTART_TIMEOUT_S: Final = 30.0
CLIENT_NODE: Final = "client"  # where engines and other observers live


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its namespace and its address."""

    name: str
    netns: str
    address: str = ""  # "" of the switch


class Lab(msgspec.Struct, frozen=True, kw_only=True):
    """``<state-dir>/chaos/labs/<group>.yaml``."""

    schema: int = 1
    group: str
    tag: str
    nodes: list[Node]

    @property
    def inode(self) -> int:
        """
        The namespace of the node for clients, from which all others are reached.

        Raises:
            Unreachable: It has ended: the machine was started anew, or somebody removed it.
        """
        try:
            return (netns.NAMED / self.node(CLIENT_NODE).netns).stat().st_ino
        except OSError as error:
            named = "" if self.group == DEFAULT_GROUP else f" -g {self.group}"
            raise Unreachable(
                f"the lab of group {self.group} is written down, but its namespaces have ended",
                fix=f"forget it: kvops{named} chaos lab down",
            ) from error

    def node(self, name: str) -> Node:
        """
        The node of that name.

        Raises:
            UsageError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise UsageError(
            f"the lab has no node {name}", fix=f"its nodes: {', '.join(one.name for one in self.nodes)}"
        )


def lab_file(state_dir: Path, group: str) -> Path:
    """Where a lab is written down."""
    return state_dir / "chaos" / "labs" / f"{group}.yaml"


def read(state_dir: Path, group: str) -> Lab | None:
    """The lab of a group; None when it has none."""
    path = lab_file(state_dir, group)
    return load_yaml(path, Lab) if path.exists() else None


def missing() -> str | None:
    """Why no namespaces can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt install {package}"
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    return None if tried.returncode == 0 else "the kernel lets us make no network namespace"


class LabGroup(LocalGroup):
    """A local group whose members each run on a node of a lab."""

    def __init__(self, state_dir: Path, lab: Lab, *, command: Command = serve_command) -> None:
        def on_node(role: str, config_file: Path) -> Sequence[str]:
            node = lab.node(config_file.stem)
            return ["nsenter", f"--net={netns.NAMED / node.netns}", *command(role, config_file)]

        super().__init__(state_dir, lab.group, command=on_node)
        self.lab = lab

    def _etcd_address(self, name: str) -> str:
        return self.lab.node(name).address

    def _preflight(self, plan: StartPlan) -> None:
        """The addresses are the nodes' own: nobody else can have them. Memory is checked as ever."""
        here = replace(plan, listen="127.0.0.1:0", control="127.0.0.1:0", http="127.0.0.1:0")
        super()._preflight(here)

    def _master_config(
        self, plan: StartPlan, name: str, number: int, endpoints: Sequence[str]
    ) -> MasterConfig:
        address = self.lab.node(name).address
        config = super()._master_config(plan, name, number, endpoints)
        return msgspec.structs.replace(
            config, listen=f"{address}:0", control=f"{address}:0", http=f"{address}:0", unix_path=""
        )

    def _store_config(self, plan: StartPlan, state: GroupState, member: Member) -> StoreConfig:
        address = self.lab.node(member.name).address
        config = super()._store_config(plan, state, member)
        # A node of its own is another machine: no memory is shared with its clients.
        return msgspec.structs.replace(
            config, listen=f"{address}:0", http=f"{address}:0", unix_path="", transports=["tcp"]
        )


def up(
    state_dir: Path,
    group: str,
    plan: StartPlan,
    *,
    timeout_s: float,
    tell: Tell,
    command: Command = serve_command,
) -> Lab:
    """
    Make the nodes and start the group on them; a lab that is up is left as it is.

    Args:
        state_dir: Where the lab and its group are written down.
        group: Its name.
        plan: What is started. Addresses are the nodes' own, the transport is tcp.
        timeout_s: For the start.
        tell: Told of each step.
        command: How a role is run.

    Raises:
        Unsupported: No namespaces can be made here.
        Refused: A group of this name runs outside a lab.
        KvopsError: The group did not start; the nodes are removed again.
    """
    reason = missing()
    if reason is not None:
        raise Unsupported(f"no lab can be made: {reason}", fix="plain processes: kvops start --stores 3")
    names = [CLIENT_NODE, *(member.name for member in plan.members())]
    if len(names) > NODES_MAX:
        raise UsageError(f"{len(names)} nodes in one lab", fix=f"use {NODES_MAX} at most")
    found = read(state_dir, group)
    state = LocalGroup(state_dir, group).read()
    running = state is not None and any(member.running for member in state.members)
    if (
        found is not None
        and running
        and state is not None
        and all(member.running for member in state.members)
    ):
        return found
    if found is None and running:
        raise Refused(
            f"group {group} runs outside a lab",
            fix=f"stop it, or name another: kvops chaos lab up -g {group}-lab",
        )
    if found is not None:
        down(state_dir, group, tell=tell)  # half of it: what a killed up left
    tag = uuid.uuid4().hex[:6]
    nodes = [Node(name="switch", netns=f"kvops-{tag}-sw")]
    nodes += [
        Node(name=name, netns=f"kvops-{tag}-{index}", address=f"{NETWORK}.{index + 1}")
        for index, name in enumerate(names)
    ]
    lab = Lab(group=group, tag=tag, nodes=nodes)
    lab_file(state_dir, group).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_yaml(lab_file(state_dir, group), lab)
    try:
        _make(lab)
        tell("nodes", f"{len(names)} made")
        started = replace(plan, transports=("tcp",))
        LabGroup(state_dir, lab, command=command).start(started, timeout_s=timeout_s, tell=tell)
    except BaseException:
        down(state_dir, group, tell=lambda name, text: None)
        raise
    return lab


def down(state_dir: Path, group: str, *, tell: Tell) -> list[str]:
    """
    Stop the group, remove its nodes, and forget both; of a lab that is not there nothing is left to do.

    What a dead experiment left is taken back first: some of it outlives a namespace. A lab whose namespaces
    have ended (the machine was started anew) is forgotten.

    Returns:
        The namespaces that were removed.

    Raises:
        Refused: An experiment runs.
        LeftBehind: A namespace is still there, or an experiment's undo is not complete.
    """
    lab = read(state_dir, group)
    if lab is None:
        return []
    _end_experiments(state_dir)
    LabGroup(state_dir, lab).stop(tell=tell)
    removed = []
    for node in reversed(lab.nodes):
        path = netns.NAMED / node.netns
        if not path.exists():
            continue
        _end_processes(path.stat().st_ino)
        _ip("netns", "del", node.netns)
        removed.append(node.netns)
    left = [node.netns for node in lab.nodes if (netns.NAMED / node.netns).exists()]
    if left:
        commands = "; ".join(f"ip netns del {name}" for name in left)
        raise LeftBehind(f"namespaces are left: {', '.join(left)}", fix=commands)
    shutil.rmtree(LabGroup(state_dir, lab).folder, ignore_errors=True)
    lab_file(state_dir, group).unlink()
    tell("nodes", f"{len(removed)} removed")
    return removed


def _end_experiments(state_dir: Path) -> None:
    from kvops.chaos.control import recover

    running = Book(state_dir).run_by()
    if running is not None:
        raise Refused(f"experiment {running} is running", fix="end it first: kvops chaos abort")
    dirty = [one for one in recover(state_dir) if not one.clean]
    if dirty:
        commands = [command for one in dirty for command in one.commands]
        raise LeftBehind(
            f"something of {', '.join(one.id for one in dirty)} is left behind", fix="; ".join(commands)
        )


@contextmanager
def inside(lab: Lab | None) -> Iterator[None]:
    """While this lasts, the calling thread and what it starts are on the lab's node for clients, if there is one."""
    if lab is None:
        yield
        return
    with netns.entered(lab.inode):
        yield


def restart(
    state_dir: Path, group: str, members: Sequence[str], *, timeout_s: float, command: Command = serve_command
) -> None:
    """
    Start members again, those that run included; where the group has a lab, on their nodes.

    Raises:
        KvopsError: One did not start.
    """
    lab = read(state_dir, group)
    if lab is not None:
        found: LocalGroup = LabGroup(state_dir, lab, command=command)
    else:
        found = LocalGroup(state_dir, group, command=command)
    found.restart(members, timeout_s=timeout_s)


def _make(lab: Lab) -> None:
    switch, *nodes = lab.nodes
    for node in lab.nodes:
        _must("netns", "add", node.netns)
        _must("-n", node.netns, "link", "set", "lo", "up")
    _must("-n", switch.netns, "link", "add", "br0", "type", "bridge")
    _must("-n", switch.netns, "link", "set", "br0", "up")
    for index, node in enumerate(nodes):
        port = f"port{index}"
        words = ["type", "veth", "peer", "name", port, "netns", switch.netns]
        # From within the node: older kernels (6.1) look for the name in the namespace of whoever asks, too.
        _must("-n", node.netns, "link", "add", "eth0", *words)
        _must("-n", switch.netns, "link", "set", port, "master", "br0", "up")
        _must("-n", node.netns, "addr", "add", f"{node.address}/24", "dev", "eth0")
        _must("-n", node.netns, "link", "set", "eth0", "up")


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *words],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _must(*words: str) -> None:
    result = _ip(*words)
    if result.returncode != 0:
        raise Unsupported(f"ip {' '.join(words)}: {result.stderr.strip()}", fix="see kvops chaos doctor")


def _end_processes(inode: int) -> None:
    """End whatever runs in a namespace: while one process lives there, it is not gone."""
    found = []
    for pid in pids():
        if pid == os.getpid():
            continue
        try:
            inside = netns.inode_of(pid) == inode
        except OSError:
            continue  # it ended
        identity = identify(pid) if inside else None
        if identity is not None:
            found.append(identity)
            send_signal(identity, signal.SIGKILL)
    wait_ended(found, timeout_s=5.0)


def main(argv: list[str]) -> int:
    """``python -m kvops.chaos.lab restart STATE_DIR GROUP MEMBER [ARGV…]``: what an undo step runs."""
    _, state_dir, group, member, *words = argv
    try:
        restart(
            Path(state_dir),
            group,
            [member],
            timeout_s=RESTART_TIMEOUT_S,
            command=(lambda role, config_file: words) if words else serve_command,
        )
    except KvopsError as error:
        print(error, file=sys.stderr)  # noqa: T201 (its caller reads it)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
