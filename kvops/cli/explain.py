"""``kvops explain``: what a check means, and which checks an engine's error text points to."""

from __future__ import annotations

import click

from kvops.cli import options
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import UsageError


@options.group("explain")
def command() -> None:
    r"""
    Explain a check or an error text.

    \b
    Examples:
      kvops explain check gid.link_local_selected
      kvops explain error "transport retry counter exceeded"
    """


@command.command("check")
@click.argument("check_id", metavar="ID")
@click.pass_obj
def check_command(settings: Settings, check_id: str) -> int:
    r"""
    What a check looks at, why it matters and how to mend it.

    \b
    Example:
      kvops explain check mem.memlock_limit
    """
    from kvops.diag.playbook import section
    from kvops.diag.report import EXPLAINS, playbook
    from kvops.diag.runner import select

    found = select([check_id])
    if len(found) != 1:
        raise UsageError(
            f"{check_id!r} names {len(found)} checks", fix="give one id; see: kvops diagnose list"
        )
    check = found[0]
    out = Output(settings)
    if out.structured:
        fields = ("id", "title", "why", "source", "fix", "undo", "kind", "root")
        document = {name: str(getattr(check, name)) for name in fields}
        out.document({**document, "explains": list(EXPLAINS.get(check.id, ())), "playbook": playbook(check)})
    else:
        lines = section(check).replace("**", "").splitlines()
        click.echo("\n".join(line for line in lines if not line.startswith("```")))
    return 0


@command.command("error")
@click.argument("text", nargs=-1, required=True)
@click.pass_obj
def error_command(settings: Settings, text: tuple[str, ...]) -> int:
    r"""
    Which checks explain an engine's error text. Exit code 1: none is known.

    \b
    Example:
      kvops explain error "Failed to modify QP to RTR: Connection timed out [110]"
    """
    from kvops.diag.explain import explain_error

    out = Output(settings)
    found = explain_error(" ".join(text))
    rows = [{"meaning": s.meaning, "checks": list(s.checks)} for s in found]
    out.rows("symptoms", [Column("meaning"), Column("checks", "list")], rows)
    if found:
        names = dict.fromkeys(name for symptom in found for name in symptom.checks)
        out.line(f"next    kvops diagnose --only {','.join(names)}")
    else:
        out.line("no symptom of the index matches; try: kvops diagnose")
    return 0 if found else 1
