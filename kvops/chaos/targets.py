"""What a fault acts on: a role with all its processes, where it answers, and how it is started again."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from kvops.chaos import netns
from kvops.chaos.procs import argv_of, running, tree
from kvops.chaos.steps import RestartRole, StartProcess
from kvops.errors import Refused, Unreachable, UsageError
from kvops.fleet.process import ProcessIdentity, identify

if TYPE_CHECKING:
    from kvops.chaos.model import Fault
    from kvops.fleet.local import LocalGroup

_GIVEN: Final = frozenset(
    {"target", "control", "token", "expires_s", "seen", "members"}
)  # not for an experiment to say


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One role: a master, a store, an engine, a member of etcd, or any process."""

    name: str
    role: str
    host: str = ""  # logical: its failure domain
    group: str = ""
    environment: str = "local"
    protect: bool = False
    processes: tuple[ProcessIdentity, ...] = ()
    netns: int = 0  # inode
    addresses: Mapping[str, str] = field(default_factory=dict)  # listen, http, control, client: host:port
    restart: RestartRole | StartProcess | None = None
    cgroups: str = ""  # /proc/<pid>/cgroup, as it was when the target was chosen
    config_file: str = ""
    state_dir: str = ""  # its own files

    @property
    def leader(self) -> ProcessIdentity:
        """Its first process."""
        return self.processes[0]

    @property
    def now(self) -> Target:
        """The same role as it runs now: another process after a restart."""
        if isinstance(self.restart, RestartRole):
            from kvops.fleet.local import LocalGroup

            for one in of_group(LocalGroup(Path(self.restart.state_dir), self.restart.group)):
                if one.name == self.name:
                    return one
        if isinstance(self.restart, StartProcess):
            found = next(running(self.restart.argv), None)
            if found is not None:
                return dataclasses.replace(self, processes=tuple(tree(found)))
        return self


def of_process(
    pid: int,
    *,
    name: str,
    role: str = "process",
    addresses: Mapping[str, str] | None = None,
    log_file: str = "",
    **more: Any,
) -> Target:
    """
    Any process as a target, to be started again with the arguments, environment and folder it has now.

    Raises:
        Unreachable: It does not run.
    """
    found = identify(pid)
    try:
        if found is None:
            raise ProcessLookupError(pid)
        argv = argv_of(pid)
        pairs = (
            os.fsdecode(word).partition("=")
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        )
        env = {key: value for key, equals, value in pairs if equals}
        cwd = os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
        inode = netns.inode_of(pid)
        cgroups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError as error:
        raise Unreachable(
            f"{name} (pid {pid}) does not run, or is not ours to see", fix="start it"
        ) from error
    return Target(
        name=name,
        role=role,
        processes=tuple(tree(found)),
        netns=inode,
        cgroups=cgroups,
        addresses=dict(addresses or {}),
        restart=StartProcess(
            argv=argv, env=env, cwd=cwd, log_file=log_file, netns=inode if inode != netns.inode_of() else 0
        ),
        **more,
    )


def of_group(group: LocalGroup) -> list[Target]:
    """
    The members of a local group that run.

    Raises:
        Unreachable: There is no such group here.
    """
    state = group.require()
    found = []
    for member in state.members:
        identity = member.identity
        if identity is None or not member.running:
            continue
        found.append(
            Target(
                name=member.name,
                role=member.role,
                host=member.host,
                group=state.group,
                environment=state.environment,
                processes=tuple(tree(identity)),
                netns=netns.inode_of(member.pid),
                cgroups=Path(f"/proc/{member.pid}/cgroup").read_text(),
                addresses=member.addresses or _etcd_address(group, member.name, member.role),
                restart=RestartRole(
                    state_dir=str(group.state_dir),
                    group=group.name,
                    member=member.name,
                    argv=argv_of(member.pid),
                    in_lab=netns.inode_of(member.pid) != netns.inode_of(),
                ),
                config_file=str(group.config_file(member.name)),
                state_dir=str(group.folder / member.name),
            )
        )
    return found


def _etcd_address(group: LocalGroup, name: str, role: str) -> dict[str, str]:
    """Where a member of etcd answers clients: it says so in its configuration alone."""
    if role != "etcd":
        return {}
    try:
        said = yaml.safe_load(group.config_file(name).read_text())
        return {"client": str(said["listen-client-urls"]).removeprefix("http://")}
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}


def fellows(target: Target, role: str) -> list[Target]:
    """The members of a role in the target's group, as they run now; of a lone process only itself."""
    if isinstance(target.restart, RestartRole):
        from kvops.fleet.local import LocalGroup

        group = LocalGroup(Path(target.restart.state_dir), target.restart.group)
        return [one for one in of_group(group) if one.role == role]
    return [target]


def select(
    targets: Iterable[Target], *, name: str | None = None, role: str | None = None, host: str | None = None
) -> list[Target]:
    """
    Those that fit all that is said.

    Raises:
        UsageError: None does: an experiment on nothing passes for ever.
    """
    targets = list(targets)
    found = [
        one
        for one in targets
        if name in (None, one.name) and role in (None, one.role) and host in (None, one.host)
    ]
    if found:
        return found
    said = ", ".join(
        f"{key} {value}" for key, value in (("name", name), ("role", role), ("host", host)) if value
    )
    names = [one.name for one in targets]
    near = get_close_matches(name or role or host or "", [*names, *{one.role for one in targets}], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"no target has {said or 'what was asked for'}", fix=f"{hint}there are: {', '.join(names) or 'none'}"
    )


def neighbour(targets: Iterable[Target], target: Target) -> Target:
    """
    A role that must stay well while ``target`` is troubled: of the same role where there is one.

    Raises:
        Refused: The target is alone: nothing could show that the fault stays where it was put.
    """
    others = [one for one in targets if one.name != target.name]
    others.sort(key=lambda one: (one.role != target.role, one.host == target.host, one.name))
    if not others:
        raise Refused(
            f"{target.name} has no neighbour that could stay well",
            fix="start a second store: kvops start --stores 2",
        )
    return others[0]


def parameters(fault: type) -> dict[str, Any]:
    """What an experiment may say of a fault: name and default (``dataclasses.MISSING`` when it must)."""
    return {one.name: one.default for one in dataclasses.fields(fault) if one.name not in _GIVEN}


def build(name: str, arguments: Mapping[str, Any], *, target: Target, control: Target) -> Fault:
    """
    A fault from an experiment's words; nothing is touched.

    Raises:
        UsageError: No such fault or argument, or a value that does not fit; with the nearest name.
    """
    from kvops.chaos.faults import catalogue

    faults = catalogue()
    if name not in faults:
        near = get_close_matches(name, faults, n=1)
        raise UsageError(
            f"there is no fault {name!r}",
            fix=f"did you mean {near[0]}?" if near else "see kvops chaos catalog",
        )
    cls = faults[name]
    known = parameters(cls)
    for said in arguments:
        if said not in known:
            near = get_close_matches(said, known, n=1)
            takes = f"{name} takes {', '.join(known)}" if known else f"{name} takes no arguments"
            raise UsageError(
                f"{name} has no argument {said!r}", fix=f"did you mean {near[0]}?" if near else takes
            )
    missing = [
        key for key, default in known.items() if default is dataclasses.MISSING and key not in arguments
    ]
    if missing:
        raise UsageError(f"{name} needs {', '.join(missing)}", fix=f"add {missing[0]}: …")
    hints = typing.get_type_hints(cls, localns=vars(types))
    values = {}
    for key, value in arguments.items():
        try:
            values[key] = msgspec.convert(value, hints[key], strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"{name}: {key}: {error}", fix="see kvops chaos catalog") from error
    try:
        built: Fault = cls(target=target, control=control, **values)
    except ValueError as error:
        raise UsageError(f"{name}: {error}", fix="see kvops chaos catalog") from error
    return built
