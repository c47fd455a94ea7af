"""``kvops undrain``: lets drained or cordoned stores take part again."""

from __future__ import annotations

import time
from typing import Final

import click

from kvops.cli import holds, options
from kvops.cli.clients import leader
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Output

CALL_S: Final = 5.0


@options.command("undrain")
@click.argument(
    "targets", nargs=-1, required=True, metavar="TARGET…", shell_complete=options.offer("members")
)
@click.option("--dry-run", is_flag=True, help="Print what it would do, and do nothing.")
@click.pass_obj
def command(settings: Settings, targets: tuple[str, ...], dry_run: bool) -> int:
    r"""
    Lift the holds of drain and cordon: the stores take part again at once.

    What the sweep of a drain has not reached yet is readable again; the rest is put or computed anew. On a
    host it also lifts the holds on its single stores. Undraining what is not held is a success.

    \b
    Examples:
      kvops undrain store-2
      kvops undrain gpu-[001-004]
    """
    out = Output(settings)
    target = resolve(settings)
    names = holds.named(targets)
    with leader(target, timeout_s=settings.timeout_s(CALL_S)) as (client, _):
        began = time.perf_counter()
        reply = client.undrain(names, owner=holds.owner(), dry_run=dry_run)
        call_ms = (time.perf_counter() - began) * 1_000
    rows = [holds.row_of(hold) for hold in reply.holds]
    if out.structured:
        out.document(holds.document(target, reply, call_ms=call_ms, dry_run=dry_run))
        return 0
    text = "would lift" if dry_run else f"lifted in {call_ms:.1f} ms"
    out.header(
        target.label, f"{len(rows)} hold{'' if len(rows) == 1 else 's'} {text}" if rows else "nothing is held"
    )
    out.table(holds.COLUMNS, rows)
    for name in reply.unchanged:
        out.note(f"{name} was not held")
    return 0
