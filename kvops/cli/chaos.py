"""
``kvops chaos``: faults on purpose, and what they prove.

Commands below it are named in ``BELOW`` alone; a module is imported when its command is used. Each module holds
its command as ``command``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click

from kvops.cli.options import Group

BELOW: Final[dict[str, tuple[str, str]]] = {
    # name: (module of kvops.cli, what help says)
    "plan": ("chaos_plan", "What a run would do: targets, undo, cost."),
    "validate": ("chaos_validate", "What is wrong with an experiment file."),
    "run": ("chaos_run", "One experiment, from the first look to the verdict."),
    "suite": ("chaos_suite", "A folder of experiments, and the matrix of their verdicts."),
    "soak": ("chaos_soak", "Random faults within bounds, round after round."),
    "doctor": ("chaos_doctor", "Which faults this machine can do, and how."),
    "catalog": ("chaos_catalog", "Every fault: what it certifies, and what it does not."),
    "status": ("chaos_status", "What runs, what was left behind, who locked."),
    "abort": ("chaos_abort", "End every experiment now, also without its runner."),
    "recover": ("chaos_recover", "Take back what a dead experiment left."),
    "lock": ("chaos_lock", "Forbid experiments."),
    "lab": ("chaos_lab", "A network namespace for each node, made and removed."),
    "unlock": ("chaos_unlock", "Allow experiments again."),
    "check": ("chaos_check", "Judge a recorded history again, offline."),
    "report": ("chaos_report", "Show a recorded run as text, JSON, JUnit, journal or HTML."),
}


class Below(Group):
    """Knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order help shows them."""
        return list(BELOW)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in BELOW:
            return None
        found = import_module(f"kvops.cli.{BELOW[cmd_name][0]}").command
        assert isinstance(found, click.Command), f"{BELOW[cmd_name][0]}.command is no click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: nothing is imported for help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in BELOW.items()])


@click.group("chaos", cls=Below)
def command() -> None:
    r"""
    Faults on purpose: inject one, prove that it is there, watch clients through it, undo it, judge.

    \b
    Example:
      kvops chaos report runs/1402-7 --format text
    """
