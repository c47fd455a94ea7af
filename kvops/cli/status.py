"""``kvops status``: is the pool healthy, and what is in it?"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.clients import look, look_until
from kvops.cli.context import Target, resolve
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.cli.units import human_age
from kvops.fleet.health import Health, Judgement, Reason
from kvops.fleet.preflight import human_bytes, human_objects

EXIT_CODES: Final = {Health.HEALTHY: 0, Health.DEGRADED: 1, Health.DOWN: 3}
SETTLE_S: Final = 10.0  # for stores to find a restarted master and tell it what they hold
PASSING: Final = frozenset(
    {
        "master.unseen",
        "master.no_leader",
        "master.behind",
        "store.unseen",
        "store.unmounted",
        "store.suspected",
        "store.announcing",
        "store.gone",
    }
)
"""What is amiss for a moment after a start."""

SERVING_OR_DRAINING: Final = frozenset({"ready", "draining"})
"""States of a store of which its hold's says more: cordoned, draining, drained."""

COLUMNS: Final = (
    Column("name"),
    Column("role"),
    Column("host"),
    Column("state"),
    Column("objects", "count"),
    Column("used_bytes", "bytes"),
    Column("capacity_bytes", "bytes"),
    Column("address"),
    Column("pid"),
    Column("term", wide=True),
    Column("numa_node", wide=True),
    Column("misplaced_bytes", "bytes", wide=True),
    Column("transports", "list", wide=True),
    Column("control", wide=True),
    Column("http", wide=True),
    Column("populated_share", wide=True),
    Column("populate_eta_s", wide=True),
    Column("lag", "count", wide=True),
    Column("promotable", wide=True),
)


HOLD_COLUMNS: Final = (
    Column("number", title="hold"),
    Column("target"),
    Column("kind"),
    Column("state"),
    Column("left", "count"),
    Column("objects", "count"),
    Column("owner"),
    Column("since"),
    Column("reason"),
    Column("stores", "list", wide=True),
    Column("swept", "count", wide=True),
    Column("migrated", "count", wide=True),
)

CLIENT_COLUMNS: Final = (
    Column("name", title="client"),
    Column("host"),
    Column("pid"),
    Column("connections", "count"),
)


@options.command("status")
@click.option(
    "--wait", type=click.Choice(["healthy"]), help="Wait until it is, up to --timeout (default 60s)."
)
@click.pass_obj
def command(settings: Settings, wait: str | None) -> int:
    r"""
    Is the pool healthy, and what is in it? The worst comes first; -o wide shows clients as well.

    Exit code 0: healthy. 1: degraded. 3: down, or not healthy in time.

    \b
    Examples:
      kvops status
      kvops status --wait healthy --timeout 60s -o json
    """
    out = Output(settings)
    if wait is None:
        target = resolve(settings)
        return show(out, target, look(target, timeout_s=settings.timeout_s()))
    target, judgement = look_until(
        settings, lambda seen: seen.health is Health.HEALTHY, timeout_s=settings.timeout_s(60.0)
    )
    code = show(out, target, judgement)
    return code if code == 0 else EXIT_CODES[Health.DOWN]


def look_settled(settings: Settings) -> tuple[Target, Judgement]:
    """Look at what was just started, and again while what is amiss passes by itself, for ``SETTLE_S`` at most."""
    return look_until(
        settings, lambda seen: not any(reason.code in PASSING for reason in seen.reasons), timeout_s=SETTLE_S
    )


def show(out: Output, target: Target, judgement: Judgement, **more: Any) -> int:
    """Print a judgement and return the exit code; ``more`` keys go into the JSON document."""
    document = judgement.document() | more
    if out.structured:
        out.document(document)
        return EXIT_CODES[judgement.health]
    out.header(target.label, f"{out.state(str(judgement.health))}  {_summary(judgement)}")
    now = datetime.now(UTC)
    for reason in judgement.reasons:
        out.line(f"  {out.state(reason.code.partition('.')[2]):<10}  {_reason_text(reason, now)}")
    rows = [row | {"role": "master"} for row in judgement.masters]
    held = {hold["number"]: str(hold["state"]) for hold in judgement.holds}
    for row in judgement.stores:
        state = held.get(row.get("hold"), "") if row["state"] in SERVING_OR_DRAINING else ""
        rows.append(row | {"role": "store", "state": state or row["state"]})
    rows += [row | {"role": "etcd"} for row in judgement.etcd]
    out.table(COLUMNS, rows)
    if judgement.holds and out.human:
        out.table(HOLD_COLUMNS, judgement.holds)
    if out.format == "wide":
        out.table(CLIENT_COLUMNS, judgement.clients)
        if not judgement.clients:
            out.line("no clients")
    if not out.settings.quiet:
        out.line(f"next: {_next(target, judgement)}")
    return EXIT_CODES[judgement.health]


def _summary(judgement: Judgement) -> str:
    counts = [
        f"{len(rows)} {word}{'' if len(rows) == 1 else 's'}"
        for word, rows in (("master", judgement.masters), ("store", judgement.stores))
    ]
    more = ""
    if judgement.populated_bytes < judgement.capacity_bytes:
        share = judgement.populated_bytes / judgement.capacity_bytes
        more = f" ({share:.0%} prepared{_eta(judgement)})"
    elif judgement.capacity_bytes:
        more = f" ({judgement.used_bytes / judgement.capacity_bytes:.0%})"
    return ", ".join(
        [
            *counts,
            human_objects(judgement.objects),
            f"{human_bytes(judgement.used_bytes)} of {human_bytes(judgement.capacity_bytes)}{more}",
        ]
    )


def _eta(judgement: Judgement) -> str:
    """How long the slowest store will need for the rest of its memory."""
    left = [eta for row in judgement.stores if (eta := row["populate_eta_s"]) is not None]
    return f", {human_age(max(left))} to go" if left and max(left) > 0 else ""


def _reason_text(reason: Reason, now: datetime) -> str:
    text = f"{reason.subject}: {reason.text}"
    if reason.since:
        since = datetime.fromisoformat(reason.since)
        age = human_age(max(0.0, (now - since).total_seconds()))
        text += f", since {since:%Y-%m-%d %H:%M:%S} UTC ({age} ago)"
    return text


def _next(target: Target, judgement: Judgement) -> str:
    group = "" if target.name == "local" else f" -g {target.name}"
    for reason in judgement.reasons:
        if reason.next:
            return reason.next.replace("kvops ", f"kvops{group} ")
    if target.local is not None and any(one.code.startswith("group.") for one in judgement.reasons):
        return f"kvops{group} start"
    return f"kvops{group} object stats" if judgement.health is Health.HEALTHY else f"kvops{group} events"
