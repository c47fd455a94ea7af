"""``kvops restart``: stops members of a local group and starts them again as they were."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

import click

from kvops.cli import options
from kvops.cli.clients import look_until
from kvops.cli.context import Target, resolve
from kvops.cli.options import Settings
from kvops.cli.output import Output
from kvops.cli.start import ready_timeout_s
from kvops.cli.status import EXIT_CODES, show
from kvops.fleet.health import Health, Judgement, not_back

_NO_MASTER: Final = ("down", "stopped")


@options.command("restart")
@click.argument("members", nargs=-1, metavar="[MEMBER…]", shell_complete=options.offer("members"))
@click.option("--now", is_flag=True, help="Kill at once instead of asking first.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def command(settings: Settings, members: tuple[str, ...], now: bool, dry_run: bool) -> int:
    r"""
    Restart a local group, or only the members named; those that have ended are started.

    A store's contents are lost with its process: what it held has to be put or computed again. A master's are
    not: it reads its journal, and the stores tell it what they hold.

    The master keeps its addresses. Members that are not named keep running. Returns when those that run have
    joined again, after --timeout at the latest (exit code 3), and shows the group as status does.

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
        steps = local.restart_steps(chosen, now=now)
        if out.structured:
            out.document({"group": target.name, "dry_run": True, "steps": steps})
            return 0
        out.steps(target.label, steps)
        return 0
    timeout_s = ready_timeout_s(settings, len(chosen) * state.segment_size_bytes)
    deadline = time.monotonic() + timeout_s
    local.restart(names, now=now, timeout_s=timeout_s, tell=lambda name, text: out.note(f"{name:<10} {text}"))
    # A new master knows none of the stores; a new store is awaited alone.
    joining = None if any(one.role == "master" for one in chosen) else [one.name for one in chosen]
    target, judgement, away = _joined(settings, joining, timeout_s=max(0.0, deadline - time.monotonic()))
    code = show(out, target, judgement)
    if away:
        out.note(f"not back in time: {', '.join(away)}")
        return EXIT_CODES[Health.DOWN]
    # Whatever else is wrong with the group was so before: what was asked for is done.
    return 0 if judgement.health is not Health.DOWN else code


def _joined(
    settings: Settings, names: Collection[str] | None, *, timeout_s: float
) -> tuple[Target, Judgement, list[str]]:
    """
    Look until the members that run are back, or time is over; gives those that are not.

    Args:
        settings: Which group.
        names: Only these stores; None: all of them.
        timeout_s: How long they have.
    """

    def done(seen: Judgement) -> bool:
        # Without a master that runs, nobody comes back.
        return not not_back(seen, names) or all(one["state"] in _NO_MASTER for one in seen.masters)

    target, judgement = look_until(settings, done, timeout_s=timeout_s)
    return target, judgement, not_back(judgement, names)
