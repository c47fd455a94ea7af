"""Which hosts a command looks at over SSH: names on the line, an inventory's, a context's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvops.cli.options import PATH, Settings
from kvops.errors import UsageError

if TYPE_CHECKING:
    from kvops.fleet.inventory import Inventory
    from kvops.host import SshLogin

Function = TypeVar("Function", bound=Callable[..., Any])
SSH_PORT: Final = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSaid:
    """What the command line says about SSH; it goes before what the inventory says."""

    inventory: Path | None = None
    user: str | None = None
    port: int | None = None
    key_file: Path | None = None
    known_hosts: Path | None = None


def ssh_options(function: Function) -> Function:
    """The options of every command that reaches hosts; they arrive as one :class:`SshSaid`, ``ssh``."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        kwargs["ssh"] = SshSaid(
            inventory=kwargs.pop("inventory"),
            user=kwargs.pop("user"),
            port=kwargs.pop("ssh_port"),
            key_file=kwargs.pop("ssh_key"),
            known_hosts=kwargs.pop("known_hosts"),
        )
        return function(*args, **kwargs)

    wrapped: Any = gathered
    for option in (
        click.option(
            "--known-hosts", type=PATH, metavar="FILE", help="Known host keys (the user's own by default)."
        ),
        click.option("--ssh-key", type=PATH, metavar="FILE", help="Private key for SSH."),
        click.option("--ssh-port", type=click.IntRange(1, 65535), help=f"Port for SSH ({SSH_PORT})."),
        click.option("--user", metavar="NAME", help="User for SSH."),
        click.option(
            "--inventory",
            type=PATH,
            metavar="FILE",
            help="Hosts and how to reach them (YAML), or the context's.",
        ),
    ):
        wrapped = option(wrapped)
    found: Function = wrapped
    return found


def find_inventory(settings: Settings, ssh: SshSaid) -> Inventory | None:
    """
    The inventory that was named, or that of the context in use; None if there is none.

    Raises:
        ConfigError: It cannot be read, or is wrong.
    """
    from kvops.cli.context import load_configuration
    from kvops.fleet.inventory import load_inventory

    if ssh.inventory is not None:
        return load_inventory(ssh.inventory)
    configuration = load_configuration(settings)
    context = configuration.context(str(configuration.group.value))
    if context is None or not context.inventory:
        return None
    return load_inventory(Path(context.inventory).expanduser())


def find_logins(settings: Settings, words: Sequence[str], ssh: SshSaid) -> list[SshLogin]:
    """
    How to reach the hosts that are meant.

    Args:
        settings: Name the context.
        words: Names, ranges, and with an inventory also groups, roles and labels. ``user@host``, ``host:port``
            and addresses are taken as they stand. None at all means every host of ``--inventory``.
        ssh: What the command line says.

    Raises:
        UsageError: A word names nothing in the inventory.
    """
    from dataclasses import replace

    from kvops.diag.fleet import split_host
    from kvops.host import SshLogin
    from kvops.ranges import split_list

    inventory = find_inventory(settings, ssh)
    said = {
        "user": ssh.user,
        "port": ssh.port,
        "key_file": str(ssh.key_file) if ssh.key_file is not None else None,
        "known_hosts": str(ssh.known_hosts) if ssh.known_hosts is not None else None,
    }
    known = {key: value for key, value in said.items() if value is not None}
    logins: dict[str, SshLogin] = {}
    names = split_list(words)
    if not names and ssh.inventory is not None and inventory is not None:
        names = list(inventory.hosts)
    for word in names:
        if inventory is not None and not _plain(word):
            for host in inventory.select([word]):
                logins[host.name] = replace(host.login, **known)  # type: ignore[arg-type]
        else:
            address, user, port = split_host(word, ssh.user, ssh.port or SSH_PORT)
            logins[word] = SshLogin(
                name=word,
                address=address,
                user=user,
                port=port,
                key_file=said["key_file"],  # type: ignore[arg-type]
                known_hosts=said["known_hosts"],  # type: ignore[arg-type]
            )
    if not logins:
        raise UsageError("no host is named", fix="name some with --host, or an --inventory")
    return list(logins.values())


def _plain(word: str) -> bool:
    """Whether it says by itself how to get there: an address, a port or a user is in it."""
    import ipaddress

    if "@" in word or ":" in word:
        return True
    try:
        ipaddress.ip_address(word)
    except ValueError:
        return False
    return True
