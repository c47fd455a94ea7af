"""``kvops context``: which groups are known, and which one commands act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.context import Configuration, load_configuration, use
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import UsageError
from kvops.fleet.group_folder import local_groups
from kvops.fleet.local import LocalGroup

COLUMNS: Final = (
    Column("name"),
    Column("current"),
    Column("environment"),
    Column("kind"),
    Column("masters", "list"),
    Column("protect", wide=True),
    Column("origin", wide=True),
)


@options.group("context")
def command() -> None:
    r"""
    Which groups are known, and which one commands act on.

    A context names a group that runs elsewhere. It is defined by hand, in ~/.config/kvops/config.yaml for you or
    /etc/kvops/config.yaml for everybody:

    \b
      contexts:
        prod-a:
          masters: [10.0.0.1:7800, 10.0.0.2:7800]
          control: [10.0.0.1:7801, 10.0.0.2:7801]
          secret_file: /etc/kvops/prod-a.secret
          environment: production
          protect: true

    \b
    Example:
      kvops context use prod-a
    """


def _rows(configuration: Configuration) -> list[dict[str, Any]]:
    current = configuration.group.value
    rows: list[dict[str, Any]] = []
    for name, fields in configuration.contexts.items():
        context = configuration.context(name)
        assert context is not None
        rows.append(
            {
                "name": name,
                "environment": context.environment or "unknown",
                "kind": "context",
                "masters": context.masters or context.etcd,
                "protect": context.protect,
                "origin": ", ".join(dict.fromkeys(value.origin for value in fields.values())),
            }
        )
    state_dir = Path(configuration.state_dir.value).expanduser().absolute()
    for name in local_groups(state_dir):
        state = LocalGroup(state_dir, name).read()
        members = state.members if state is not None else []
        rows.append(
            {
                "name": name,
                "environment": state.environment if state is not None else "local",
                "kind": "local",
                "masters": [
                    one.addresses.get("listen", "") for one in members if one.role == "master" and one.running
                ],
                "protect": False,
                "origin": str(state_dir),
            }
        )
    for row in rows:
        row["current"] = "*" if row["name"] == current else ""
    return rows


@command.command("list")
@click.pass_obj
def list_(settings: Settings) -> None:
    r"""
    List contexts and local groups; * marks the one in use.

    \b
    Example:
      kvops context list
    """
    Output(settings).rows("contexts", COLUMNS, _rows(load_configuration(settings)))


@command.command("show")
@click.argument("name", required=False, shell_complete=options.offer("groups"))
@click.pass_obj
def show(settings: Settings, name: str | None) -> None:
    r"""
    Show one context or local group, by default the one in use.

    \b
    Example:
      kvops context show prod-a
    """
    configuration = load_configuration(settings)
    name = name or str(configuration.group.value)
    rows = [row for row in _rows(configuration) if row["name"] == name]
    if not rows:
        fix = (
            "start it: kvops start, or see kvops context list"
            if name == "local"
            else "see kvops context list"
        )
        raise UsageError(f"there is no context or local group {name}", fix=fix)
    Output(settings).rows("contexts", COLUMNS, rows)


@command.command("use")
@click.argument("name", shell_complete=options.offer("groups"))
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def use_(settings: Settings, name: str, dry_run: bool) -> None:
    r"""
    Make a context or local group the one that commands act on.

    \b
    Example:
      kvops context use prod-a
    """
    from kvops.cli.context import user_file

    configuration = load_configuration(settings)
    if all(row["name"] != name for row in _rows(configuration)):
        raise UsageError(
            f"there is no context or local group {name}",
            fix=f"kvops context list names those there are; define it in {user_file()}: kvops context --help",
        )
    out = Output(settings)
    path = user_file() if dry_run else use(name)
    if out.structured:
        out.document({"group": name, "file": str(path), "dry_run": dry_run})
    else:
        out.note(
            f"would write group: {name} to {path}" if dry_run else f"commands now act on {name} ({path})"
        )
