"""``kvops chaos``: finds the command below it that was asked for, and imports only that."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, NamedTuple

import click

from kvops.cli.options import Command, Group


class Row(NamedTuple):
    """One command below ``chaos``: its line of help, and the module of ``kvops.cli`` that holds it."""

    help: str
    module: str


COMMANDS: Final[dict[str, Row]] = {
    "plan": Row("What a run would do: targets, undo, cost.", "chaos_plan"),
    "validate": Row("What is wrong with an experiment file.", "chaos_validate"),
    "run": Row("One experiment, from the first look to the verdict.", "chaos_run"),
    "suite": Row("A folder of experiments, and the matrix of their verdicts.", "chaos_suite"),
    "inject": Row("One fault on a running group, here or over SSH, by hand.", "chaos_inject"),
    "soak": Row("Random faults within bounds, round after round.", "chaos_soak"),
    "calibrate": Row("Runs without a fault: what noise alone is blamed for.", "chaos_calibrate"),
    "sim": Row("Break a simulated pool under virtual time, seed by seed.", "chaos_sim"),
    "doctor": Row("Which faults this machine can do, and how.", "chaos_doctor"),
    "catalog": Row("Every fault: what it certifies, and what it does not.", "chaos_catalog"),
    "status": Row("What runs, what was left behind, who locked.", "chaos_status"),
    "abort": Row("End every experiment now, also without its runner.", "chaos_abort"),
    "recover": Row("Take back what a dead experiment left.", "chaos_recover"),
    "lock": Row("Forbid experiments.", "chaos_lock"),
    "unlock": Row("Allow experiments again.", "chaos_unlock"),
    "lab": Row("A network namespace for each node, made and removed.", "chaos_lab"),
    "check": Row("Judge a recorded history again, offline.", "chaos_check"),
    "report": Row("Show a recorded run as text, JSON, JUnit, journal or HTML.", "chaos_report"),
}
"""In the order help shows them; each module holds its command as ``command``."""

HIDDEN: Final = Row("What inject --host speaks with.", "chaos_agent")


class Chaos(Group):
    """Knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        row = HIDDEN if cmd_name == "agent" else COMMANDS.get(cmd_name)
        if row is None:
            return None
        found = import_module(f"kvops.cli.{row.module}").command
        assert isinstance(found, click.Command), f"kvops.cli.{row.module}.command is no click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: nothing is imported for help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.help) for name, row in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """From the table as well."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return list(Command.shell_complete(self, ctx, incomplete))
        return [
            CompletionItem(name, help=row.help)
            for name, row in COMMANDS.items()
            if name.startswith(incomplete)
        ]


@click.group("chaos", cls=Chaos)
def command() -> None:
    r"""
    Break it on purpose: inject one fault, prove that it is there, watch clients through it, undo it, judge.

    \b
    Examples:
      kvops chaos run playbooks/experiments/store-pause.yaml
      kvops chaos sim --seeds 100
    """
