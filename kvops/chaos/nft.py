"""
Rules of ours in a table of our own, ended by the kernel when their time is over.

Every rule asks a set whose elements time out (nft(8), ``flags timeout``): nothing has to live for it to heal. On
a node with a network namespace of its own, all of its traffic is meant. Of a process that shares its namespace
with others only what belongs to it: connections to the ports it serves, connections it has, and, by
control group, those it will make.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kvops.chaos import netns
from kvops.chaos.steps import DeleteNftTable, RemoveCgroup, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.fleet.process import ProcessIdentity

PRIORITY: Final = -300  # before connection tracking and anybody's filter
_CGROUP2: Final = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))  # hybrid, version 2 alone


@cache
def missing() -> str | None:
    """Why no rules can be made here: asked of the kernel, by a check that changes nothing."""
    if os.geteuid() != 0:
        return "rules need root"
    if shutil.which("nft") is None:
        return "nft is not installed: apt install nftables"
    text = ruleset("kvops_check", ["meta l4proto @on counter name in_hits drop"], [], expires_s=1)
    result = netns.run_in(netns.inode_of(), ["nft", "-c", "-f", "-"], text=text)
    if result is None or result.returncode != 0:
        return f"the kernel refuses such rules: {result.stderr.strip()[:120] if result else 'no namespace'}"
    return None


@cache
def queue_missing() -> str | None:
    """Why packets cannot be handed to a process by a rule: asked of the kernel, by a check that changes nothing."""
    if missing() is not None:
        return missing()
    text = ruleset("kvops_check", ["meta l4proto @on queue num 1 bypass"], [], expires_s=1)
    result = netns.run_in(netns.inode_of(), ["nft", "-c", "-f", "-"], text=text)
    return None if result is not None and result.returncode == 0 else "the kernel has no nft queue expression"


def cgroup2_root() -> Path | None:
    """Where control groups of version 2 are mounted."""
    for path in _CGROUP2:
        if (path / "cgroup.procs").exists() and (path / "cgroup.controllers").exists():
            return path
    return None


def no_cgroup(target: Target) -> str | None:
    """Why connections that a process will make cannot be told from its neighbours'; None when they can."""
    if not shares_namespace(target):
        return None
    root = cgroup2_root()
    if root is None or not os.access(root, os.W_OK):
        return (
            "it shares its network namespace, and no control group of version 2 can be made to tell it apart"
        )
    return None


def ruleset(table: str, inward: list[str], outward: list[str], *, expires_s: float, more: str = "") -> str:
    """A table's text: what is done to packets towards the target, and from it."""
    seconds = max(1, round(expires_s))
    on = ", ".join(f"{name} timeout {seconds}s" for name in ("tcp", "udp", "icmp", "ipv6-icmp"))
    lines = [
        f"table inet {table} {{",
        f"set on {{ type inet_proto; flags timeout; elements = {{ {on} }}; }}",
        *(f"counter {name} {{ }}" for name in ("in_hits", "in_seen", "out_hits", "out_seen")),
        more,
        f"chain inward {{ type filter hook input priority {PRIORITY}; policy accept;",
        *(f"{rule};" for rule in inward),
        "}",
        f"chain outward {{ type filter hook output priority {PRIORITY}; policy accept;",
        *(f"{rule};" for rule in outward),
        "}",
        "}",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How packets of one target are told from others, one pattern a rule."""

    inward: list[str]
    outward: list[str]
    ports: list[int]  # that it serves


def shares_namespace(target: Target) -> bool:
    """Whether others live in its namespace: then it is told by its ports."""
    return target.netns == netns.inode_of()


def match(target: Target, *, peers: tuple[str, ...] = (), served_only: bool = False) -> Match:
    """
    Packets towards a target and from it.

    Args:
        target: A node's process.
        peers: Only to and from these, ``host`` or ``host:port``; empty: all.
        served_only: Only what others begin: what the target begins itself is left alone.
    """
    served, own = ports_of(target.processes)
    inward: list[str] = []
    outward: list[str] = []
    for source, destination in _peer_patterns(peers):
        if not shares_namespace(target) and not served_only:
            inward.append(f'iifname != "lo" {source}')
            outward.append(f'oifname != "lo" {destination}')
            continue
        ports = sorted({*served} if served_only else {*served, *own})
        if ports:
            numbers = ", ".join(map(str, ports))
            inward.append(f"{source} tcp dport {{ {numbers} }}")
            outward.append(f"{destination} tcp sport {{ {numbers} }}")
    return Match(inward=inward, outward=outward, ports=sorted(served))


def _peer_patterns(peers: tuple[str, ...]) -> list[tuple[str, str]]:
    if not peers:
        return [("", "")]
    found = []
    for peer in peers:
        host, colon, port = peer.rpartition(":")
        if not colon:
            host, port = peer, ""
        family = "ip6" if ":" in host else "ip"
        host = host.strip("[]")
        source, destination = f"{family} saddr {host}", f"{family} daddr {host}"
        if port:
            source, destination = f"{source} tcp sport {port}", f"{destination} tcp dport {port}"
        found.append((source, destination))
    return found


def ports_of(processes: tuple[ProcessIdentity, ...]) -> tuple[set[int], set[int]]:
    """The tcp ports that processes listen on, and those of the connections that they have."""
    inodes = set()
    for identity in processes:
        folder = f"/proc/{identity.pid}/fd"
        try:
            names = os.listdir(folder)  # noqa: PTH208
        except OSError:
            continue
        for name in names:
            try:
                link = os.readlink(f"{folder}/{name}")  # noqa: PTH115
            except OSError:
                continue
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    served: set[int] = set()
    own: set[int] = set()
    for file in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{processes[0].pid}/net/{file}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[9] in inodes:  # proc_net_tcp: local address is word 1, state word 3, inode word 9
                port = int(words[1].rpartition(":")[2], 16)
                (served if words[3] == "0A" else own).add(port)
    return served, own - served


def connections_of(target: Target, port: int) -> frozenset[str]:
    """Connections to a port of the target, those that ended a moment ago included, by their far address."""
    found = set()
    for file in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{target.leader.pid}/net/{file}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] != "0A" and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[2])
    return frozenset(found)


def load(target: Target, text: str) -> None:
    """
    Load a ruleset in the target's namespace.

    Raises:
        FaultNotApplied: The kernel refused it; nothing was loaded then (nft loads all or nothing).
    """
    argv = ["nft", "-f", "-"]
    if "socket cgroupv2" in text and cgroup2_root() == _CGROUP2[0]:
        # nft looks the group up at the canonical place, where hybrid systems have another file system.
        argv = ["unshare", "-m", "sh", "-c", "mount -t cgroup2 none /sys/fs/cgroup && exec nft -f -"]
    result = netns.run_in(target.netns, argv, text=text)
    if result is None or result.returncode != 0:
        reason = result.stderr.strip()[:300] if result is not None else "its namespace has ended"
        raise FaultNotApplied(f"the rules were refused: {reason}", fix="see kvops chaos doctor")


def join_cgroup(target: Target, token: str) -> str:
    """Put the target into a group of its own; returns how connections that it makes later are told, or ""."""
    root = cgroup2_root()
    if root is None:
        return ""
    (root / token).mkdir(exist_ok=True)
    for identity in target.processes:
        try:
            (root / token / "cgroup.procs").write_text(str(identity.pid))
        except ProcessLookupError:
            continue  # it ended
    return f'socket cgroupv2 level 1 "{token}"'


def undo(target: Target, token: str) -> list[UndoStep]:
    """What takes the table away, and the group where one is made."""
    steps: list[UndoStep] = [DeleteNftTable(netns=target.netns, table=token)]
    root = cgroup2_root()
    if root is not None and shares_namespace(target):
        steps.append(RemoveCgroup(path=str(root / token), back=str(root / _v2_path(target))))
    return steps


def _v2_path(target: Target) -> str:
    for line in target.cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            return path.lstrip("/")
    return ""


def hits(target: Target, table: str) -> dict[str, int]:
    """
    The table's counters by name.

    Raises:
        FaultNotApplied: The table is not there, or its time is over.
    """
    result = netns.run_in(target.netns, ["nft", "list", "table", "inet", table])
    if result is None or result.returncode != 0:
        raise FaultNotApplied(f"table {table} is not there", fix="see the ledger: was it undone?")
    if "timeout" not in result.stdout.partition("elements")[2].partition("}")[0]:
        raise FaultNotApplied(f"the time of table {table} is over", fix="allow more with its deadline")
    return {
        name: int(packets) for name, packets in re.findall(r"counter (\w+) \{\s*packets (\d+)", result.stdout)
    }
