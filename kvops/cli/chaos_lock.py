"""``kvops chaos lock``: forbids experiments."""

from __future__ import annotations

import getpass

import click
import msgspec

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings
from kvops.cli.output import Output


@options.command("lock")
@click.option("--reason", required=True, help="Why; shown to whoever is refused.")
@click.pass_obj
def command(settings: Settings, reason: str) -> int:
    r"""
    Forbid experiments until ``kvops chaos unlock``. One that runs goes on: end it with ``kvops chaos abort``.

    \b
    Example:
      kvops chaos lock --reason "release week"
    """
    from kvops.chaos.ledger import Book

    out = Output(settings)
    lock = Book(state_dir(settings)).lock(by=getpass.getuser(), reason=reason)
    out.document({"locked": msgspec.to_builtins(lock)})
    out.header("chaos", f"locked by {lock.by}: {lock.reason}")
    return 0
