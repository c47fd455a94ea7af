"""``kvops journal``: what a master's journal says, read without the master."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvops.cli import options
from kvops.cli.context import resolve
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import UsageError

COLUMNS = (Column("sequence"), Column("kind"), Column("rows"), Column("bytes"))


@options.group("journal")
def command() -> None:
    r"""
    What a master's journal says. Reads only; the master may run meanwhile.

    \b
    Example:
      kvops journal verify
    """


def _folder(settings: Settings, given: Path | None) -> Path:
    """The journal that was named, or that of the local group's master."""
    if given is not None:
        return given / "journal" if (given / "journal").is_dir() else given
    local = resolve(settings).require_local()
    masters = [member.name for member in local.require().members if member.role == "master"]
    if len(masters) != 1:
        raise UsageError(
            f"group {local.name} has {len(masters)} masters", fix=f"name a folder: {local.folder}/master-0"
        )
    return local.folder / masters[0] / "journal"


@command.command("verify")
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.pass_obj
def verify(settings: Settings, folder: Path | None) -> int:
    r"""
    Read a journal whole and check every digest; exit code 1 names the file and offset of the first damage.

    \b
    Example:
      kvops journal verify ~/.local/state/kvops/groups/local/master-0
    """
    from kvops.errors import ParseError
    from kvops.fleet.preflight import human_objects
    from kvops.store.journal import recover_state
    from kvops.store.model import HoldState

    out = Output(settings)
    path = _folder(settings, folder)
    document: dict[str, Any] = {"journal": str(path), "whole": False}
    try:
        recovery = recover_state(path)
    except ParseError as error:
        if out.structured:
            out.document(document | {"error": error.what, "fix": error.fix})
        else:
            out.line(f"DAMAGED  {error.what}")
            out.line(f"fix      {error.fix}")
        return 1
    document |= {
        "whole": recovery.whole,
        "objects": len(recovery.rows),
        "stores": len(recovery.stores),
        "holds": sum(hold.state is not HoldState.LIFTED for hold in recovery.holds.values()),
        "next_sequence": recovery.next_sequence,
    }
    if out.structured:
        out.document(document)
    else:
        gap = "" if recovery.whole else "; batches are missing that the disk refused: the stores' word counts"
        out.line(
            f"ok  {human_objects(len(recovery.rows))} on"
            f" {len(recovery.stores)} store{'s' * (len(recovery.stores) != 1)},"
            f" {document['holds']} holds, next batch {recovery.next_sequence:,}{gap}"
        )
    return 0 if recovery.whole else 1


@command.command("inspect")
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--last", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Batches shown.")
@click.pass_obj
def inspect(settings: Settings, folder: Path | None, last: int) -> int:
    r"""
    List the last batches of a journal: what kind, how many rows.

    \b
    Example:
      kvops journal inspect --last 100 -o json
    """
    from collections import deque

    from kvops.store.journal import Kind, recover

    out = Output(settings)
    path = _folder(settings, folder)
    rows: deque[dict[str, Any]] = deque(maxlen=last)
    names = {kind.value: kind.name.lower() for kind in Kind}
    for batch in recover(path):
        rows.append(
            {
                "sequence": batch.sequence,
                "kind": names.get(batch.kind, str(batch.kind)),
                "rows": batch.count,
                "bytes": len(batch.body),
            }
        )
    if out.structured:
        out.document({"journal": str(path), "batches": list(rows)})
    else:
        out.table(COLUMNS, list(rows))
    return 0
