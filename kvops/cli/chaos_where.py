"""Where the ledgers of experiments lie."""

from __future__ import annotations

from pathlib import Path

from kvops.cli.context import load_configuration
from kvops.cli.options import Settings


def state_dir(settings: Settings) -> Path:
    """The state folder that was said, as an absolute path."""
    return Path(load_configuration(settings).state_dir.value).expanduser().absolute()
