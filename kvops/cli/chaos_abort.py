"""``kvops chaos abort``: ends every experiment now, also without its runner."""

from __future__ import annotations

import getpass

import click

from kvops.cli import options
from kvops.cli.chaos_recover import show
from kvops.cli.chaos_where import state_dir
from kvops.cli.hosts import SshSaid, ssh_options
from kvops.cli.options import Settings
from kvops.cli.output import Output


@options.command("abort")
@click.option("--reason", default="", help="For the ledger.")
@click.option("--lock", is_flag=True, help="And forbid new ones until kvops chaos unlock.")
@click.option("--host", "hosts", multiple=True, metavar="HOST", help="On these machines, over SSH.")
@ssh_options
@click.pass_obj
def command(settings: Settings, reason: str, lock: bool, hosts: tuple[str, ...], ssh: SshSaid) -> int:
    r"""
    End every experiment now: its guardian undoes it, and without one this command does.

    The runner sees it and ends with exit code 12. Exit code 0: nothing is left behind. 4: something is.

    \b
    Examples:
      kvops chaos abort --reason "INC-4412" --lock
      kvops chaos abort --host gpu-[201-204] --inventory fleet.yaml
    """
    from kvops.chaos.control import ABORT_TIMEOUT_S, abort
    from kvops.chaos.ledger import Book

    if hosts:
        from kvops.cli.chaos_there import on_hosts

        more = (["--reason", reason] if reason else []) + ["--lock"] * lock
        return on_hosts(settings, hosts, ssh, "abort", *more)
    folder = state_dir(settings)
    said = reason or "no reason given"
    if lock:
        Book(folder).lock(by=getpass.getuser(), reason=said)
    found = abort(folder, reason=said, timeout_s=settings.timeout_s(ABORT_TIMEOUT_S))
    return show(Output(settings), found, "no experiment runs")
