"""``kvops chaos lab``: a network namespace for each node, made and removed."""

from __future__ import annotations

from typing import Final

import click

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.context import load_configuration
from kvops.cli.options import SIZE_BYTES, Settings
from kvops.cli.output import Column, Output

COLUMNS: Final = (Column("name"), Column("netns"), Column("address"))


@options.group("lab")
def command() -> None:
    r"""
    A staging fleet on one machine: each master, store and client on a node of its own, joined by a bridge.

    \b
    Example:
      kvops chaos lab up --stores 3 && kvops chaos lab down
    """


def _group(settings: Settings) -> str:
    return str(load_configuration(settings).group.value)


@command.command("up")
@click.option("--stores", type=click.IntRange(1, 48), default=3, show_default=True, help="How many.")
@click.option("--masters", type=click.IntRange(1, 3), default=1, show_default=True, help="How many.")
@click.option(
    "--etcd", type=click.IntRange(0, 5), help="Members of it; several masters have three by default."
)
@click.option(
    "--segment-size", type=SIZE_BYTES, default="256MiB", show_default=True, help="Memory of each store."
)
@click.pass_obj
def up(settings: Settings, stores: int, masters: int, etcd: int | None, segment_size: int) -> int:
    r"""
    Make the nodes and start a group on them. A lab that is up already is left as it is.

    \b
    Example:
      kvops chaos lab up --stores 3 --segment-size 256MiB
    """
    from kvops.chaos import lab
    from kvops.fleet.etcd import MEMBERS
    from kvops.fleet.start_plan import StartPlan

    out = Output(settings)
    group = _group(settings)
    members = etcd if etcd is not None else MEMBERS if masters > 1 else 0
    made = lab.up(
        state_dir(settings),
        group,
        StartPlan(stores=stores, masters=masters, etcd_members=members, segment_size_bytes=segment_size),
        timeout_s=settings.timeout_s(60.0),
        tell=lambda name, text: out.note(f"{name:<10} {text}"),
    )
    rows = [{"name": node.name, "netns": node.netns, "address": node.address} for node in made.nodes]
    out.header(f"{group} (lab)", f"{len(rows) - 1} nodes")
    out.rows("nodes", COLUMNS, rows, group=group)
    named = "" if group == "local" else f" -g {group}"
    out.line(
        f"break it: kvops{named} chaos run FILE --lab    on a node: ip netns exec {made.nodes[1].netns} COMMAND    "
        f"remove: kvops{named} chaos lab down"
    )
    return 0


@command.command("down")
@click.pass_obj
def down(settings: Settings) -> int:
    r"""
    Stop the group, remove its nodes, and forget both. Removing what is not there is a success.

    What a dead experiment left is taken back first. A lab whose namespaces have ended is forgotten.

    \b
    Example:
      kvops chaos lab down
    """
    from kvops.chaos import lab

    out = Output(settings)
    group = _group(settings)
    removed = lab.down(state_dir(settings), group, tell=lambda name, text: out.note(f"{name:<10} {text}"))
    out.document({"group": group, "removed": removed})
    out.header(f"{group} (lab)", f"{len(removed)} namespaces removed" if removed else "there was none")
    return 0
