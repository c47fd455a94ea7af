"""``kvops restart``: stops members of a local group and starts them again as they were."""

from __future__ import annotations

import click

from kvops.cli import options
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Output
from kvops.cli.start import READY_TIMEOUT_S, READY_TIMEOUT_S_PER_GIB
from kvops.cli.status import look_settled, show


@options.command("restart")
@click.argument("members", nargs=-1, metavar="[MEMBER…]")
@click.option("--now", is_flag=True, help="Kill at once instead of asking first.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def command(settings: Settings, members: tuple[str, ...], now: bool, dry_run: bool) -> int:
    r"""
    Restart a local group, or only the members named; those that have ended are started.

    The master keeps its addresses. Members that are not named keep running.

    \b
    Examples:
      kvops restart
      kvops restart store-2
    """
    from kvops.cli.units import split_list

    out = Output(settings)
    target = resolve(settings)
    local = target.require_local()
    state = local.require()
    names = split_list(members)
    chosen = [state.member(name) for name in names] or state.members
    if dry_run:
        verb = "SIGKILL" if now else "SIGTERM"
        steps = [
            f"send {verb} to {one.name} (pid {one.pid}) and wait for its end" for one in chosen if one.running
        ]
        steps += [
            f"run {one.role} with {local.config_file(one.name)} and wait until it is ready" for one in chosen
        ]
        if out.structured:
            out.document({"group": target.name, "dry_run": True, "steps": steps})
            return 0
        out.header(target.label, "would do, in this order:")
        for step in steps:
            click.echo(f"  {step}" if out.human else step)
        return 0
    gib = len(chosen) * state.segment_size_bytes / (1 << 30)
    local.restart(
        names,
        now=now,
        timeout_s=settings.timeout_s(READY_TIMEOUT_S + READY_TIMEOUT_S_PER_GIB * gib),
        tell=lambda name, text: out.note(f"{name:<10} {text}"),
    )
    return show(out, *look_settled(settings))
