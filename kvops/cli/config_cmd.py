"""``kvops config``: settings, and where each came from."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import options
from kvops.cli.context import load_configuration
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output


@options.group("config")
def command() -> None:
    r"""
    Settings, and where each came from.

    \b
    Example:
      kvops config show --origin
    """


KEY: Final = Column("key")
VALUE: Final = Column("value")
ORIGIN: Final = Column("origin")


@command.command("show")
@click.option("--origin", is_flag=True, help="Also say where each value came from.")
@click.pass_obj
def show(settings: Settings, origin: bool) -> None:
    r"""
    Show every setting that is in force.

    \b
    Example:
      kvops config show --origin
    """
    configuration = load_configuration(settings)
    values = {"group": configuration.group, "state_dir": configuration.state_dir}
    for name, fields in configuration.contexts.items():
        values |= {f"contexts.{name}.{key}": value for key, value in fields.items()}
    rows = []
    for key, value in values.items():
        shown = value.value
        row = {"key": key, "value": ",".join(shown) if isinstance(shown, list) else str(shown)}
        rows.append(row | ({"origin": value.origin} if origin else {}))
    Output(settings).rows("settings", (KEY, VALUE, ORIGIN) if origin else (KEY, VALUE), rows)
