"""
The pool that an experiment breaks: local groups of its own, one logical host for each store and each engine.

Members are named ``group/member``, such as ``g1/store-0``. Nothing of it is left afterwards. With a network of
``lab`` each member has a network namespace of its own; a lab that is up already can be the pool, too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import yaml

from kvops.chaos import lab, masters, targets
from kvops.chaos.experiment import Experiment, PoolSpec, size_bytes
from kvops.chaos.injecting import Injecting, Terms
from kvops.chaos.keeper import kept
from kvops.chaos.lifecycle import Injection
from kvops.chaos.procs import Size, size_of
from kvops.errors import LeftBehind, NotInjected, Refused, Unsupported, UsageError
from kvops.fleet import etcd
from kvops.fleet.group_state import Member
from kvops.fleet.local import LocalGroup
from kvops.fleet.programs import Command, serve_command
from kvops.fleet.start_plan import StartPlan
from kvops.host import LocalHost
from kvops.limits import GIB
from kvops.store.model import Event, MasterStatus

if TYPE_CHECKING:
    from kvops.chaos.resolve import Hit

START_TIMEOUT_S: Final = 60.0
MOUNT_TIMEOUT_S: Final = 10.0
START_TIMEOUT_S_PER_GIB: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One member of the pool under test, as targets are chosen from."""

    name: str  # group/member
    group: str
    member: str
    role: str
    host: str  # group/logical host
    pid: int
    started_ticks: int
    boot_id: str
    addresses: dict[str, str] = field(default_factory=dict)
    leads: bool = False  # of a master: whether it led when it was asked
    machine: str = ""  # of the inventory, when it is reached by SSH


class Pool(Protocol):
    """What a runner needs of the groups that it breaks, wherever they run."""

    spec: PoolSpec

    def parts(self, *, roles: bool = False) -> list[Part]:
        """Every member as it is now; ``roles`` asks which master leads."""
        ...

    def client_options(self, group: str) -> dict[str, Any]:
        """What a client of a group connects with."""
        ...

    def ensure_running(self, *, wait: bool = True) -> list[str]:
        """See to it that every member runs, or wait until they do; the names of what was started for that."""
        ...

    def statuses(self, group: str) -> list[tuple[str, MasterStatus]]:
        """What each master that answers says of itself."""
        ...

    def events(self, group: str, since: str) -> list[Event]:
        """What the masters noticed since a moment of our clock, RFC 3339; by our clock."""
        ...

    def sizes(self) -> list[tuple[Part, Size]]:
        """What each member's process holds, of those that can be seen."""
        ...

    def injection(self, hits: Sequence[Hit], terms: Terms) -> Injecting:
        """Faults on members, where these run; nothing is touched yet."""
        ...


@dataclass(slots=True)
class PoolUnderTest:
    """Running groups, and how clients reach them."""

    spec: PoolSpec
    groups: dict[str, LocalGroup]
    state_dir: Path
    ledger_dir: Path

    def parts(self, *, roles: bool = False) -> list[Part]:
        """Every member as it is now: a restarted one has another pid. ``roles`` asks masters which one leads."""
        found = []
        for name, group in self.groups.items():
            state = group.require()
            leader = self._leader(group) if roles else ""
            found += [self._part(name, member, leader) for member in state.members]
        return found

    @staticmethod
    def _leader(group: LocalGroup) -> str:
        """The name of the master that leads; empty while none says so."""
        found = [(status.term, name) for name, status in masters.statuses(group) if status.role == "leader"]
        return max(found)[1] if found else ""

    @staticmethod
    def _part(group_name: str, member: Member, leader: str) -> Part:
        return Part(
            name=f"{group_name}/{member.name}",
            group=group_name,
            member=member.name,
            role=member.role,
            host=f"{group_name}/{member.host}",
            pid=member.pid,
            started_ticks=member.started_ticks,
            boot_id=member.boot_id,
            addresses=dict(member.addresses),
            leads=member.name == leader,
        )

    def part(self, name: str) -> Part:
        """
        One member.

        Raises:
            UsageError: There is none of that name.
        """
        parts = self.parts()
        for part in parts:
            if part.name == name:
                return part
        raise UsageError(
            f"the pool has no member {name}", fix=f"its members: {', '.join(one.name for one in parts)}"
        )

    def masters(self, group: str) -> list[str]:
        """Wire addresses of a group's masters."""
        state = self.groups[group].require()
        return [one.addresses["listen"] for one in state.members if one.role == "master"]

    def client_options(self, group: str) -> dict[str, Any]:
        """What a client of a group connects with; between logical hosts it uses the network."""
        return {
            "masters": self.masters(group),
            "secret_file": str(self.groups[group].secret_file),
            "group": group,
            "transports_between_hosts": ["tcp"],
        }

    def ensure_running(self, *, wait: bool = True) -> list[str]:
        """Start what has ended, as its supervisor would; returns the names of what was started."""
        started = []
        for name, group in self.groups.items():
            for member in group.require().members:
                if not member.running:
                    group.restart([member.name], timeout_s=START_TIMEOUT_S)
                    started.append(f"{name}/{member.name}")
        return started

    def statuses(self, group: str) -> list[tuple[str, MasterStatus]]:
        """What each master that answers says of itself."""
        return masters.statuses(self.groups[group])

    def events(self, group: str, since: str) -> list[Event]:
        """What the masters noticed since a moment, RFC 3339."""
        return masters.events(self.groups[group], since)

    def sizes(self) -> list[tuple[Part, Size]]:
        """What each member's process holds, of those that run."""
        return [(part, size) for part in self.parts() if (size := size_of(part.pid)) is not None]

    def injection(self, hits: Sequence[Hit], terms: Terms) -> Injection:
        """
        Faults on members, by this process.

        Raises:
            NotInjected: A target does not run.
            Refused: One has no neighbour.
        """
        members = {
            f"{name}/{one.name}": _asked_where(one)
            for name, group in self.groups.items()
            for one in targets.of_group(group)
        }
        faults = []
        for hit in hits:
            target = members.get(hit.part.name)
            if target is None:
                raise NotInjected(f"{hit.part.name} does not run", fix="see its log")
            control = members.get(hit.control.name) if hit.control is not None else None
            if control is None:
                raise without_neighbour(hit.part.name)
            faults.append(targets.build(hit.call.name, said(hit), target=target, control=control))
        return Injection(
            faults,
            host=LocalHost(),
            state_dir=self.ledger_dir,
            lease_s=terms.lease_s,
            deadline_s=terms.deadline_s,
            on_state=terms.on_state,
            verify_timeout_s=terms.verify_timeout_s,
            name=terms.name,
            compose=terms.compose,
        )

    def healthy(self) -> str | None:
        """Why a member does not run as it should; None while all do."""
        for part_name, member in self._members():
            if not member.running:
                return f"{part_name} does not run"
            if member.stopped:
                return f"{part_name} is stopped"
        return None

    def _members(self) -> Iterator[tuple[str, Member]]:
        for name, group in self.groups.items():
            for member in group.require().members:
                yield f"{name}/{member.name}", member


def _asked_where(target: targets.Target) -> targets.Target:
    """A member of etcd says nothing of its address when it starts: its configuration does."""
    if target.role != "etcd" or "http" in target.addresses:
        return target
    found = yaml.safe_load(Path(target.config_file).read_text())
    address = str(found["listen-client-urls"]).partition(",")[0].removeprefix("http://")
    return replace(target, addresses={**target.addresses, "http": address, "listen": address})


def said(hit: Hit) -> dict[str, Any]:
    """The arguments of a fault, without those of the runner's own."""
    return {key: value for key, value in hit.call.arguments.items() if key != "hold"}


def without_neighbour(name: str) -> Refused:
    """Why a target that is alone is no target."""
    return Refused(f"{name} has no neighbour that could stay well", fix="give the pool another store")


def check_supported(spec: PoolSpec) -> None:
    """
    Refuse a pool that this version cannot start.

    Raises:
        Unsupported: With the reason.
    """
    if spec.etcd:
        try:
            etcd.program()
        except Refused as error:
            raise Unsupported(
                f"the experiment's pool has an etcd of its own: {error.what}", fix=error.fix
            ) from None
    if size_bytes(spec.own_disk) and os.geteuid() != 0:
        raise Unsupported("the experiment's pool wants a file system of its own", fix="run it as root")
    if spec.network == "lab":
        reason = lab.missing()
        if reason is not None:
            raise Unsupported(
                f"the experiment's pool wants a network namespace for each member: {reason}",
                fix="run it as root, or with network: host",
            )
        if spec.groups > 1:
            raise Unsupported(
                f"{spec.groups} groups in one lab: its nodes are one network of one group",
                fix="use network: host",
            )
    if spec.roles_needed:
        raise Unsupported(
            f"the experiment needs {', '.join(spec.roles_needed)}, which a local group does not have",
            fix="run it on a pool that has this role",
        )
    if "verbs" in spec.transports:
        raise Unsupported(
            "verbs needs an RDMA device", fix="use shm and tcp, or run it on hosts that have one"
        )


@contextmanager
def started(
    spec: PoolSpec, *, state_dir: Path, folder: Path | None = None, command: Command = serve_command
) -> Iterator[PoolUnderTest]:
    """
    Start the pool that an experiment asks for; whatever happens, it is stopped and its files are removed.

    Args:
        spec: What to start.
        state_dir: Where ledgers lie: who clears up after a killed runner waits for its guardians first.
        folder: Where; a private temporary folder by default.
        command: How a role is run: the seam for variants of it.

    Raises:
        Unsupported: This version cannot start such a pool.
        KvopsError: It did not start.
        LeftBehind: A process did not end.
    """
    check_supported(spec)
    if spec.running:
        with _found(spec, state_dir) as pool:
            yield pool
        return
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="kvops-chaos-", dir=folder))
        stack.enter_context(kept(home, state_dir))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        if size_bytes(spec.own_disk):
            stack.callback(_unmount, home)
            _mount(home, size_bytes(spec.own_disk))
        pool = PoolUnderTest(spec=spec, groups={}, state_dir=home, ledger_dir=state_dir)
        segment_bytes = size_bytes(spec.segment_size)
        timeout_s = START_TIMEOUT_S + START_TIMEOUT_S_PER_GIB * spec.stores * segment_bytes / GIB
        plan = StartPlan(
            stores=spec.stores,
            segment_size_bytes=segment_bytes,
            placement=spec.placement,
            masters=spec.masters,
            etcd_members=spec.etcd,
            transports=tuple(spec.transports),
        )
        for name in group_names(spec):
            if spec.network == "lab":
                stack.callback(lab.down, home, name, tell=_to_nobody)
                made = lab.up(home, name, plan, timeout_s=timeout_s, tell=_to_nobody, command=command)
                # On the clients' node from here on: there the members can be reached, and nowhere else.
                stack.enter_context(lab.inside(made))
                pool.groups[name] = lab.LabGroup(home, made, command=command)
                continue
            group = LocalGroup(home, name, command=command)
            stack.callback(_stop, group)
            group.start(plan, timeout_s=timeout_s)
            pool.groups[name] = group
        yield pool


def _mount(folder: Path, size: int) -> None:
    options = f"size={size},mode=0700"
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "kvops-chaos", str(folder)],
        capture_output=True,
        text=True,
        timeout=MOUNT_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        raise Unsupported(
            f"no file system of its own can be made: {result.stderr.strip()}", fix="run it as root"
        )


def _unmount(folder: Path) -> None:
    """Lazily: whoever still has a file open in it keeps that alone."""
    subprocess.run(
        ["umount", "--lazy", str(folder)], capture_output=True, timeout=MOUNT_TIMEOUT_S, check=False
    )


def _to_nobody(name: str, text: str) -> None:
    """Nobody watches the start of a pool under test."""


@contextmanager
def _found(spec: PoolSpec, state_dir: Path) -> Iterator[PoolUnderTest]:
    """A lab's group that runs already, left running; its objects of this run stay until they are evicted."""
    made = lab.read(state_dir, spec.running)
    if made is None:
        raise UsageError(
            f"group {spec.running} has no lab under {state_dir}",
            fix=f"make it: kvops -g {spec.running} chaos lab up",
        )
    with lab.inside(made):
        group = lab.LabGroup(state_dir, made)
        pool = PoolUnderTest(
            spec=spec, groups={spec.running: group}, state_dir=state_dir, ledger_dir=state_dir
        )
        trouble = pool.healthy()
        if trouble is not None:
            raise Refused(f"the lab is not well: {trouble}", fix=f"kvops -g {spec.running} restart")
        yield pool


def on_lab(experiment: Experiment, state_dir: Path, group: str) -> Experiment:
    """
    The same experiment, on a lab that is up.

    Raises:
        UsageError: That group has no lab.
        Unsupported: The lab lacks what the experiment asks for.
    """
    spec = experiment.ours.pool
    if lab.read(state_dir, group) is None:
        raise UsageError(
            f"group {group} has no lab under {state_dir}", fix=f"make it: kvops -g {group} chaos lab up"
        )
    state = LocalGroup(state_dir, group).require()
    have = {role: sum(one.role == role for one in state.members) for role in ("master", "store", "etcd")}
    wanted = {"master": spec.masters, "store": spec.stores, "etcd": spec.etcd}
    for role, count in wanted.items():
        if have[role] < count:
            raise Unsupported(
                f"the experiment wants {count} × {role}, the lab of {group} has {have[role]}",
                fix="kvops chaos lab down, then up with more: see kvops chaos lab up --help",
            )
    if spec.groups > 1:
        raise Unsupported(
            f"the experiment wants {spec.groups} groups, a lab has one", fix="run it without --lab"
        )
    pool = msgspec.structs.replace(
        spec,
        running=group,
        network="lab",
        masters=have["master"],
        stores=have["store"],
        etcd=have["etcd"],
        placement="random" if state.placement == "random" else "local-first",
        transports=["tcp"],
    )
    return msgspec.structs.replace(experiment, kvops=msgspec.structs.replace(experiment.ours, pool=pool))


def _stop(group: LocalGroup) -> None:
    try:
        group.stop(grace_s=1.0)
    except LeftBehind:
        group.stop(now=True)


def group_names(spec: PoolSpec) -> Sequence[str]:
    """Names of the groups of a pool."""
    if spec.running:
        return [spec.running]
    return [f"g{number + 1}" for number in range(spec.groups)]


def logical_hosts(spec: PoolSpec) -> list[str]:
    """The logical hosts of a group's stores and engines; of a group that runs already, its stores'."""
    return spec.hosts or [f"host-{number}" for number in range(max(spec.engines, spec.stores))]


def engine_names(spec: PoolSpec, group: str) -> list[str]:
    """Names of a group's engines, which are clients of it."""
    return [f"{group}e{number}" for number in range(spec.engines)]


def planned_parts(spec: PoolSpec) -> list[Part]:
    """The members that a pool will have, before it is started: without processes."""
    parts = []
    for group in group_names(spec):
        names = [("master", f"master-{n}", f"host-{n}") for n in range(spec.masters)]
        names += [("store", f"store-{n}", f"host-{n}") for n in range(spec.stores)]
        names += [("etcd", f"etcd-{n}", f"host-{n}") for n in range(spec.etcd)]
        names += [(role, f"{role}-{n}", f"host-{n}") for role in spec.roles_needed for n in range(2)]
        parts += [
            Part(
                name=f"{group}/{member}",
                group=group,
                member=member,
                role=role,
                host=f"{group}/{host}",
                pid=0,
                started_ticks=0,
                boot_id="",
                leads=member == "master-0",
            )
            for role, member, host in names
        ]
    return parts
