"""``kvops help``: a command's help, or a page on what all commands share."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import options

TOPICS: Final = {
    "exit-codes": """\
Exit codes, the same for every command:

  0        clean, healthy, PASS
  1        the answer is no: a failing check, a degraded pool, FAIL, not safe to stop
  2        usage: unknown option, bad value, invalid file
  3        could not see or reach: target down, unknown checks (diagnose), timed out
  4        something is left behind: undo incomplete (DIRTY), half-changed hosts; the loudest
  5        refused by a guard: needs --yes, protected group, dirty ledger, lock, a limit; or it runs already
  10–14    chaos: BASELINE_NOT_STEADY, NOT_INJECTED, ABORTED, UNKNOWN, UNSUPPORTED
  70       our own bug: the traceback is in a file, the message names it
  130 143  interrupted (Ctrl-C, SIGTERM), and undone

status: 0 healthy, 1 degraded, 3 down. A closed pipe (kvops … | head) is no failure: 0.
""",
    "output": """\
Output, -o FORMAT on every command:

  table   for people, on a terminal; through a pipe it becomes tsv
  wide    a table with more columns
  json    one document with "schema": 1; errors are JSON on stdout too, logs stay on stderr
  jsonl   one object a line: what streams (-f) give
  name    names only, one a line
  tsv     a header line, then one row a line; never cut, sizes in bytes

Colours: --color auto|always|never, NO_COLOR, FORCE_COLOR. -q leaves data and errors, -v says more.
""",
    "units": """\
Values carry their unit:

  durations  500ms  10s  5m  2h  1d  1h30m
  sizes      64KiB  512MiB  1.5GiB (powers of 1024)   1GB (powers of 1000)   4096B
  rates      40Gbit/s   5GB/s
  lists      repeat the option, or commas and ranges: gpu-[001-040],gpu-099
  times      UTC. --since 30m (ago), 03:10 (the last one), 2031-05-04T03:10:00Z
""",
    "groups": """\
Which group a command acts on:

  1. -g/--group NAME     2. KVOPS_GROUP     3. "group:" in ~/.config/kvops/config.yaml
  4. "group:" in /etc/kvops/config.yaml     5. the local group "local"

A name is a context of one of the two files, or a local group that "kvops start" made under --state-dir
(KVOPS_STATE_DIR, else XDG_STATE_HOME/kvops). A context:

  group: prod-a
  contexts:
    prod-a:
      masters: [10.0.0.1:7800]        # the wire
      control: [10.0.0.1:7801]        # gRPC
      secret_file: ~/.config/kvops/prod-a.secret
      environment: production
      protect: true

"kvops config show --origin" prints each value and where it came from.
""",
}


def _offered(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Topics and commands, then commands below the one that is named."""
    found: click.Command | None = ctx.find_root().command
    said = ctx.params.get("names") or ()
    for name in said:
        found = found.get_command(ctx, name) if isinstance(found, click.Group) else None
    names = found.list_commands(ctx) if isinstance(found, click.Group) else []
    return [name for name in [*(TOPICS if not said else ()), *names] if name.startswith(incomplete)]


@options.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND…|TOPIC]", shell_complete=_offered)
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...]) -> None:
    r"""
    Help on a command, or on a topic: exit-codes, output, units, groups.

    \b
    Example:
      kvops help exit-codes
    """
    root = ctx.find_root()
    if not names:
        click.echo(root.get_help())
        click.echo(f"\nTopics (kvops help TOPIC): {', '.join(TOPICS)}")
        return
    if names[0] in TOPICS and len(names) == 1:
        click.echo(TOPICS[names[0]], nl=False)
        return
    found: click.Command = root.command
    inner = root
    for name in names:
        below = found.get_command(inner, name) if isinstance(found, click.Group) else None
        if below is None:
            raise click.UsageError(
                f"No command or topic {' '.join(names)!r}; topics: {', '.join(TOPICS)}", ctx=ctx
            )
        found = below
        inner = click.Context(found, info_name=name, parent=inner)
    click.echo(found.get_help(inner))
