"""``kvops drain``: takes stores or hosts out of use, and waits until nothing of theirs is left."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import holds, options
from kvops.cli.clients import leader, leader_status
from kvops.cli.context import Target, resolve
from kvops.cli.guard import confirm
from kvops.cli.options import RATE_BPS, Settings
from kvops.cli.output import Output
from kvops.errors import Unreachable
from kvops.fleet.preflight import human_objects

if TYPE_CHECKING:
    from kvops.store.model import HoldInfo, HoldReply, MasterStatus

WAIT_S: Final = 1_800.0
CALL_S: Final = 5.0


@options.command("drain")
@click.argument(
    "targets", nargs=-1, required=True, metavar="TARGET…", shell_complete=options.offer("members")
)
@click.option("--migrate", is_flag=True, help="First copy the objects to other stores, the hottest first.")
@click.option("--bandwidth", "bandwidth_bps", type=RATE_BPS, help="Of the migration, such as 40Gbit/s.")
@click.option("--no-wait", is_flag=True, help="Return as soon as nothing names the stores any more.")
@click.option("--reason", default="", help="For whoever finds the hold.")
@click.option("--force", multiple=True, metavar="CHECK", help="Go on although this check says no.")
@click.option("--yes", is_flag=True, help="Do not ask, even for a protected group.")
@click.option("--dry-run", is_flag=True, help="Print what it would do and cost, and do nothing.")
@click.pass_obj
def command(
    settings: Settings,
    targets: tuple[str, ...],
    migrate: bool,
    bandwidth_bps: int | None,
    no_wait: bool,
    reason: str,
    force: tuple[str, ...],
    yes: bool,
    dry_run: bool,
) -> int:
    r"""
    Take stores or hosts out of use: from the master's answer on no lookup names them, and nothing is written
    there. Readers finish what they began; then what the stores held is forgotten, and counted.

    A target is a store (store-2), a host (gpu-017), a host's NUMA node (gpu-017/1), or a range
    (gpu-[001-040]). The drain is a hold: it survives restarts of the store, its host and the master, until
    kvops undrain. Repeating it changes nothing and watches again. Waits up to --timeout (default 30m);
    Ctrl-C ends the watching, not the drain.

    \b
    Examples:
      kvops drain store-2
      kvops drain gpu-017 --reason INC-4412
      kvops drain gpu-[001-004] --migrate --bandwidth 40Gbit/s
    """
    out = Output(settings)
    target = resolve(settings)
    names = holds.named(targets)
    deadline = time.monotonic() + settings.timeout_s(WAIT_S)
    with leader(target, timeout_s=min(CALL_S, settings.timeout_s(CALL_S))) as (client, before):
        asked: dict[str, Any] = {
            "reason": reason,
            "owner": holds.owner(),
            "migrate": migrate,
            "bandwidth_bps": bandwidth_bps or 0,
            "force": force,
        }
        would = client.drain(names, dry_run=True, **asked)
        cost = holds.price(would, before, migrate=migrate, bandwidth_bps=bandwidth_bps or 0)
        _say_price(out, target, names, would, cost)
        if dry_run:
            return _dry_run(out, target, would, cost, force)
        if len(would.unchanged) < len(would.holds):
            text = (
                f"{', '.join(names)}: {human_objects(cost.objects)}, {cost.share:.1%} of the pool's capacity"
            )
            confirm(target, text, yes=yes, share=cost.share)
        began = time.perf_counter()
        reply = client.drain(names, **asked)
        call_ms = (time.perf_counter() - began) * 1_000
    _say_call(out, reply, call_ms)
    done: list[HoldInfo] = reply.holds
    if not no_wait:
        try:
            done = holds.Watch(out, target, [hold.target for hold in done]).run(done, deadline=deadline)
        except KeyboardInterrupt:
            out.note(f"no longer watching; the drain goes on: {target.kvops} status shows it")
            raise
    return _receipt(out, target, reply, done, cost, before, call_ms=call_ms)


def _say_price(out: Output, target: Target, names: list[str], would: HoldReply, cost: holds.Price) -> None:
    stores = holds.count_of(sum(len(hold.stores) for hold in would.holds), "store")
    out.header(target.label, f"{', '.join(names)}: {stores}")
    if out.structured or out.settings.quiet:
        return
    for hold in would.holds:
        if hold.target in would.unchanged:
            why = f" ({hold.reason})" if hold.reason else ""
            out.line(f"  {hold.target} is {hold.state} already: hold #{hold.number}{why} by {hold.owner}")
    if len(would.unchanged) < len(would.holds):
        for line in cost.lines(would):
            out.line(line)


def _dry_run(out: Output, target: Target, would: HoldReply, cost: holds.Price, force: tuple[str, ...]) -> int:
    changed = [hold for hold in would.holds if hold.target not in would.unchanged]
    refused = [check for check in would.checks if changed and not check.ok and check.name not in force]
    steps = []
    for hold in changed:
        if hold.migrate:
            steps.append(f"copy the objects of {hold.target} to other stores, hottest first")
        steps += [
            f"hide {', '.join(hold.stores) or hold.target} from lookups and writes, as one journal entry",
            f"wait {hold.leases_left_ms} ms for the last lease",
            f"forget {human_objects(hold.objects)}, and count again",
        ]
    if out.structured:
        checks = [{"name": c.name, "ok": c.ok, "text": c.text} for c in would.checks]
        out.document(
            {
                "group": target.name,
                "dry_run": True,
                "steps": steps,
                "checks": checks,
                "unchanged": would.unchanged,
                "predicted": cost.document(),
            }
        )
    else:
        for step in steps:
            click.echo(f"  {step}" if out.human else step)
        for check in refused:
            out.line(f"  refused: {check.text}; {check.fix}, or add --force {check.name}")
    return 5 if refused else 0


def _say_call(out: Output, reply: HoldReply, call_ms: float) -> None:
    if out.structured:
        return
    changed = [hold for hold in reply.holds if hold.target not in reply.unchanged]
    stores = holds.count_of(sum(len(hold.stores) for hold in changed), "store")
    if any(str(hold.state) == "migrating" for hold in changed):
        out.note(holds.clock_line("cordoned", f"{stores} in {call_ms:.1f} ms; nothing new is put there"))
    elif changed:
        out.note(holds.clock_line("hidden", f"{stores} in {call_ms:.1f} ms, named by no lookup any more"))


def _receipt(
    out: Output,
    target: Target,
    reply: HoldReply,
    done: list[HoldInfo],
    cost: holds.Price,
    before: MasterStatus,
    *,
    call_ms: float,
) -> int:
    total = holds.summary(done)
    try:
        after = leader_status(target, timeout_s=2.0)
    except Unreachable:
        after = before  # then nothing was measured
    looked = after.lookups_total - before.lookups_total
    measured = (after.hits_total - before.hits_total) / looked if looked > 0 else None
    if out.structured:
        out.document(
            {
                "group": target.name,
                "environment": target.environment,
                "targets": [holds.row_of(hold) for hold in done],
                "call_ms": round(call_ms, 3),
                **total,
                "unchanged": reply.unchanged,
                "predicted": cost.document(),
                "measured": {
                    "hit_ratio": None if measured is None else round(measured, 4),
                    "lookups": looked,
                },
            }
        )
        return 0
    out.table(holds.COLUMNS, [holds.row_of(hold) for hold in done])
    if measured is not None and cost.hit_ratio_after is not None and not reply.unchanged:
        out.line(
            f"hit ratio since the call {measured:.1%}, predicted {cost.hit_ratio_after:.1%} ({looked:,} lookups)"
        )
    if total["state"] in ("drained", "lost"):
        if total["left"] is not None:
            out.note(holds.clock_line("swept", f"{total['swept']:,}; counted again: {total['left']} left"))
        for hold in done:
            if str(hold.state) == "lost":
                out.line(f"{hold.target}: its process died before the drain had ended; nothing names it")
        names = " ".join(hold.target for hold in done)
        why = f" ({done[0].reason})" if done[0].reason else ""
        out.line(
            f"{out.style('SAFE TO POWER OFF', bold=True)} {names}    hold #{total['hold']}{why} survives a reboot"
        )
    if not out.settings.quiet:
        out.line(f"back: {target.kvops} undrain {' '.join(hold.target for hold in done)}")
    return 0
