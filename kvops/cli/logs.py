"""``kvops logs``: what the processes of a local group wrote."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.context import resolve
from kvops.cli.interrupt import ends_quietly
from kvops.cli.options import Settings
from kvops.cli.output import Output, printable
from kvops.errors import ConfigError, UsageError
from kvops.fleet.group_state import GroupState

POLL_S: Final = 0.2  # between looks with -f: inotify has no place in the standard library
BLOCK_BYTES: Final = 64 * 1024
LINE_BYTES_MAX: Final = 64 * 1024  # a longer line is shown in pieces
LINES_MAX: Final = 1_000_000
CONTROL: Final = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)  # what steers a terminal; our own lines hold none
LEVEL_COLORS: Final = {"warning": "yellow", "error": "red", "critical": "red"}


@options.command("logs")
@click.argument(
    "members", nargs=-1, metavar="[MEMBER|ROLE…]", shell_complete=options.offer("members_and_roles")
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, LINES_MAX),
    default=100,
    show_default=True,
    help="Last lines of each.",
)
@click.option("--since", metavar="TIME", help="Only lines since then: 30m, 03:10 (UTC), RFC 3339.")
@click.pass_obj
def command(settings: Settings, members: tuple[str, ...], follow: bool, lines: int, since: str | None) -> int:
    r"""
    Show what members of a local group wrote: all of them, some, or those of a role (master, store).

    On a terminal lines are made readable. Through a pipe the lines of one member come as they were written;
    those of several are one stream in the order of their times, each line behind its member's name and a tab.
    With -o jsonl each line is an object that names its member.

    \b
    Examples:
      kvops logs store-2
      kvops logs store --since 10m -f
    """
    from kvops.cli.units import parse_since, split_list

    out = Output(settings)
    target = resolve(settings)
    local = target.require_local()
    names = _choose(local.require(), split_list(members))
    start = parse_since(since, now=datetime.now(UTC)) if since is not None else None
    tails = [Tail(name, local.log_file(name)) for name in names]
    found: list[tuple[str, int, str, str]] = []
    for tail in tails:
        kept = [line for line in tail.last(lines) if start is None or _is_since(line, start)]
        found += [(_time(line), position, tail.name, line) for position, line in enumerate(kept)]
    # One stream, by time; lines without one stay behind the line before them.
    if len(tails) > 1:
        found = _in_order(found)
    if not out.structured:
        out.header(target.label, ", ".join(names))
    for _, _, name, line in found:
        _print(out, name, line, many=len(tails) > 1)
    if not follow:
        return 0
    pause = threading.Event()
    with ends_quietly():
        while True:
            for tail in tails:
                for line in tail.fresh():
                    _print(out, tail.name, line, many=len(tails) > 1)
            pause.wait(POLL_S)


def _choose(state: GroupState, wanted: list[str]) -> list[str]:
    if not wanted:
        return [member.name for member in state.members]
    names: dict[str, None] = {}
    for word in wanted:
        role = word.removesuffix("s")
        some = [member.name for member in state.members if word == member.name or role == member.role]
        if not some:
            members = ", ".join(member.name for member in state.members)
            raise UsageError(f"group {state.group} has no member or role {word}", fix=f"members: {members}")
        names.update(dict.fromkeys(some))
    return list(names)


@dataclass(slots=True)
class Tail:
    """One log file: its last lines, then what is added; follows it when it is set aside and begun anew."""

    name: str
    path: Path
    _offset: int = 0
    _inode: int = 0
    _partial: bytes = b""

    def last(self, count: int) -> list[str]:
        """The last ``count`` lines; none when there is no file yet."""
        try:
            with self.path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                end = file.seek(0, os.SEEK_END)
                data = b""
                position = end
                # Backwards by blocks, until enough line ends are seen.
                while position > 0 and data.count(b"\n") <= count:
                    position = max(0, position - BLOCK_BYTES)
                    file.seek(position)
                    data = file.read(min(BLOCK_BYTES, end - position)) + data
                self._offset = end
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}", fix="run as its owner") from error
        whole, newline, self._partial = data.rpartition(b"\n")
        return (
            [line.decode("utf-8", "replace") for line in whole.split(b"\n")[-count:]]
            if count and newline
            else []
        )

    def fresh(self) -> Iterator[str]:
        """Lines added since the last look."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._partial = found.st_ino, 0, b""
                file.seek(self._offset)
                while block := file.read(BLOCK_BYTES):
                    self._offset += len(block)
                    *lines, self._partial = (self._partial + block).split(b"\n")
                    if len(self._partial) > LINE_BYTES_MAX:
                        lines.append(self._partial)
                        self._partial = b""
                    for line in lines:
                        yield line.decode("utf-8", "replace")
        except OSError:
            return  # between two files; the next look finds it


def _fields(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _time(line: str) -> str:
    fields = _fields(line)
    return str(fields.get("timestamp", fields.get("time", ""))) if fields is not None else ""


def _is_since(line: str, start: datetime) -> bool:
    try:
        at = datetime.fromisoformat(_time(line))
    except ValueError:
        return False
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)) >= start


def _in_order(found: list[tuple[str, int, str, str]]) -> list[tuple[str, int, str, str]]:
    last: dict[str, str] = {}
    dated = []
    for time, position, name, line in found:
        last[name] = time or last.get(name, "")
        dated.append((last[name], position, name, line))
    return sorted(dated, key=lambda one: (one[0], one[2], one[1]))


def _print(out: Output, name: str, line: str, *, many: bool) -> None:
    fields = _fields(line)
    if out.structured:
        out.raw_json({"member": name, **(fields if fields is not None else {"line": line})})
    elif out.human and fields is not None:
        click.echo(_readable(out, name if many else "", fields), color=out.color)
    else:
        click.echo(f"{name}\t{printable(line)}" if many else CONTROL.sub(_escaped, line))


def _escaped(found: re.Match[str]) -> str:
    return repr(found.group())[1:-1]


def _readable(out: Output, name: str, fields: dict[str, Any]) -> str:
    fields = dict(fields)
    time = str(fields.pop("timestamp", fields.pop("time", "")))
    clock = re.sub(r"^\d{4}-\d\d-\d\dT|Z$", "", time)
    level = str(fields.pop("level", "info"))
    event = str(fields.pop("event", ""))
    for bound_once in ("host", "role", "name", "group"):
        fields.pop(bound_once, None)
    rest = " ".join(f"{key}={_value(value)}" for key, value in fields.items())
    member = f"{name:<10} " if name else ""
    what = out.style(printable(event), fg=LEVEL_COLORS.get(level), bold=True)
    return f"{printable(clock):<12}  {member}{what}  {rest}".rstrip()


def _value(value: Any) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))
