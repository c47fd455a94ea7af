"""``kvops chaos status``: what runs, what was left behind, who locked."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output

COLUMNS: Final = (
    Column("id"),
    Column("state"),
    Column("since"),
    Column("faults", "list"),
    Column("by", wide=True),
    Column("guardian", wide=True),
    Column("detail", wide=True),
)


@options.command("status")
@click.option("--limit", type=click.IntRange(1, 50), default=10, show_default=True, help="Show so many.")
@click.pass_obj
def command(settings: Settings, limit: int) -> int:
    r"""
    Which experiment runs, which left something behind, and whether experiments are locked.

    Exit code 0: nothing is left behind. 4: something is; the commands that take it back are printed.

    \b
    Example:
      kvops chaos status
    """
    from kvops.chaos.control import status

    out = Output(settings)
    found = status(state_dir(settings), limit=limit)
    if out.structured:
        out.document(found)
        return 4 if found["dirty"] else 0
    lock = found["locked"]
    out.header("chaos", f"experiment {found['running']} runs" if found["running"] else "no experiment runs")
    if lock:
        out.line(f"  locked by {lock['by']} since {lock['at']}: {lock['reason']}")
    out.table(COLUMNS, found["experiments"])
    for one in found["experiments"]:
        if one.get("dirty"):
            out.line(f"DIRTY {one['id']}    next: kvops chaos recover")
            for text in one["commands"]:
                out.line(f"  {text}")
    return 4 if found["dirty"] else 0
