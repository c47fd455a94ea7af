"""``kvops chaos agent``: what ``kvops chaos inject --host`` and ``run`` speak with on the other machine."""

from __future__ import annotations

import sys

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings


@options.command("agent", hidden=True)
@click.option(
    "--reserve", "run_id", default="", metavar="RUN", help="Keep other runs away from this machine."
)
@click.pass_obj
def command(settings: Settings, run_id: str) -> int:
    r"""
    Take orders on standard input, one JSON object a line. Not meant for people.

    \b
    Example:
      ssh gpu-204 kvops chaos agent
    """
    from kvops.chaos.agent import reserve, serve

    if run_id:
        return reserve(sys.stdin.buffer, sys.stdout.buffer, state_dir=state_dir(settings), run_id=run_id)
    return serve(sys.stdin.buffer, sys.stdout.buffer, state_dir=state_dir(settings))
