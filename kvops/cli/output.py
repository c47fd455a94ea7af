"""
How results are printed: tables for people, TSV through a pipe, JSON for programs, progress on stderr.

Text that comes from elsewhere (keys, names, a peer's words) never reaches a terminal with control characters
in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

import click

from kvops.cli.options import Settings

Kind = Literal["text", "count", "bytes", "list"]
PROGRESS_LINE_SHARE: Final = 0.1  # without a terminal, a line of progress for each tenth
PROGRESS_LINE_S: Final = 10.0  # … or after this long

STATE_COLORS: Final = {
    "healthy": "green",
    "ready": "green",
    "leader": "green",
    "standby": "green",
    "degraded": "yellow",
    "suspected": "yellow",
    "draining": "yellow",
    "announcing": "yellow",
    "migrating": "yellow",
    "cordoned": "yellow",
    "drained": "green",
    "lost": "red",
    "starting": "yellow",
    "stopped": "yellow",
    "unseen": "yellow",
    "down": "red",
    "gone": "red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: the row's key, and how its value is shown."""

    key: str
    kind: Kind = "text"
    wide: bool = False  # only with -o wide, and in TSV
    title: str = ""

    def human(self, value: Any) -> str:
        """The cell for people."""
        if value is None or value == "" or value == []:
            return "-"
        if self.kind == "bytes":
            from kvops.fleet.preflight import human_bytes

            return human_bytes(int(value))
        if isinstance(value, bool):
            return "yes" if value else "no"
        if self.kind == "count":
            return f"{value:,}"
        if self.kind == "list":
            return ",".join(printable(str(item)) for item in value)
        return printable(str(value))

    def plain(self, value: Any) -> str:
        """The cell for programs: whole numbers, no blanks inside that would split it."""
        if value is None:
            return ""
        if self.kind == "list":
            return ",".join(printable(str(item)) for item in value)
        if isinstance(value, bool):
            return str(value).lower()
        return printable(str(value))


def printable(text: str) -> str:
    """The text with everything that could steer a terminal or split a cell written as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class Output:
    """Prints one command's result in the format that was asked for."""

    def __init__(self, settings: Settings) -> None:
        """Settle format and colour."""
        self.settings = settings
        self.terminal = _is_terminal(sys.stdout)
        self.format = settings.output or "table"
        if self.format == "table" and not self.terminal:
            self.format = "tsv"
        self.color = _wants_color(settings.color, terminal=self.terminal)

    @property
    def structured(self) -> bool:
        """JSON in one form or the other."""
        return self.format in ("json", "jsonl")

    @property
    def human(self) -> bool:
        """A person reads it."""
        return self.format in ("table", "wide")

    def line(self, text: str = "") -> None:
        """A line of human output: on stderr beside TSV; JSON and names do without."""
        if self.human or (self.format == "tsv" and not self.settings.quiet):
            click.echo(text, color=self.color, err=not self.human)

    def header(self, label: str, text: str = "") -> None:
        """The first line of human output: the group and its environment."""
        if not self.settings.quiet:
            self.line(f"{self.style(label, bold=True)}{'  ' if text else ''}{text}")

    def note(self, text: str) -> None:
        """What happens meanwhile, on stderr."""
        if not self.settings.quiet:
            click.echo(printable(text), err=True)

    def style(self, text: str, **how: Any) -> str:
        """Coloured text where colour is wanted."""
        return click.style(text, **how) if self.color else text

    def state(self, text: str) -> str:
        """A state in its colour."""
        return self.style(text, fg=STATE_COLORS.get(text), bold=text in ("down", "degraded"))

    def document(self, document: Mapping[str, Any]) -> None:
        """A JSON document, with its schema first; other formats do not have it."""
        if self.structured:
            self.raw_json({"schema": 1, **document})

    def steps(self, label: str, steps: Sequence[str], *, none: str = "nothing is left to do") -> None:
        """What a dry run would do, one line a step; ``none`` is said of no steps. Not for structured output."""
        self.header(label, "would do, in this order:" if steps else none)
        for step in steps:
            click.echo(f"  {step}" if self.human else step)

    def raw_json(self, value: Mapping[str, Any]) -> None:
        """One JSON value: indented for a person's eye, on one line otherwise."""
        indent = 2 if self.format == "json" and self.terminal else None
        click.echo(json.dumps(value, ensure_ascii=False, indent=indent, default=str))

    def table(self, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
        """Rows in table, wide, name or tsv; JSON formats print documents instead."""
        rows = list(rows)
        if self.format == "name":
            for row in rows:
                click.echo(columns[0].plain(row.get(columns[0].key)))
        elif self.format == "tsv":
            if not self.settings.quiet:
                click.echo("\t".join(column.key for column in columns))
            for row in rows:
                click.echo("\t".join(column.plain(row.get(column.key)) for column in columns))
        elif self.human:
            self._human_table([c for c in columns if self.format == "wide" or not c.wide], rows)

    def rows(
        self, name: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], **more: Any
    ) -> None:
        """A list in whatever format: ``{"schema": 1, name: [...]}``, one object a line, or a table."""
        if self.format == "json":
            self.document({name: list(rows), **more})
        elif self.format == "jsonl":
            for row in rows:
                self.raw_json(row)
        else:
            self.table(columns, rows)

    def _human_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        titles = [
            (column.title or column.key.removesuffix("_bytes")).upper().replace("_", " ")
            for column in columns
        ]
        cells = [[column.human(row.get(column.key)) for column in columns] for row in rows]
        widths = [max(map(len, parts)) for parts in zip(titles, *cells, strict=True)]
        right = [column.kind in ("count", "bytes") for column in columns]

        def pad(text: str, position: int) -> str:
            return text.rjust(widths[position]) if right[position] else text.ljust(widths[position])

        self.line(self.style("  ".join(pad(t, i) for i, t in enumerate(titles)).rstrip(), bold=True))
        for row in cells:
            shown = [
                pad(text, i)
                if columns[i].key not in ("state", "health")
                else self.state(text) + pad(text, i)[len(text) :]
                for i, text in enumerate(row)
            ]
            self.line("  ".join(shown).rstrip())


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False  # closed, or none at all


def _wants_color(said: str | None, *, terminal: bool, env: Mapping[str, str] = os.environ) -> bool:
    """The flag, then NO_COLOR (no-color.org) and FORCE_COLOR, then whether somebody watches."""
    if said in ("always", "never"):
        return said == "always"
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    return terminal and env.get("TERM") != "dumb"


class Progress:
    """
    How far long work has come, on stderr: a bar on a terminal, a line now and then elsewhere, nothing with
    ``-q``.

    ``with Progress(settings, "replay", total=2000) as bar: bar.advance(1, "hit 61 %")``
    """

    def __init__(self, settings: Settings, label: str, *, total: int) -> None:
        """``total`` is what the ``advance`` counts add up to; 0 when nobody knows."""
        self._label, self._total, self._done = label, total, 0
        self._quiet = settings.quiet
        self._bar: Any = None
        self._task: Any = None
        self._text = ""
        self._said_share, self._said_s = 0.0, time.monotonic()
        if not self._quiet and _is_terminal(sys.stderr):
            # Imported here: it costs more than most commands take altogether.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True, no_color=not _wants_color(settings.color, terminal=True)),
                transient=False,
            )
            self._task = self._bar.add_task(label, total=total or None, text="")

    def advance(self, count: int = 1, text: str | None = None) -> None:
        """``count`` more are done; ``text`` stays beside the bar."""
        self._done += count
        if text is not None:
            self._text = printable(text)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, text=self._text)
        elif not self._quiet:
            share = self._done / self._total if self._total else 0.0
            now = time.monotonic()
            if share - self._said_share >= PROGRESS_LINE_SHARE or now - self._said_s >= PROGRESS_LINE_S:
                self._said_share, self._said_s = share, now
                of = f"/{self._total:,}" if self._total else ""
                click.echo(f"{self._label}  {self._done:,}{of}  {self._text}".rstrip(), err=True)

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.console.print(printable(text), markup=False, highlight=False)
        elif not self._quiet:
            click.echo(printable(text), err=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
