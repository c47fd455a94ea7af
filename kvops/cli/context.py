"""
Which group a command acts on, and where that was said.

A name stands for a context of ``~/.config/kvops/config.yaml`` or ``/etc/kvops/config.yaml``, or for a local
group. Precedence of every value: flag, environment, user file, system file, default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvops.cli.options import Settings
from kvops.errors import ConfigError, Unreachable, UsageError
from kvops.files import default_state_dir, load_yaml, write_private
from kvops.fleet.group_folder import DEFAULT_GROUP, local_groups
from kvops.fleet.group_state import GroupState
from kvops.fleet.local import LocalGroup

ETCD_TIMEOUT_S: Final = 1.0
SYSTEM_FILE: Final = Path("/etc/kvops/config.yaml")


class Context(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group that runs somewhere, as a configuration file names it."""

    masters: list[str] = []  # wire addresses, host:port
    control: list[str] = []  # gRPC addresses, host:port
    etcd: list[str] = []
    secret_file: str = ""
    inventory: str = ""
    environment: str = ""
    protect: bool = False


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``~/.config/kvops/config.yaml`` and ``/etc/kvops/config.yaml``."""

    schema: int = 1
    group: str = ""  # the one that commands act on when nothing else is said
    state_dir: str = ""
    contexts: dict[str, Context] = {}


@dataclass(frozen=True, slots=True)
class Value:
    """A setting and where it came from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Everything said about groups, merged."""

    group: Value
    state_dir: Value
    contexts: dict[str, dict[str, Value]]  # context → field → value

    def context(self, name: str) -> Context | None:
        """The merged context of that name."""
        fields = self.contexts.get(name)
        return None if fields is None else Context(**{key: value.value for key, value in fields.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The one group a command acts on."""

    name: str
    environment: str
    local: LocalGroup | None = None
    state: GroupState | None = None  # of a local group that was started once
    masters: list[str] = field(default_factory=list)  # of the wire: host:port, or a Unix socket's path
    control: list[str] = field(default_factory=list)
    secret_file: Path | None = None
    protect: bool = False
    lab: bool = False  # its members are on nodes of a lab, and so is this process from now on

    @property
    def label(self) -> str:
        """How human output begins."""
        return f"{self.name} ({self.environment}{', lab' if self.lab else ''})"

    @property
    def kvops(self) -> str:
        """How a command begins that acts on this group."""
        return "kvops" if self.name == DEFAULT_GROUP else f"kvops -g {self.name}"

    def require_local(self) -> LocalGroup:
        """
        The local group.

        Raises:
            UsageError: This is a context: its processes are not ours to run.
        """
        if self.local is None:
            raise UsageError(
                f"{self.name} is a context, not a group on this machine", fix="name a local group with -g"
            )
        return self.local

    def require_masters(self) -> list[str]:
        """
        Where its masters speak the wire.

        Raises:
            Unreachable: A local group that does not run.
            UsageError: A context that names none.
        """
        if self.masters:
            return self.masters
        if self.local is not None:
            raise self.not_running()
        raise UsageError(
            f"context {self.name} names no masters", fix="add masters: [HOST:PORT] or etcd: [HOST:PORT] to it"
        )

    def not_running(self) -> Unreachable:
        """Why a local group cannot be asked: it does not run at all, or its masters alone do not."""
        members = self.state.members if self.state is not None else []
        if any(member.running for member in members):
            names = [member.name for member in members if member.role == "master" and not member.running]
            verb = "is" if len(names) == 1 else "are"
            return Unreachable(
                f"{', '.join(names)} of group {self.name} {verb} down",
                fix=f"{self.kvops} restart {' '.join(names)}",
            )
        return Unreachable(f"group {self.name} does not run", fix=f"start it: {self.kvops} start")

    def secret(self) -> bytes:
        """
        The group secret.

        Raises:
            ConfigError: There is none, or it cannot be read.
        """
        from kvops.files import read_secret

        if self.secret_file is None:
            raise ConfigError(f"context {self.name} names no secret_file", fix="add secret_file: PATH to it")
        return read_secret(self.secret_file)


def user_file(env: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CONFIG_HOME/kvops/config.yaml``, else ``~/.config/kvops/config.yaml``."""
    home = env.get("XDG_CONFIG_HOME", "")
    return (Path(home) if home.startswith("/") else Path("~/.config").expanduser()) / "kvops/config.yaml"


def _load(path: Path) -> ConfigFile:
    if not path.is_file():
        return ConfigFile()
    found = load_yaml(path, ConfigFile)
    if found.schema != 1:
        raise ConfigError(f"{path} has schema {found.schema}; this kvops knows 1", fix="use a newer kvops")
    return found


def load_configuration(
    settings: Settings, *, env: Mapping[str, str] = os.environ, system_file: Path = SYSTEM_FILE
) -> Configuration:
    """
    Merge flags, environment and the two files.

    Raises:
        ConfigError: A file is unreadable or wrong.
    """
    files = [
        (f"user file {user_file(env)}", _load(user_file(env))),
        (f"system file {system_file}", _load(system_file)),
    ]

    def first(flag: Any, option: str, variable: str, attribute: str, default: Any) -> Value:
        if flag is not None:
            return Value(flag, f"flag {option}")
        if env.get(variable):
            return Value(env[variable], f"environment {variable}")
        for origin, file in files:
            if getattr(file, attribute):
                return Value(getattr(file, attribute), origin)
        return Value(default, "default")

    contexts: dict[str, dict[str, Value]] = {}
    for origin, file in reversed(files):  # the user file's values lie over the system file's
        for name, context in file.contexts.items():
            fields = contexts.setdefault(name, {})
            for key in Context.__struct_fields__:
                value = getattr(context, key)
                if value not in ("", [], False):
                    fields[key] = Value(value, origin)
    return Configuration(
        group=first(settings.group, "--group", "KVOPS_GROUP", "group", DEFAULT_GROUP),
        state_dir=first(
            settings.state_dir, "--state-dir", "KVOPS_STATE_DIR", "state_dir", default_state_dir(env)
        ),
        contexts=contexts,
    )


def resolve(settings: Settings, *, starting: bool = False) -> Target:
    """
    The group that a command acts on. Nothing is made or changed. Of a group in a lab the calling thread moves to
    the lab's node for clients: its members have addresses in the lab's network namespaces alone.

    Args:
        settings: What the command line says.
        starting: The command makes a local group when there is none.

    Raises:
        UsageError: No such group, or two of this name.
        ConfigError: A file or the state folder is unreadable.
        Unreachable: The group's lab has ended.
    """
    configuration = load_configuration(settings)
    name, origin = str(configuration.group.value), configuration.group.origin
    state_dir = Path(configuration.state_dir.value).expanduser().absolute()
    local = LocalGroup(state_dir, name)
    made = _lab(state_dir, name)
    if made is not None:
        local = made
    state = local.read()
    context = configuration.context(name)
    if context is not None:
        if state is not None:
            raise UsageError(
                f"{name} is both a context and a local group in {state_dir}",
                fix=f"rename the context, or remove {local.folder} when that group is not needed",
            )
        if starting:
            raise UsageError(
                f"{name} is a context: its group runs elsewhere", fix="name another group with -g"
            )
        return Target(
            name=name,
            environment=context.environment or "unknown",
            masters=context.masters or _by_etcd(context, name),
            control=context.control or _leader_control(context, name),
            secret_file=Path(context.secret_file).expanduser() if context.secret_file else None,
            protect=context.protect,
        )
    if state is None and not starting and origin != "default":
        known = [*configuration.contexts, *local_groups(state_dir)]
        raise UsageError(
            f"there is no group {name} (said by {origin})",
            fix=f"known: {', '.join(known) or 'none'}; start one here with kvops -g {name} start",
        )
    masters = (
        [member for member in state.members if member.role == "master" and member.running] if state else []
    )
    return Target(
        name=name,
        environment=state.environment if state else "local",
        local=local,
        state=state,
        # By Unix socket where it has one: half the latency of loopback tcp.
        masters=[
            address
            for member in masters
            for address in (member.addresses.get("unix"), member.addresses.get("listen"))
            if address
        ],
        control=[member.addresses["control"] for member in masters if "control" in member.addresses],
        secret_file=local.secret_file,
        lab=made is not None,
    )


def _lab(state_dir: Path, name: str) -> LocalGroup | None:
    """The group, where it is in a lab that is up; we are on its node for clients then."""
    if not (state_dir / "chaos" / "labs" / f"{name}.yaml").exists():  # lab_file(), without loading chaos
        return None
    from kvops.chaos import lab, netns

    made = lab.read(state_dir, name)
    if made is None:
        return None
    netns.enter(made.inode)
    return lab.LabGroup(state_dir, made)


def _by_etcd(context: Context, name: str) -> list[str]:
    return [f"etcd://{','.join(context.etcd)}/{name}"] if context.etcd else []


def _leader_control(context: Context, name: str) -> list[str]:
    """Where the leader's control service is, as etcd has it now; nothing when nobody says."""
    from kvops.net.etcd_query import EtcdEndpoint, leader_view, parse_masters

    endpoints = [one for one in parse_masters(_by_etcd(context, name)) if isinstance(one, EtcdEndpoint)]
    try:
        return [leader_view(endpoints, timeout_s=ETCD_TIMEOUT_S).control] if endpoints else []
    except Unreachable:
        return []


def use(name: str, *, env: Mapping[str, str] = os.environ) -> Path:
    """
    Make ``name`` the group that commands act on, in the user's file; its other lines, comments included,
    stay.

    Raises:
        ConfigError: The file is wrong or cannot be written.
    """
    path = user_file(env)
    _load(path)  # a file that is wrong already is not to be made worse
    text = path.read_text() if path.is_file() else ""
    line = f"group: {name}"
    text, changed = re.subn(r"(?m)^group:.*$", line, text, count=1)
    if not changed:
        text = f"{line}\n{text}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path.parent}: {error.strerror}", fix="make it writable") from error
    write_private(path, text.encode())
    return path
