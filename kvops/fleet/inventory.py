"""
The hosts of a fleet, their addresses and what they are for, as one YAML file says it.

::

    schema: 1
    defaults: {user: kvops, identity_file: ~/.ssh/kvops}
    groups:
      prefill:
        roles: [store, engine]
        labels: {rack: r1}
        hosts:
          gpu-[001-040]: {address: "10.0.1.[1-40]", numa_nodes: [0, 1]}
      control:
        roles: [master]
        hosts: [ctl-1, ctl-2, ctl-3]

What a host says goes before what its group says, and that before ``defaults``; labels are merged, roles of
several groups are joined.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvops.errors import ConfigError, ParseError, UsageError
from kvops.files import read_small
from kvops.host import SshLogin
from kvops.ranges import split_list

SCHEMA: Final = 1
HOSTS_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 4 << 20
ROLES: Final = ("master", "store", "engine", "router", "etcd")

_SHARED: Final = ("user", "port", "identity_file", "known_hosts_file", "labels", "roles", "numa_nodes")
_FILE_KEYS: Final = ("schema", "defaults", "groups")
_GROUP_KEYS: Final = (*_SHARED, "hosts")
_HOST_KEYS: Final = ("address", "logical_host", *_SHARED)
_FILES: Final = ("identity_file", "known_hosts_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryHost:
    """One host, with everything that is said about it merged."""

    name: str
    address: str
    user: str | None = None
    port: int = 22
    identity_file: Path | None = None
    known_hosts_file: Path | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    logical_host: str = ""  # the failure domain that placement sees
    numa_nodes: tuple[int, ...] = ()  # one store each; none said: as the host has them
    groups: tuple[str, ...] = ()

    @property
    def login(self) -> SshLogin:
        """How to reach it."""
        return SshLogin(
            name=self.name,
            address=self.address,
            user=self.user,
            port=self.port,
            key_file=str(self.identity_file) if self.identity_file is not None else None,
            known_hosts=str(self.known_hosts_file) if self.known_hosts_file is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Every host of a file, in its order."""

    source: str
    hosts: Mapping[str, InventoryHost]

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the file's order."""
        return tuple(dict.fromkeys(group for host in self.hosts.values() for group in host.groups))

    def select(self, words: Iterable[str]) -> list[InventoryHost]:
        """
        The hosts that are meant.

        Args:
            words: Names and ranges (``gpu-[001-004]``), globs (``gpu-*``), groups (``prefill``), roles
                (``role=store``) and labels (``rack=r1``). None at all means every host.

        Raises:
            UsageError: A word names no host; the message suggests one that does.
        """
        chosen: dict[str, InventoryHost] = {}
        names = split_list(words)
        for word in names:
            found = self._find(word)
            if not found:
                near = [name for name in self.hosts if _bare(name) == _bare(word)]
                near += difflib.get_close_matches(word, [*self.hosts, *self.groups], n=1)
                raise UsageError(
                    f"{self.source} has no host, group, role or label {word!r}",
                    fix=f"did you mean {near[0]!r}?"
                    if near
                    else f"groups: {', '.join(self.groups) or 'none'}; {len(self.hosts)} hosts",
                )
            chosen.update((host.name, host) for host in found)
        return list(chosen.values()) if names else list(self.hosts.values())

    def _find(self, word: str) -> list[InventoryHost]:
        if word in self.hosts:
            return [self.hosts[word]]
        hosts = self.hosts.values()
        if word in self.groups:
            return [host for host in hosts if word in host.groups]
        key, equals, value = word.partition("=")
        if equals:
            return [h for h in hosts if (value in h.roles if key == "role" else h.labels.get(key) == value)]
        if any(char in word for char in "*?"):
            return [host for host in hosts if fnmatch.fnmatchcase(host.name, word)]
        return []


def _bare(name: str) -> str:
    """The name without leading zeros: gpu-5 is meant for gpu-005."""
    return re.sub(r"0+(?=[0-9])", "", name)


def load_inventory(path: Path) -> Inventory:
    """
    Read an inventory.

    Raises:
        ConfigError: It cannot be read, is not YAML, has a key nobody knows, a host twice, or a value of the
            wrong kind; the message names the place and what would be right.
    """
    raw = read_small(
        path,
        unreadable="check the path and its permissions; playbooks/fleet.md says how to write one",
        too_large="use ranges: gpu-[001-040]",
        bytes_max=FILE_BYTES_MAX,
    )
    return parse_inventory(raw, source=str(path), folder=path.parent)


def parse_inventory(raw: bytes, *, source: str, folder: Path) -> Inventory:
    """
    Decode an inventory's text.

    Args:
        raw: YAML.
        source: Names it in errors.
        folder: What relative key files are relative to.

    Raises:
        ConfigError: As :func:`load_inventory`.
    """
    data = _mapping(_yaml(raw, source), source, _FILE_KEYS)
    if data.get("schema", SCHEMA) != SCHEMA:
        raise ConfigError(
            f"{source}: schema is {data['schema']!r}; this kvops knows {SCHEMA}",
            fix=f"write schema: {SCHEMA}",
        )
    defaults = _fields(
        _mapping(data.get("defaults"), f"{source}: defaults", _SHARED), f"{source}: defaults", folder
    )
    hosts: dict[str, InventoryHost] = {}
    groups = data.get("groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"{source} has no groups", fix="write groups: {NAME: {hosts: [HOST]}}")
    for group, body in groups.items():
        where = f"{source}: groups.{group}"
        if not isinstance(group, str) or not group or any(char in group for char in "=*?[], "):
            raise ConfigError(
                f"{where}: {group!r} is no name for a group", fix="use letters, digits, - and _"
            )
        table = _mapping(body, where, _GROUP_KEYS)
        shared = _over(defaults, _fields(table, where, folder))
        for name, said in _hosts(table.get("hosts"), where):
            place = f"{where}.hosts.{name}"
            for host in _expand(name, said, shared, place, folder):
                _add(hosts, replace(host, groups=(group,)), place)
    if len(hosts) > HOSTS_MAX:
        raise ConfigError(f"{source} has more than {HOSTS_MAX} hosts", fix="split it")
    clash = next((name for name in hosts if name in groups), None)
    if clash is not None:
        raise ConfigError(f"{source}: {clash!r} is both a group and a host", fix="rename one of them")
    return Inventory(source=source, hosts=hosts)


def _add(hosts: dict[str, InventoryHost], new: InventoryHost, where: str) -> None:
    """Enter a host; one that is in two groups must be the same host in both."""
    old = hosts.get(new.name)
    if old is None:
        hosts[new.name] = new
        return
    if new.groups[0] in old.groups:
        raise ConfigError(f"{where}: {new.name} is in this group twice", fix="remove one of the two")
    for key in ("address", "user", "port", "identity_file", "known_hosts_file", "logical_host", "numa_nodes"):
        if getattr(old, key) != getattr(new, key):
            raise ConfigError(
                f"{where}: {key} of {new.name} is {getattr(new, key)!r} here and {getattr(old, key)!r} in "
                f"group {old.groups[0]}",
                fix="say it once, or alike",
            )
    hosts[new.name] = replace(
        old,
        labels={**old.labels, **new.labels},
        roles=tuple(dict.fromkeys((*old.roles, *new.roles))),
        groups=(*old.groups, *new.groups),
    )


def _hosts(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value and all(isinstance(name, str) for name in value):
        return list(value.items())
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return [(name, None) for name in value]
    raise ConfigError(
        f"{where}: hosts is {value!r:.80}", fix='write hosts: [gpu-1, "gpu-[002-040]"], or a mapping of them'
    )


def _expand(name: str, said: Any, shared: Mapping[str, Any], where: str, folder: Path) -> list[InventoryHost]:
    """The hosts of one entry: as many as its name's ranges make, and its address's ranges as many."""
    table = _mapping(said, where, _HOST_KEYS)
    fields = _over(shared, _fields(table, where, folder))
    names = _range(name, where)
    columns: dict[str, list[str]] = {}
    for key in ("address", "logical_host"):
        value = table.get(key, name)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: {key} is {value!r}", fix=f"write {key}: TEXT")
        # An IPv6 address may stand in brackets, as in a URL: that is no range.
        plain = key == "address" and ":" in value
        columns[key] = [value.strip("[]")] if plain else _range(value, where)
        if len(columns[key]) == 1 and len(names) > 1 and key == "logical_host":
            columns[key] *= len(names)
        if len(columns[key]) != len(names):
            raise ConfigError(
                f"{where}: {len(names)} hosts, and {len(columns[key])} of {key}",
                fix=f"give {key} a range as long as the name's",
            )
    return [
        InventoryHost(name=host, address=address, logical_host=logical, **fields)
        for host, address, logical in zip(names, columns["address"], columns["logical_host"], strict=True)
    ]


def _range(text: str, where: str) -> list[str]:
    try:
        found = split_list([text])
    except ParseError as error:
        raise ConfigError(f"{where}: {error.what}", fix=error.fix) from error
    if not found or any(char in item for item in found for char in " =*?"):
        raise ConfigError(f"{where}: {text!r} names no host", fix="write a name or a range: gpu-[001-040]")
    return found


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    if "labels" in below and "labels" in above:
        merged["labels"] = {**below["labels"], **above["labels"]}
    return merged


def _fields(table: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """The keys that file, group and host share, each of its kind."""

    def wrong(key: str, fix: str) -> ConfigError:
        return ConfigError(f"{where}: {key} is {table[key]!r:.80}", fix=fix)

    found: dict[str, Any] = {}
    for key in _SHARED:
        value = table.get(key)
        if value is None:
            continue
        match key:
            case "port":
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
                    raise wrong(key, "write a port from 1 to 65535")
            case "labels":
                if not isinstance(value, dict) or not all(
                    isinstance(k, str) and isinstance(v, str | int) for k, v in value.items()
                ):
                    raise wrong(key, "write labels: {rack: r1}")
                value = {k: str(v) for k, v in value.items()}
            case "roles":
                value = _roles(value, where)
            case "numa_nodes":
                if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 1024 for n in value):
                    raise wrong(key, "write numa_nodes: [0, 1]")
                value = tuple(dict.fromkeys(value))
            case _:
                if not isinstance(value, str) or not value:
                    raise wrong(key, "write a text")
                if key in _FILES:
                    value = folder / Path(value).expanduser()
        found[key] = value
    return found


def _roles(value: Any, where: str) -> tuple[str, ...]:
    items = value if isinstance(value, list) else [value]
    for role in items:
        if role not in ROLES:
            near = difflib.get_close_matches(str(role), ROLES, n=1)
            raise ConfigError(
                f"{where}: there is no role {role!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"roles: {', '.join(ROLES)}",
            )
    return tuple(dict.fromkeys(items))


def _mapping(value: Any, where: str, known: Sequence[str]) -> dict[str, Any]:
    """The value if it is a mapping of known keys; nothing at all is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} is {value!r:.80}, no mapping", fix=f"write KEY: VALUE of {', '.join(known)}"
        )
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ConfigError(
                f"{where}: unknown key {key!r}",
                fix=f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}",
            )
    return value


@functools.cache
def _loader() -> Any:
    """A safe loader that takes no key twice: the first of them would be lost without a word."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key in seen:
                problem = "a key must be a plain word" if key is None else f"key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return dict(loader.construct_mapping(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def _yaml(raw: bytes, source: str) -> Any:
    import yaml

    try:
        return yaml.load(raw, Loader=_loader())  # noqa: S506 (a safe loader)
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{place} is not YAML as kvops reads it: {problem}", fix="correct the line"
        ) from error
