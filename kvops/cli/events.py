"""``kvops events``: what changed in a group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from queue import Queue
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.clients import control_client
from kvops.cli.context import Target, resolve
from kvops.cli.interrupt import ends_quietly
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output, printable
from kvops.errors import AuthFailed, KvopsError, Unreachable, UsageError
from kvops.timestamps import rfc3339

if TYPE_CHECKING:
    from kvops.store.model import Event

COLUMNS: Final = (
    Column("time"),
    Column("event"),
    Column("subject"),
    Column("actor"),
    Column("detail"),
)
MASTERS_AT_ONCE: Final = 8
UNREAD_MAX: Final = 1_024


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
        start = rfc3339(parse_since(since, now=datetime.now(UTC)))
    if not target.control:
        if target.local is not None:
            raise target.not_running()
        raise UsageError(
            f"context {target.name} names no control address", fix="add control: [HOST:PORT] to it"
        )
    if follow and out.format == "json":
        raise UsageError("a stream is no single JSON document", fix="use -o jsonl with -f")
    if follow:
        out.header(target.label, "Ctrl-C ends")
        with ends_quietly():
            for event in _followed(target, start, settings.timeout_s()):
                _print(out, _row(event))
        return 0
    found, missed = _held(target, start, settings.timeout_s())
    rows = [_row(event) for event in found]
    silent = f"; {', '.join(missed)} did not answer" if missed else ""
    out.header(target.label, f"{len(rows)} events{silent}")
    out.rows("events", COLUMNS, rows if out.structured else [_flat(row) for row in rows], group=target.name)
    return 0


def _held(target: Target, start: str | None, timeout_s: float) -> tuple[list[Event], list[str]]:
    """
    What every master holds, in order: each keeps what happened while it led. And who did not answer.

    Raises:
        Unreachable: Nobody answered.
    """
    secret, addresses = target.secret(), target.control

    def ask(address: str) -> list[Event] | Unreachable:
        with closing(control_client(address, secret, timeout_s=timeout_s)) as client:
            try:
                return list(client.events(start))
            except AuthFailed:
                raise
            except Unreachable as error:
                return error

    with ThreadPoolExecutor(max_workers=min(MASTERS_AT_ONCE, len(addresses))) as threads:
        answers = dict(zip(addresses, threads.map(ask, addresses), strict=True))
    silent = {address: answer for address, answer in answers.items() if isinstance(answer, Unreachable)}
    if len(silent) == len(answers):
        raise next(iter(silent.values()))
    events = [event for answer in answers.values() if not isinstance(answer, Unreachable) for event in answer]
    return sorted(events, key=lambda event: event.time), list(silent)


def _followed(target: Target, start: str | None, timeout_s: float) -> Iterator[Event]:
    """Every master's events as they come, until the last of their connections breaks: then ``Unreachable``."""
    secret, addresses = target.secret(), target.control
    arrived: Queue[Event | KvopsError] = Queue(UNREAD_MAX)

    def follow(address: str) -> None:
        with closing(control_client(address, secret, timeout_s=timeout_s)) as client:
            try:
                for event in client.events(start, follow=True):
                    arrived.put(event)
                raise Unreachable(f"{address} has ended", fix="see kvops status")
            except KvopsError as error:
                arrived.put(error)

    for address in addresses:
        threading.Thread(target=follow, args=(address,), name=f"events {address}", daemon=True).start()
    left = len(addresses)
    while left:
        one = arrived.get()
        if not isinstance(one, KvopsError):
            yield one
            continue
        left -= 1
        if not left or isinstance(one, AuthFailed):
            raise one


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
