"""``kvops ok-to-stop``: says whether the rest of the pool can do without some stores."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import holds, options
from kvops.cli.clients import leader
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output

CALL_S: Final = 5.0
COLUMNS: Final = (Column("name", title="check"), Column("ok"), Column("text"), Column("fix"))


@options.command("ok-to-stop")
@click.argument(
    "targets", nargs=-1, required=True, metavar="TARGET…", shell_complete=options.offer("members")
)
@click.pass_obj
def command(settings: Settings, targets: tuple[str, ...]) -> int:
    r"""
    May these stores or hosts be taken away now, all together? Changes nothing.

    Exit code 0: yes; readers find the rest. 1: no, with the reason. What it costs in objects is printed too:
    those of a store that is not drained are lost with it.

    \b
    Example:
      kvops ok-to-stop gpu-017 && kvops drain gpu-017
    """
    out = Output(settings)
    target = resolve(settings)
    names = holds.named(targets)
    with leader(target, timeout_s=settings.timeout_s(CALL_S)) as (client, status):
        reply = client.ok_to_stop(names)
        stores = [name for name in names if name not in reply.unchanged]
        would = client.drain(stores, dry_run=True) if stores else reply
    cost = holds.price(would, status)
    ok = all(check.ok for check in reply.checks)
    rows = [
        {"name": check.name, "ok": check.ok, "text": check.text, "fix": check.fix} for check in reply.checks
    ]
    if out.structured:
        out.document(
            {
                "group": target.name,
                "ok": ok,
                "targets": [holds.row_of(hold) for hold in would.holds],
                "checks": rows,
                "predicted": cost.document(),
            }
        )
        return 0 if ok else 1
    out.header(target.label, f"{', '.join(names)}: {'ok to stop' if ok else 'NOT ok to stop'}")
    for line in cost.lines(reply):
        out.line(line)
    out.table(COLUMNS, rows)
    return 0 if ok else 1
