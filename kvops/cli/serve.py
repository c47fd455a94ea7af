"""``kvops serve``: one master or store in the foreground, as units, containers and ``start`` run it."""

from __future__ import annotations

import sys
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
    _spare_rich()
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


def _spare_rich() -> None:
    """
    Load structlog without rich, which it imports for coloured tracebacks that a daemon's JSON lines never show.

    With what rich itself loads it is a third of a store's time from exec to its first allocatable memory.
    """
    if "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # importing it fails now: the import system's reference
    try:
        import structlog  # noqa: F401 (loaded for good)
    finally:
        del sys.modules["rich"]
