"""``kvops cordon``: puts nothing new on stores while what they hold is read."""

from __future__ import annotations

import time
from typing import Final

import click

from kvops.cli import holds, options
from kvops.cli.clients import leader
from kvops.cli.context import resolve
from kvops.cli.guard import confirm
from kvops.cli.options import Settings
from kvops.cli.output import Output

CALL_S: Final = 5.0


@options.command("cordon")
@click.argument(
    "targets", nargs=-1, required=True, metavar="TARGET…", shell_complete=options.offer("members")
)
@click.option("--reason", default="", help="For whoever finds the hold.")
@click.option("--force", multiple=True, metavar="CHECK", help="Go on although this check says no.")
@click.option("--yes", is_flag=True, help="Do not ask, even for a protected group.")
@click.option("--dry-run", is_flag=True, help="Print what it would do, and do nothing.")
@click.pass_obj
def command(
    settings: Settings,
    targets: tuple[str, ...],
    reason: str,
    force: tuple[str, ...],
    yes: bool,
    dry_run: bool,
) -> int:
    r"""
    Put no new objects on stores or hosts; what they hold is read, touched and evicted as before.

    A hold like a drain's: it survives restarts, until kvops undrain lifts it.

    \b
    Example:
      kvops cordon gpu-017 --reason "new NIC at noon"
    """
    out = Output(settings)
    target = resolve(settings)
    names = holds.named(targets)
    with leader(target, timeout_s=settings.timeout_s(CALL_S)) as (client, before):
        would = client.cordon(names, reason=reason, owner=holds.owner(), force=force, dry_run=True)
        share = holds.price(would, before).share
        if not dry_run and len(would.unchanged) < len(would.holds):
            confirm(
                target,
                f"nothing new on {', '.join(names)}, {share:.1%} of the pool's capacity",
                yes=yes,
                share=share,
            )
        began = time.perf_counter()
        reply = client.cordon(names, reason=reason, owner=holds.owner(), force=force, dry_run=dry_run)
        call_ms = (time.perf_counter() - began) * 1_000
    rows = [holds.row_of(hold) for hold in reply.holds]
    refused = [check for check in would.checks if not check.ok and check.name not in force]
    if out.structured:
        out.document(holds.document(target, reply, call_ms=call_ms, dry_run=dry_run))
    else:
        out.header(target.label, "would be held:" if dry_run else f"held in {call_ms:.1f} ms")
        out.table(holds.COLUMNS, rows)
        for check in refused if dry_run else []:
            out.line(f"  refused: {check.text}; {check.fix}, or add --force {check.name}")
        if not out.settings.quiet and not dry_run:
            out.line(f"back: {target.kvops} undrain {' '.join(names)}")
    return 5 if dry_run and refused and len(would.unchanged) < len(would.holds) else 0
