"""``kvops events``: what changed in a group."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.clients import control_client
from kvops.cli.context import resolve
from kvops.cli.interrupt import ends_quietly
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output, printable
from kvops.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from kvops.store.model import Event

COLUMNS: Final = (
    Column("time"),
    Column("event"),
    Column("subject"),
    Column("actor"),
    Column("detail"),
)


@options.command("events")
@click.option("--since", metavar="TIME", help="Only events since then: 30m, 03:10 (UTC), RFC 3339.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until Ctrl-C.")
@click.pass_obj
def command(settings: Settings, since: str | None, follow: bool) -> int:
    r"""
    Show what changed: stores that came and went, breakers, elections, evictions.

    \b
    Examples:
      kvops events --since 30m
      kvops events -f -o jsonl
    """
    from kvops.cli.units import parse_since

    out = Output(settings)
    target = resolve(settings)
    start = None
    if since is not None:
        at = parse_since(since, now=datetime.now(UTC))
        start = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if not target.control:
        if target.local is not None:
            raise target.not_running()
        raise UsageError(
            f"context {target.name} names no control address", fix="add control: [HOST:PORT] to it"
        )
    if follow and out.format == "json":
        raise UsageError("a stream is no single JSON document", fix="use -o jsonl with -f")
    missed: Unreachable | None = None
    for address in target.control:
        with closing(control_client(address, target.secret(), timeout_s=settings.timeout_s())) as client:
            try:
                stream = client.events(start, follow=follow)
                if follow:
                    out.header(target.label, "Ctrl-C ends")
                    with ends_quietly():
                        for event in stream:
                            _print(out, _row(event))
                    return 0
                rows = [_row(event) for event in stream]
            except Unreachable as error:
                missed = error  # a standby may answer where the first did not
                continue
        out.header(target.label, f"{len(rows)} events")
        out.rows(
            "events", COLUMNS, rows if out.structured else [_flat(row) for row in rows], group=target.name
        )
        return 0
    assert missed is not None
    raise missed


def _row(event: Event) -> dict[str, Any]:
    return {
        "time": event.time,
        "event": event.event,
        "subject": event.subject,
        "actor": event.actor,
        "detail": dict(event.detail),
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"detail": " ".join(f"{key}={_text(value)}" for key, value in row["detail"].items())}


def _text(value: object) -> str:
    """A value as JSON has it, where Python's word is another."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _print(out: Output, row: dict[str, Any]) -> None:
    if out.structured:
        out.raw_json(row)
    else:
        flat = _flat(row)
        separator = "  " if out.human else "\t"
        click.echo(separator.join(printable(str(flat[column.key])) for column in COLUMNS))
