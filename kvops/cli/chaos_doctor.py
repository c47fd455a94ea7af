"""``kvops chaos doctor``: which faults this machine can do, how, and why not the others."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output

COLUMNS: Final = (Column("fault"), Column("available"), Column("backend"), Column("reason"))
FACT_COLUMNS: Final = (Column("about"), Column("found"))


@options.command("doctor")
@click.argument("faults", nargs=-1)
@click.pass_obj
def command(settings: Settings, faults: tuple[str, ...]) -> int:
    r"""
    Which faults this machine can do, how each would be done, and why not the others.

    Exit code 0: all that were named (by default all there are) can be done. 1: one cannot. 4: something of an
    earlier experiment is left behind.

    \b
    Examples:
      kvops chaos doctor
      kvops chaos doctor process.pause net.partition
    """
    from kvops.chaos.doctor import examine

    out = Output(settings)
    found = examine(state_dir(settings), faults)
    rows = [
        {
            "fault": one.fault,
            "available": "yes" if one.available else "no",
            "backend": one.backend,
            "reason": one.reason,
        }
        for one in found.faults
    ]
    facts = [{"about": about, "found": text} for about, text in found.facts.items()]
    if out.structured:
        out.document({"facts": found.facts, "dirty": found.dirty, "faults": rows})
    else:
        missing = sum(row["available"] == "no" for row in rows)
        out.header("this machine", f"{len(rows) - missing} of {len(rows)} faults can be done")
        if out.human:
            out.table(FACT_COLUMNS, facts)
            out.line()
        out.table(COLUMNS, sorted(rows, key=lambda row: row["available"]))
        if found.dirty:
            out.line(f"left behind: {', '.join(found.dirty)}    next: kvops chaos recover")
    if found.dirty:
        return 4
    return 0 if all(one.available for one in found.faults) else 1
