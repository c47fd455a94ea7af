"""``kvops completion``: a shell's completion script."""

from __future__ import annotations

import click

from kvops.cli import options
from kvops.cli.options import Settings


@options.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
@click.pass_obj
def command(settings: Settings, ctx: click.Context, shell: str) -> None:
    r"""
    Print a completion script for the shell.

    \b
    Examples:
      eval "$(kvops completion bash)"
      kvops completion fish > ~/.config/fish/completions/kvops.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows bash, zsh and fish"
    # Not source(): for bash that runs the shell to see whether it is recent enough, also where none is
    # installed.
    completer = kind(ctx.find_root().command, {}, "kvops", "_KVOPS_COMPLETE")
    click.echo(completer.source_template % completer.source_vars())
