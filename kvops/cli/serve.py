"""``kvops serve``: one master or store in the foreground, as units, containers and ``start`` run it."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from kvops.cli import options
from kvops.cli.options import ADDRESS, PATH, Settings


@options.command("serve")
@click.argument("role", type=click.Choice(["master", "store"]))
@click.option("--config", "config_file", type=PATH, required=True, metavar="F", help="Its YAML file.")
@click.option("--join", multiple=True, type=ADDRESS, help="Masters of a store, instead of the file's.")
@click.pass_obj
def command(settings: Settings, role: str, config_file: Path, join: tuple[str, ...]) -> int:
    r"""
    Run one master or store in the foreground until SIGTERM.

    It says when it is ready by sd_notify (systemd's Type=notify) and on /ready.

    \b
    Example:
      kvops serve master --config /etc/kvops/master-0.yaml
    """
    from kvops.store.config import MasterConfig, StoreConfig, load_yaml

    if role == "master":
        if join:
            raise click.UsageError("--join is for stores: a master does not join one")
        master = load_yaml(config_file, MasterConfig)
        from kvops.store.master import serve as serve_master

        return serve_master(master)
    config = load_yaml(config_file, StoreConfig)
    if join:
        config = msgspec.structs.replace(config, masters=list(join))
    from kvops.store.node import serve as serve_store

    return serve_store(config)
