"""
A group that runs on hosts reached by SSH, as the pool of an experiment: looked at, kept for one run, broken there.

The masters say which members there are and where they listen; the inventory says on which host that is. Nothing is
started or stopped. The engines run on this machine, each under the logical host of a store, and reach every store by
tcp.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvops.addresses import split_address
from kvops.chaos.agent import Order
from kvops.chaos.experiment import Experiment, PoolSpec
from kvops.chaos.injecting import FORBIDDEN_ENVIRONMENTS, InForce, Terms, lost_share
from kvops.chaos.masters import Asked, ask
from kvops.chaos.pool import Part, said, without_neighbour
from kvops.chaos.procs import Size
from kvops.chaos.remote import COMMAND, START_TIMEOUT_S, Conversation, RemoteFaults
from kvops.errors import KvopsError, Refused, Unreachable, Unsupported, UsageError
from kvops.fleet.inventory import InventoryHost
from kvops.host import SshHost, SshLogin
from kvops.store.model import Event, MasterStatus, PlacementPolicy, StoreInfo, StoreState
from kvops.timestamps import rfc3339

if TYPE_CHECKING:
    from kvops.chaos.resolve import Hit

CONNECT_TIMEOUT_S: Final = 10.0
SIZES_TIMEOUT_S: Final = 3.0
BACK_TIMEOUT_S: Final = 60.0  # for the stores to be there again after an undo
_PAUSE_S: Final = 0.2
_SERVING: Final = (StoreState.READY, StoreState.ANNOUNCING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteGroup:
    """Where a group is, and how its hosts are reached."""

    name: str
    environment: str
    protect: bool
    masters: tuple[str, ...]  # of the wire, as clients are given them
    control: tuple[str, ...]  # of every master: host:port
    secret_file: str
    hosts: Mapping[str, InventoryHost]
    logins: Mapping[str, SshLogin]

    def labels(self, parts: Sequence[Part]) -> set[str]:
        """What the context and these members' hosts are labelled."""
        machines = {part.machine for part in parts}
        return {self.environment, *(text for one in machines for text in self.hosts[one].labels.values())}

    def refuse(self, parts: Sequence[Part] = ()) -> None:
        """
        Guard groups that serve somebody.

        Raises:
            Refused: It, or a host of these members, is labelled production; it is protected; or nobody said what it is.
        """
        found = sorted(one for one in self.labels(parts) if one.lower() in FORBIDDEN_ENVIRONMENTS)
        if found or self.protect:
            why = f"is labelled {found[0]}" if found else "is protected"
            raise Refused(f"group {self.name} {why}: no faults there", fix="use a staging group")
        if self.environment in ("", "unknown"):
            raise Refused(
                f"nobody says what group {self.name} is for",
                fix="add environment: staging to its context, if that is what it is",
            )

    def look(self) -> Seen:
        """
        The members as their masters have them now.

        Raises:
            UsageError: A master or a host is not said.
            Unreachable: A master does not answer, or none leads.
            Refused: A store is not well.
        """
        if not self.control:
            raise UsageError(
                f"context {self.name} names no control address",
                fix="add control: [HOST:PORT] of every master",
            )
        statuses = self.ask()
        silent = [address for address in self.control if address not in statuses]
        if silent:
            raise Unreachable(
                f"the master at {', '.join(silent)} does not answer", fix=f"kvops -g {self.name} status"
            )
        leader = _leader(statuses.values())
        if leader is None:
            raise Unreachable(f"no master of {self.name} leads", fix=f"kvops -g {self.name} status")
        names = {one.name for one in statuses.values()}
        unnamed = sorted(set(leader.members) - names)
        if unnamed:
            raise UsageError(
                f"context {self.name} has no control address of {', '.join(unnamed)}",
                fix="add control: [HOST:PORT] of every master",
            )
        ill = [one.name for one in leader.stores if one.state not in _SERVING]
        if ill:
            raise Refused(f"{', '.join(ill)} of {self.name} is not well", fix=f"kvops -g {self.name} status")
        return Seen(parts=self.parts_of(statuses), placement=leader.placement)

    def ask(self) -> dict[str, MasterStatus]:
        """What each master that answers says, by its control address."""
        found = ask(self._asked())
        return {one.name: one.status for one in found if one.status is not None}

    def events(self, address: str, since: str) -> list[Event]:
        """What one master noticed since a moment of its own clock."""
        asked = msgspec.structs.replace(self._asked(), masters=[(address, address)], since=since)
        return [event for one in ask(asked) for event in one.events]

    def _asked(self) -> Asked:
        return Asked(secret_file=self.secret_file, masters=[(one, one) for one in self.control])

    def parts_of(self, statuses: Mapping[str, MasterStatus]) -> list[Part]:
        """
        The members that masters speak of.

        Raises:
            UsageError: One is on no host of the inventory, or on several.
        """
        leader = _leader(statuses.values())
        parts = [
            self._part(
                "master", one, addresses={"listen": one.address, "control": control}, leads=one is leader
            )
            for control, one in statuses.items()
        ]
        parts += [
            self._part(
                "store",
                one,
                addresses={"listen": one.address, "http": one.http_address},
                boot_id=one.boot_id,
            )
            for one in (leader.stores if leader is not None else [])
            if one.state is not StoreState.GONE
        ]
        return parts

    def _part(
        self,
        role: str,
        one: MasterStatus | StoreInfo,
        *,
        addresses: dict[str, str],
        boot_id: str = "",
        leads: bool = False,
    ) -> Part:
        return Part(
            name=f"{self.name}/{one.name}",
            group=self.name,
            member=one.name,
            role=role,
            host=f"{self.name}/{one.host}",
            pid=one.pid,
            started_ticks=0,
            boot_id=boot_id,
            addresses=addresses,
            leads=leads,
            machine=self._machine(one.name, one.address, one.host),
        )

    def _machine(self, member: str, address: str, logical: str) -> str:
        """The host of the inventory that a member is on: by where it listens, then by its logical host."""
        place = split_address(address)[0]
        here = [name for name, host in self.hosts.items() if place in _addresses_of(host.address)]
        if len(here) != 1:
            named = [name for name in here or self.hosts if logical in (name, self.hosts[name].logical_host)]
            here = named or here
        if len(here) == 1:
            return here[0]
        said_of = f"is on {', '.join(here)} at once" if here else "is on no host of the inventory"
        raise UsageError(
            f"{member} ({address}, logical host {logical}) {said_of}",
            fix="give its host an address: that it listens on, or a logical_host:",
        )

    @contextmanager
    def reserved(self, run_id: str, parts: Sequence[Part]) -> Iterator[Reserved]:
        """
        Keep every host of the group for one run, and know how its clock differs from ours.

        Raises:
            Refused: On one of them an experiment runs, was left behind, or is forbidden.
            Unreachable: One cannot be reached.
            Unsupported: One has no kvops.
        """
        with ExitStack() as stack:
            kept = Reserved()
            for name in dict.fromkeys(part.machine for part in parts):
                ssh = kept.ssh[name] = stack.enter_context(closing(self.connect(name)))
                line = kept.lines[name] = stack.enter_context(
                    Conversation(ssh, (*COMMAND, "--reserve", run_id), when_silent="look at that host's sshd")
                )
                line.say(b"[]", START_TIMEOUT_S)
                before_ns = time.time_ns()
                answer = line.say(b"[]", START_TIMEOUT_S)
                kept.ahead_ns[name] = answer.at_ns - (before_ns + time.time_ns()) // 2
            yield kept

    def connect(self, name: str) -> SshHost:
        """A new connection to one host."""
        return self.logins[name].connect(CONNECT_TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A group as it was when it was looked at."""

    parts: list[Part]
    placement: PlacementPolicy


@dataclass(slots=True)
class Reserved:
    """What one run has of each host."""

    ssh: dict[str, SshHost] = field(default_factory=dict)
    lines: dict[str, Conversation] = field(default_factory=dict)
    ahead_ns: dict[str, int] = field(default_factory=dict)  # of our clock, to half a round trip


def on_group(experiment: Experiment, group: RemoteGroup, seen: Seen) -> Experiment:
    """
    The same experiment, on a group that runs on hosts.

    Raises:
        Unsupported: It asks for what such a group does not have.
    """
    spec = experiment.ours.pool
    if spec.groups > 1 or spec.roles_needed or spec.network == "lab":
        wants = (
            f"{spec.groups} groups"
            if spec.groups > 1
            else ", ".join(spec.roles_needed) or "a network namespace for each member"
        )
        raise Unsupported(
            f"the experiment wants {wants}, which {group.name} does not have",
            fix="run it on a pool of its own: kvops -g local chaos run",
        )
    stores = [part for part in seen.parts if part.role == "store"]
    pool = msgspec.structs.replace(
        spec,
        running=group.name,
        hosts=list(dict.fromkeys(part.host.partition("/")[2] for part in stores)),
        masters=sum(part.role == "master" for part in seen.parts),
        stores=len(stores),
        etcd=0,
        own_disk="0B",
        placement="random" if seen.placement is PlacementPolicy.RANDOM else "local-first",
        transports=["tcp"],
    )
    return msgspec.structs.replace(experiment, kvops=msgspec.structs.replace(experiment.ours, pool=pool))


class RemotePool:
    """A group on hosts that are kept for this run."""

    def __init__(self, spec: PoolSpec, group: RemoteGroup, seen: Seen, kept: Reserved) -> None:
        self.spec = spec
        self._group = group
        self._kept = kept
        self._parts = seen.parts
        self._stores = {part.member for part in seen.parts if part.role == "store"}

    def parts(self, *, roles: bool = False) -> list[Part]:
        """
        Every member as it is now, by the masters; one that does not answer is as it was last.

        Raises:
            UsageError: A member has come on a host that is not kept for this run.
        """
        statuses = self._group.ask()
        found = {part.name: part for part in self._group.parts_of(statuses)}
        strangers = [part for part in found.values() if part.machine not in self._kept.lines]
        if strangers:
            raise UsageError(
                f"{strangers[0].name} has come on {strangers[0].machine}, which is not kept for this run",
                fix="run it again",
            )
        led = any(part.leads for part in found.values())
        for old in self._parts:
            if old.name not in found:
                found[old.name] = replace(old, leads=old.leads and not led)
        self._parts = list(found.values())
        return self._parts

    def client_options(self, group: str) -> dict[str, Any]:
        """What an engine here connects with."""
        return {
            "masters": list(self._group.masters),
            "secret_file": self._group.secret_file,
            "group": group,
            "transports": ["tcp"],
        }

    def ensure_running(self, *, wait: bool = True) -> list[str]:
        """
        Wait until every store serves again; nothing is started from here.

        Raises:
            Unreachable: One does not.
        """
        deadline, pause = time.monotonic() + BACK_TIMEOUT_S, threading.Event()
        while wait:
            leader = _leader(self._group.ask().values())
            well = (
                {one.name for one in leader.stores if one.state in _SERVING} if leader is not None else set()
            )
            missing = sorted(self._stores - well)
            if not missing:
                self.parts()
                return []
            if time.monotonic() >= deadline:
                raise Unreachable(
                    f"{', '.join(missing)} of {self._group.name} did not come back within {BACK_TIMEOUT_S:g} s",
                    fix="see its log on its host",
                )
            pause.wait(_PAUSE_S)
        return []

    def statuses(self, group: str) -> list[tuple[str, MasterStatus]]:
        """What each master that answers says of itself."""
        return [(one.name, one) for one in self._group.ask().values()]

    def events(self, group: str, since: str) -> list[Event]:
        """What the masters noticed since a moment; moments of their clocks are told by ours."""
        found = []
        for part in self._parts:
            if part.role != "master":
                continue
            ahead_s = self._kept.ahead_ns[part.machine] / 1e9
            found += [
                msgspec.structs.replace(event, time=_moved(event.time, -ahead_s))
                for event in self._group.events(part.addresses["control"], _moved(since, ahead_s))
            ]
        return found

    def sizes(self) -> list[tuple[Part, Size]]:
        """What each member's process holds, as its host says; a host that does not answer is left out."""
        found = []
        parts = self._parts
        for name, line in self._kept.lines.items():
            here = [part for part in parts if part.machine == name]
            try:
                sizes = line.say(json.dumps([part.pid for part in here]).encode(), SIZES_TIMEOUT_S).sizes
            except KvopsError:
                continue
            found += [(part, sizes[part.pid]) for part in here if part.pid in sizes]
        return found

    def injection(self, hits: Sequence[Hit], terms: Terms) -> RemoteFaults:
        """
        Faults on members, by the hosts that these run on.

        Raises:
            Refused: A target has no neighbour.
            Unsupported: … or none that can be asked from its host.
        """
        from kvops.chaos.faults import catalogue

        now = {part.name: part for part in self._parts}
        known: dict[str, Any] = catalogue()
        orders: dict[str, list[tuple[Order, InForce]]] = {}
        for hit in hits:
            part, arguments = now[hit.part.name], said(hit)
            if hit.control is None:
                raise without_neighbour(part.name)
            control = now[hit.control.name]
            row = InForce(
                fault=hit.call.name,
                target=part.member,
                group=part.group,
                host=part.host.partition("/")[2],
                lost_share=lost_share(known[hit.call.name], arguments),
                undo=(),
            )
            order = Order(
                fault=hit.call.name,
                target=part.member,
                arguments=arguments,
                group=part.group,
                control_http=_askable(control, part),
                pid=part.pid,
                http=part.addresses.get("http", ""),
                listen=part.addresses["listen"],
                role=part.role,
                host=row.host,
                environment=self._group.environment,
                protect=self._group.protect,
                lease_s=terms.lease_s,
                deadline_s=terms.deadline_s,
                verify_timeout_s=terms.verify_timeout_s,
                compose=terms.compose,
                name=terms.name,
            )
            orders.setdefault(part.machine, []).append((order, row))
        return RemoteFaults(
            orders,
            connected=self._kept.ssh.__getitem__,
            connect=self._group.connect,
            on_state=terms.on_state,
        )


def _askable(control: Part, target: Part) -> str:
    """Where the host of a target can ask the neighbour that must stay well."""
    http = control.addresses.get("http", "")
    if not http:
        raise Unsupported(
            f"the neighbour {control.name} does not say where it answers http",
            fix="choose a target of another role",
        )
    if control.machine != target.machine and split_address(http)[0] in ("127.0.0.1", "::1", "localhost"):
        raise Unsupported(
            f"the neighbour {control.name} answers http on its own host alone ({http}): {target.machine} cannot ask it",
            fix="give stores an http address that others can reach (http: ADDRESS:PORT in their configuration)",
        )
    return http


def _leader(statuses: Any) -> MasterStatus | None:
    leading = [one for one in statuses if one.role == "leader"]
    return max(leading, key=lambda one: int(one.term)) if leading else None


def _moved(text: str, by_s: float) -> str:
    at = datetime.fromisoformat(text) + timedelta(seconds=by_s)
    return rfc3339(at.astimezone(UTC))


def _addresses_of(text: str) -> set[str]:
    """An address as it stands, and what its name stands for."""
    try:
        return {
            text,
            *(str(found[4][0]) for found in socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)),
        }
    except OSError:
        return {text}
