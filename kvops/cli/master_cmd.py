"""``kvops master``: who of several masters leads."""

from __future__ import annotations

import click

from kvops.cli import holds, options
from kvops.cli.clients import leader
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Output

CALL_S = 5.0


@options.group("master")
def command() -> None:
    r"""
    Who of several masters leads.

    \b
    Example:
      kvops master step-down
    """


@command.command("step-down")
@click.option("--force", multiple=True, metavar="CHECK", help="Go on although this check says no: standby.")
@click.option("--dry-run", is_flag=True, help="Say who leads and who could follow, and do nothing.")
@click.pass_obj
def step_down(settings: Settings, force: tuple[str, ...], dry_run: bool) -> int:
    r"""
    Let another master lead, one that has everything that was acknowledged.

    The one that leads now stands back for some seconds. Until the other one has taken over, well under a second,
    reads are misses and puts are not stored; no caller waits past its deadline.

    \b
    Example:
      kvops master step-down
    """
    out = Output(settings)
    target = resolve(settings)
    with leader(target, timeout_s=settings.timeout_s(CALL_S)) as (client, status):
        could = [name for name in status.members if name != status.name]
        term = status.term if dry_run else client.step_down(owner=holds.owner(), force=force)
    if out.structured:
        document = {"group": target.name, "name": status.name, "term": term, "could_follow": could}
        out.document(document | ({"dry_run": True} if dry_run else {}))
        return 0
    text = "leads" if dry_run else "stepped down from"
    out.header(
        target.label, f"{status.name} {text} term {term}; could follow: {', '.join(could) or 'nobody'}"
    )
    if not dry_run:
        group = "" if target.name == "local" else f" -g {target.name}"
        out.line(f"next: kvops{group} status")
    return 0
