"""``kvops master``: who of several masters leads."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import click

from kvops.cli import guard, holds, options
from kvops.cli.clients import control_client, known_processes, leader, look_until
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Output
from kvops.errors import Unreachable, UsageError

CALL_S: Final = 5.0
LEAD_S: Final = 10.0  # for a master that was promoted to lead: an election, and its journal


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


@command.command("promote")
@click.argument("name", metavar="MASTER")
@click.option("--force", multiple=True, metavar="CHECK", help="Go on although this check says no: in-sync.")
@click.option("--yes", is_flag=True, help="Do not ask; checks are made all the same.")
@click.option("--dry-run", is_flag=True, help="Say what it knows and whom it would replace, and do nothing.")
@click.pass_obj
def promote(settings: Settings, name: str, force: tuple[str, ...], yes: bool, dry_run: bool) -> int:
    r"""
    Let a standby lead that is not in the in-sync set: when every master of that set is gone for good.

    Members of the set alone have everything that was acknowledged, so nobody else leads by itself. If one of them
    can be started again, do that instead. What this costs: drains and cordons that this master did not hear of.
    Objects are kept as far as their stores live, for these say themselves what they hold. Name the master that
    has applied most: kvops status -o wide.

    \b
    Example:
      kvops master promote master-2 --force in-sync
    """
    out = Output(settings)
    target = resolve(settings)
    one = next((one for one in known_processes(target) if one.role == "master" and one.name == name), None)
    if one is None or not one.control:
        names = ", ".join(one.name for one in known_processes(target) if one.role == "master")
        raise UsageError(
            f"group {target.name} has no master {name} that runs", fix=f"its masters: {names or 'none'}"
        )
    with closing(
        control_client(one.control, target.secret(), timeout_s=settings.timeout_s(CALL_S))
    ) as client:
        would = client.promote(owner=holds.owner(), dry_run=True)
        who = ", ".join(would.members) or "a set that cannot be read"
        known = f"{would.objects:,} objects and {would.holds} holds"
        cost = f"{name} replaces {who}; it knows {known}, living stores the rest"
        if not dry_run:
            if "in-sync" in force:
                guard.confirm(target, cost, yes=yes)
            client.promote(owner=holds.owner(), force=force)
    document: dict[str, Any] = {
        "group": target.name,
        "name": name,
        "term": would.term,
        "replaces": would.members,
        "objects": would.objects,
        "holds": would.holds,
    }
    if not dry_run:
        _, judgement = look_until(settings, lambda found: _leads(found.masters, name), timeout_s=LEAD_S)
        if not _leads(judgement.masters, name):
            raise Unreachable(f"{name} does not lead yet", fix=f"see kvops status and kvops logs {name}")
        document |= {"objects_now": judgement.objects}
    if out.structured:
        out.document(document | ({"dry_run": True} if dry_run else {}))
        return 0
    out.header(target.label, f"would promote: {cost}" if dry_run else cost)
    if not dry_run:
        out.line(f"{name} leads; {document['objects_now']:,} objects so far, stores go on announcing theirs")
        out.line("next: kvops status")
    return 0


def _leads(masters: list[dict[str, Any]], name: str) -> bool:
    return any(row["name"] == name and row["role"] == "leader" for row in masters)
