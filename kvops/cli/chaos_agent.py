"""``kvops chaos agent``: what ``kvops chaos inject --host`` speaks with on the other machine."""

from __future__ import annotations

import sys

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.options import Settings


@options.command("agent", hidden=True)
@click.pass_obj
def command(settings: Settings) -> int:
    r"""
    Take orders on standard input, one JSON object a line. Not meant for people.

    \b
    Example:
      ssh gpu-204 kvops chaos agent
    """
    from kvops.chaos.agent import serve

    return serve(sys.stdin.buffer, sys.stdout.buffer, state_dir=state_dir(settings))
