"""
What is there, before and after: rules, control groups, links, limits, helper processes and files of one experiment.

All that a fault makes carries its token in its name, so that a neighbour's work on the same machine is never
taken for a leftover of ours; of the targets' own namespaces and processes everything is compared.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from kvops.chaos import netns
from kvops.chaos.procs import with_word
from kvops.fleet.process import ProcessIdentity, is_running, is_stopped

CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
CGROUP_DEPTH_MAX: Final = 8
FOLDERS: Final = ("/tmp", "/dev/shm", "/run/netns")  # noqa: S108 (looked at, for names of ours alone)
_LIMITS: Final = ("NOFILE", "NPROC", "MEMLOCK", "FSIZE", "AS")
ENDED: Final = "ended"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A target's process."""

    pid: int
    started_ticks: int
    boot_id: str

    @property
    def identity(self) -> ProcessIdentity:
        """As signals need it."""
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Where an experiment may leave something."""

    tokens: list[str]
    netns: list[int] = []
    processes: list[Process] = []


def take(scope: Scope) -> dict[str, str]:
    """What is there now: a value for each place."""
    picture: dict[str, str] = {}
    own = netns.inode_of()
    for inode in scope.netns:
        tables = _run(inode, ["nft", "-s", "list", "ruleset"])
        if inode == own:
            picture["rules of this host"] = "\n".join(_ours(tables, scope.tokens))
            continue
        picture[f"rules of namespace {inode}"] = tables
        picture[f"links of namespace {inode}"] = _steady(_run(inode, ["ip", "-o", "link", "show"]))
        picture[f"queues of namespace {inode}"] = _run(inode, ["tc", "qdisc", "show"])
    for process in scope.processes:
        picture[f"process {process.pid}"] = _process(process.identity)
    for token in scope.tokens:
        picture[f"helpers {token}"] = " ".join(str(one.pid) for one in with_word(token))
        picture[f"files {token}"] = " ".join(_named(token))
        picture[f"cgroups {token}"] = " ".join(_cgroups(token))
    return picture


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What is not as it was, one line each; a target that ended meanwhile has left nothing."""
    found = []
    for place in sorted({*before, *after}):
        was, now = before.get(place, ""), after.get(place, "")
        if was == now or now == ENDED or (now == "gone" and "namespace" in place):
            continue
        found.append(f"{place}: was {_short(was)}, is {_short(now)}")
    return found


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return (flat[:160] + "…" if len(flat) > 160 else flat) or "nothing"


def _run(inode: int, argv: list[str]) -> str:
    if shutil.which(argv[0]) is None:
        return f"{argv[0]} is not installed"
    result = netns.run_in(inode, argv)
    if result is None:
        return "gone"
    return result.stdout if result.returncode == 0 else f"cannot be seen: {result.stderr.strip()[:100]}"


def _ours(ruleset: str, tokens: list[str]) -> list[str]:
    return [line for line in ruleset.splitlines() if any(token in line for token in tokens)]


def _steady(links: str) -> str:
    """Without what changes by itself: a peer's index, the state of a carrier."""
    return re.sub(r"(state \S+|@\S+|link-netns\S* \S+)", "", links)


def _process(identity: ProcessIdentity) -> str:
    if not is_running(identity):
        return ENDED
    parts = ["stopped" if is_stopped(identity) else "running"]
    try:
        for name in _LIMITS:
            soft, hard = resource.prlimit(identity.pid, getattr(resource, f"RLIMIT_{name}"))
            parts.append(f"{name}={soft}:{hard}")
        parts += sorted(Path(f"/proc/{identity.pid}/cgroup").read_text().split())
    except (OSError, ProcessLookupError):
        return ENDED if not is_running(identity) else " ".join([*parts, "(limits cannot be seen)"])
    return " ".join(parts)


def _named(token: str) -> list[str]:
    found = []
    for folder in FOLDERS:
        try:
            found += [f"{folder}/{name}" for name in os.listdir(folder) if token in name]  # noqa: PTH208
        except OSError:
            continue
    return sorted(found)


def _cgroups(token: str) -> list[str]:
    found = []
    root = len(CGROUP_ROOT.parts)
    for folder, names, _ in os.walk(CGROUP_ROOT):
        found += [f"{folder}/{name}" for name in names if token in name]
        if len(Path(folder).parts) - root >= CGROUP_DEPTH_MAX:
            names.clear()
    return sorted(found)
