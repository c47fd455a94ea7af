"""``kvops chaos catalog``: every fault, what it certifies, and what it does not."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output

COLUMNS: Final = (
    Column("fault"),
    Column("layer"),
    Column("arguments", "list"),
    Column("certifies"),
    Column("does_not_certify", wide=True),
    Column("transports", "list", wide=True),
    Column("conflicts", "list", wide=True),
)


@options.command("catalog")
@click.argument("name", required=False)
@click.pass_obj
def command(settings: Settings, name: str | None) -> int:
    r"""
    Every fault there is: what it does, what it certifies, and what it does not. With NAME, that one in full.

    \b
    Examples:
      kvops chaos catalog
      kvops chaos catalog process.pause
    """
    from kvops.chaos.doctor import examine
    from kvops.chaos.faults import catalogue

    out = Output(settings)
    rows = [_row(key, cls) for key, cls in catalogue().items()]
    if name is not None:
        from kvops.cli.chaos_where import state_dir

        wanted = {one.fault for one in examine(state_dir(settings), [name]).faults}
        rows = [row for row in rows if row["fault"] in wanted]
    if out.human and name is not None:
        for row in rows:
            _explain(out, row)
        return 0
    out.rows("faults", COLUMNS, rows)
    return 0


def _row(name: str, cls: Any) -> dict[str, Any]:
    from kvops.chaos.targets import parameters

    arguments = [
        key if default is dataclasses.MISSING else f"{key}={default}"
        for key, default in parameters(cls).items()
    ]
    return {
        "fault": name,
        "layer": str(cls.layer),
        "arguments": arguments,
        "certifies": cls.certifies,
        "does_not_certify": cls.does_not_certify,
        "transports": sorted(map(str, cls.transports)),
        "conflicts": sorted(cls.conflicts),
        "lasting": cls.lasting,
        "about": " ".join((cls.__doc__ or "").split()),
    }


def _explain(out: Output, row: dict[str, Any]) -> None:
    out.line(out.style(row["fault"], bold=True))
    out.line(f"  {row['about']}")
    out.line(f"  certifies         {row['certifies']}")
    out.line(f"  does not certify  {row['does_not_certify']}")
    out.line(f"  arguments         {', '.join(row['arguments']) or 'none'}")
    out.line(f"  reaches           {', '.join(row['transports'])}")
