"""
``kvops chaos``: faults on purpose, and what they prove.

Commands below it are named in ``BELOW`` alone; a module is imported when its command is used. Each module holds
its command as ``command``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from kvops.cli.options import Group

BELOW: Final[dict[str, tuple[str, str]]] = {
    # name: (module of kvops.cli, what help says)
    "sim": ("chaos_sim", "Break a simulated pool under virtual time, seed by seed."),
}


class Below(Group):
    """Knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order help shows them."""
        return list(BELOW)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in BELOW:
            return None
        found = import_module(f"kvops.cli.{BELOW[cmd_name][0]}").command
        assert isinstance(found, click.Command), f"{BELOW[cmd_name][0]}.command is no click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: nothing is imported for help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in BELOW.items()])


@click.group("chaos", cls=Below)
def command() -> None:
    r"""
    Faults on purpose: inject one, prove that it is there, watch clients through it, undo it, judge.

    \b
    Example:
      kvops chaos sim --seeds 100 --duration 10s
    """
