"""``kvops chaos check``: the checkers again, over a recorded history."""

from __future__ import annotations

from pathlib import Path

import click

from kvops.cli import options
from kvops.cli.options import Settings


@options.command("check")
@click.argument("history", type=options.PATH)
@click.option(
    "--checker", "checkers", multiple=True, metavar="ID", help="Only this one (S1, no_hang …); repeat."
)
@click.pass_obj
def command(settings: Settings, history: Path, checkers: tuple[str, ...]) -> int:
    r"""
    Judge a recorded history again, offline: a run's folder, or one *.jsonl file.

    Each promise is valid, unknown (too little was recorded or ran) or invalid, with counter-examples. The exit code
    is the run's verdict. Nothing is changed.

    \b
    Example:
      kvops chaos check runs/1402-7
      kvops chaos check runs/1402-7 --checker integrity --checker lease -v
    """
    from kvops.chaos.checkers.registry import find
    from kvops.chaos.history import read_run
    from kvops.chaos.report import text
    from kvops.chaos.report.document import document
    from kvops.chaos.verdict import judge
    from kvops.cli.output import Column, Output, printable

    names = tuple(name for value in checkers for name in value.split(",") if name)
    find(names)  # a typo is refused before a long history is read
    record = read_run(history)
    judgement = judge(record, checkers=names)
    output = Output(settings)
    if output.structured:
        output.document(document(record, judgement))
    elif output.human:
        for line in text.render(record, judgement, verbose=settings.verbose > 0).splitlines():
            click.echo(printable(line))
    else:
        columns = (
            Column("id"),
            Column("name"),
            Column("verdict"),
            Column("checked", "count"),
            Column("summary"),
        )
        rows = [
            {
                "id": one.checker.id,
                "name": one.checker.name,
                "verdict": one.result.verdict.value,
                "checked": one.result.checked,
                "summary": one.result.summary,
            }
            for one in judgement.checkers
        ]
        output.table(columns, rows)
        output.note(f"{judgement.verdict}  {judgement.reasons[0]}")
    return judgement.exit_code
