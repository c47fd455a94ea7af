"""``kvops chaos report``: a recorded run, shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.options import Settings

if TYPE_CHECKING:
    from kvops.chaos.history import RunRecord
    from kvops.chaos.verdict import Judgement

FORMATS: Final = ("text", "json", "junit", "html", "ctk-journal")
COMPARED: Final = ("text", "json", "html")


@options.command("report")
@click.argument("runs", type=options.PATH, nargs=-1, required=True, metavar="RUN…")
@click.option("--format", "kind", type=click.Choice(FORMATS), help="What to print; text by default.")
@click.option("--to", "target", type=options.PATH, metavar="FILE", help="Write to a file, not to stdout.")
@click.pass_obj
def command(settings: Settings, runs: tuple[Path, ...], kind: str | None, target: Path | None) -> int:
    r"""
    Show a recorded run; several runs of one experiment side by side (text, json, html).

    The run is judged from its history, as kvops chaos check does, and the page needs nothing but itself. The exit code
    is 0 when the report was made, whatever the verdict.

    \b
    Example:
      kvops chaos report runs/1402-7 --format html --to report.html
      kvops chaos report runs/1402-7 runs/1431-7            (the second without a breaker)
      kvops chaos report runs/1402-7 runs/1440-7 --format html --to placement.html
    """
    from kvops.chaos.history import read_run
    from kvops.chaos.verdict import judge
    from kvops.inference.outfile import check_writable, whole_file

    chosen = kind or ("json" if settings.output in ("json", "jsonl") else "text")
    if len(runs) > 1 and chosen not in COMPARED:
        raise click.UsageError(f"several runs are compared as {', '.join(COMPARED)}, not as {chosen}")
    if target is not None:
        check_writable(str(target), what="the report")
    found = [(record := read_run(path), judge(record)) for path in runs]
    content = _one(*found[0], chosen) if len(found) == 1 else _several(found, chosen)
    if target is None:
        _print(content, chosen)
        return 0
    with whole_file(str(target), what="the report") as stream:
        stream.write(content.encode())
    if not settings.quiet:
        click.echo(f"wrote {target}", err=True)
    return 0


def _one(record: RunRecord, judgement: Judgement, kind: str) -> str:
    from kvops.chaos.report import document, html, journal, junit, text

    if kind == "html":
        return html.render(record, judgement)
    if kind == "junit":
        return junit.render(record, judgement)
    if kind == "text":
        return text.render(record, judgement) + "\n"
    made: dict[str, Any] = (
        document.document(record, judgement) if kind == "json" else journal.journal(record, judgement)
    )
    return json.dumps(made, ensure_ascii=False, indent=2) + "\n"


def _several(found: Sequence[tuple[RunRecord, Judgement]], kind: str) -> str:
    from kvops.chaos.report import compare

    compare.check_comparable([record for record, _ in found])
    sides = [compare.as_side(record, one) for record, one in found]
    if kind == "html":
        return compare.page(sides)
    if kind == "json":
        return json.dumps(compare.document(sides), ensure_ascii=False, indent=2) + "\n"
    return compare.render(sides) + "\n"


def _print(content: str, kind: str) -> None:
    """Text may hold a key or a peer's words: none of it steers the terminal."""
    from kvops.cli.output import printable

    if kind == "text":
        for line in content.splitlines():
            click.echo(printable(line))
    else:
        sys.stdout.write(content)
