"""``kvops chaos recover``: takes back what a dead experiment left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import UsageError

if TYPE_CHECKING:
    from kvops.chaos.control import Taken

COLUMNS: Final = (
    Column("id"),
    Column("state"),
    Column("by"),
    Column("detail"),
    Column("steps", "list", wide=True),
)


def show(out: Output, taken: list[Taken], nothing: str) -> int:
    """Print what became of experiments; 4 when one is not clean."""
    rows = [
        {
            "id": one.id,
            "state": str(one.state),
            "by": one.by,
            "detail": one.detail,
            "steps": one.steps,
            "commands": one.commands,
        }
        for one in taken
    ]
    if not taken:
        out.header("chaos", nothing)
    out.rows("experiments", COLUMNS, rows)
    for one in taken:
        if not one.clean:
            out.line(f"DIRTY {one.id}: run these, then kvops chaos recover")
            for text in one.commands:
                out.line(f"  {text}")
    return 0 if all(one.clean for one in taken) else 4


@options.command("recover")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.option("--accept", default="", metavar="ID", help="Close this one although its undo is not proved.")
@click.option("--reason", default="", metavar="TEXT", help="Why that is right; with --accept.")
@click.pass_obj
def command(settings: Settings, dry_run: bool, accept: str, reason: str) -> int:
    r"""
    Take back what dead experiments left, from their ledgers, and prove it. Again and again does no harm.

    Exit code 0: nothing is left behind. 4: something is; the commands to run are printed.

    While one is DIRTY nothing new starts. When a person has looked, and what differs is not the experiment's (or
    its ledger cannot be read any more), --accept closes it, with the reason in its ledger.

    \b
    Examples:
      kvops chaos recover
      kvops chaos recover --accept 1130T1402-7 --reason "the rule is the firewall team's"
    """
    from kvops.chaos.control import accept as accept_one
    from kvops.chaos.control import recover
    from kvops.chaos.ledger import Book

    out = Output(settings)
    folder = state_dir(settings)
    if accept:
        if not reason:
            raise UsageError("--accept needs a reason", fix="add --reason TEXT: it stays in the ledger")
        return show(out, [accept_one(folder, accept, reason=reason)], "")
    if dry_run:
        rows = [
            {"id": one.id, "step": step.command()}
            for one in Book(folder).dirty()
            for step in one.undo_steps()[0]
        ]
        out.rows("steps", (Column("id"), Column("step")), rows, dry_run=True)
        return 0
    return show(
        out, recover(folder, tell=lambda name, text: out.note(f"{name}  {text}")), "nothing is left behind"
    )
