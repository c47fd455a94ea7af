"""``kvops chaos unlock``: allows experiments again."""

from __future__ import annotations

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings
from kvops.cli.output import Output


@options.command("unlock")
@click.pass_obj
def command(settings: Settings) -> int:
    r"""
    Allow experiments again. Unlocking what is not locked is a success.

    \b
    Example:
      kvops chaos unlock
    """
    from kvops.chaos.ledger import Book

    out = Output(settings)
    was = Book(state_dir(settings)).unlock()
    out.document({"locked": None, "was_locked": was})
    out.header("chaos", "unlocked" if was else "was not locked")
    return 0
