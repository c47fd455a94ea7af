"""How the program of a role is run."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvops.fleet import etcd

Command = Callable[[str, Path], Sequence[str]]
"""The argv that runs a role with a configuration file: the seam between a group and its programs."""


def serve_command(role: str, config_file: Path) -> list[str]:
    """Run the role by this interpreter; ``-P`` keeps the working directory out of the import path."""
    if role == "etcd":
        return [etcd.program(), "--config-file", str(config_file)]
    return [sys.executable, "-P", "-m", "kvops", "serve", role, "--config", str(config_file)]


def daemon_environment() -> dict[str, str]:
    """Our environment, without what belongs to our own supervisor, and with this very kvops importable."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("NOTIFY_SOCKET", "WATCHDOG_USEC")
    }
    package_root = str(Path(__file__).resolve().parents[2])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    if package_root not in installed:  # a source tree
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH", ""))))
    return env
