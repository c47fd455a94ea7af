"""The question before a change that costs something: local groups never ask, scripts are refused at once."""

from __future__ import annotations

import sys
from typing import Final

import click

from kvops.cli.context import Target
from kvops.errors import Refused

SHARE_MAX: Final = 0.2  # of a group's capacity: what takes more asks, whether the group is protected or not


def confirm(target: Target, cost: str, *, yes: bool, share: float = 0.0) -> None:
    """
    Go on only if that is meant.

    Args:
        target: The group; one on this machine never asks.
        cost: What the change costs, for the question.
        yes: It was answered on the command line.
        share: Of the group's capacity that is taken away, 0 to 1.

    Raises:
        Refused: Not confirmed, or nobody is there to ask.
    """
    if target.local is not None or yes or not (target.protect or share > SHARE_MAX):
        return
    why = "is protected" if target.protect else f"would lose {share:.0%} of its capacity"
    if not sys.stdin.isatty():
        raise Refused(f"group {target.name} {why}: {cost}", fix="add --yes when this is meant")
    click.echo(f"{target.label}  {cost}", err=True)
    try:
        answer = click.prompt(f'Type "{target.name}" to go on', default="", show_default=False, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise
        answer = ""
    if answer != target.name:
        raise Refused("not confirmed", fix=f"type {target.name}, or add --yes")
