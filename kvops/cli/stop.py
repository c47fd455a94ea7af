"""``kvops stop``: ends a local group."""

from __future__ import annotations

import dataclasses
from typing import Final

import click

from kvops.cli import options
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.fleet.take_down import TERM_GRACE_S

COLUMNS: Final = (Column("name"), Column("role"), Column("pid"), Column("how"))


@options.command("stop")
@click.option("--now", is_flag=True, help="Kill at once instead of asking first.")
@click.option("--forget", is_flag=True, help="Also remove what is known of the group: state, logs, secret.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def command(settings: Settings, now: bool, forget: bool, dry_run: bool) -> int:
    r"""
    Stop a local group: stores first, then masters.

    Each is asked to end (SIGTERM); one that has not after --timeout (default 10s) is killed. What is in the
    pool is lost: it lived in the stores' memory. Stopping a group that does not run is a success.

    \b
    Example:
      kvops stop
    """
    out = Output(settings)
    target = resolve(settings)
    local = target.require_local()
    if dry_run:
        members = [member for member in (target.state.members if target.state else []) if member.running]
        members.sort(key=lambda member: member.role, reverse=True)
        name = "KILL" if now else "TERM"
        steps = [
            f"send SIG{name} to {member.name} (pid {member.pid}) and wait for its end" for member in members
        ]
        steps += [f"remove {local.folder}"] if forget else []
        if out.structured:
            out.document({"group": target.name, "dry_run": True, "steps": steps})
            return 0
        out.steps(target.label, steps, none="nothing runs")
        return 0
    stopped = local.stop(
        now=now,
        grace_s=settings.timeout_s(TERM_GRACE_S),
        tell=lambda name, text: out.note(f"{name:<10} {text}"),
    )
    if forget:
        local.forget()
    ended = sum(one.how != "had ended" for one in stopped)
    out.header(
        target.label, f"{ended} process{'' if ended == 1 else 'es'} stopped" if stopped else "nothing ran"
    )
    out.rows("stopped", COLUMNS, [dataclasses.asdict(one) for one in stopped], group=target.name)
    return 0
