"""``kvops chaos validate``: what is wrong with an experiment, before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from kvops.cli import options
from kvops.cli.options import PATH, Settings
from kvops.cli.output import Column, Output

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS: Final = (Column("file"), Column("severity"), Column("rule"), Column("text"), Column("fix"))


@options.command("validate")
@click.argument("files", nargs=-1, type=PATH, metavar="[FILE]...")
@click.option("--schema", is_flag=True, help="Print the JSON schema of experiment files instead.")
@click.pass_obj
def command(settings: Settings, files: tuple[Path, ...], schema: bool) -> int:
    r"""
    Check experiment files, or all of a folder: keys, fault arguments, layers, scope, conflicts, deadlines, what
    they cannot show.

    Files of the Chaos Toolkit are read too; what would be done otherwise is named. Nothing is touched.
    Exit code 2: one of them would be refused.

    \b
    Examples:
      kvops chaos validate playbooks/experiments/store-pause.yaml
      kvops chaos validate --schema > experiment.schema.json
    """
    import json

    from kvops.chaos.experiment import json_schema, load
    from kvops.chaos.faults import catalogue
    from kvops.chaos.lint import lint
    from kvops.errors import ConfigError, UsageError

    if schema:
        click.echo(json.dumps(json_schema(), indent=2))
        return 0
    if not files:
        raise UsageError("no experiment is named", fix="kvops chaos validate FILE")
    out = Output(settings)
    rows: list[dict[str, str]] = []
    named = [one for path in files for one in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not named:
        raise UsageError(
            f"there is no experiment (*.yaml) in {', '.join(map(str, files))}",
            fix="name a file or another folder",
        )
    for path in named:
        try:
            experiment = load(path)
        except ConfigError as error:
            rows.append(
                {"file": str(path), "severity": "error", "rule": "file", "text": error.what, "fix": error.fix}
            )
            continue
        rows += [
            {
                "file": str(path),
                "severity": one.severity,
                "rule": one.rule,
                "text": one.text,
                "fix": one.fix,
            }
            for one in lint(experiment, catalogue())
        ]
    errors = sum(row["severity"] == "error" for row in rows)
    if out.structured:
        out.document({"valid": not errors, "files": [str(path) for path in named], "remarks": rows})
        return 2 if errors else 0
    out.header("validate", f"{len(named)} file{'s' * (len(named) != 1)}, {errors} error{'s' * (errors != 1)}")
    if rows:
        out.table(COLUMNS[len(named) == 1 :], rows)
    return 2 if errors else 0
