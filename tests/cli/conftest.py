"""The command as its users run it: a process with its own state, configuration and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

import kvops

SOURCE = Path(kvops.__file__).parents[1]


class Run(Protocol):
    """Runs ``kvops`` with these arguments to its end."""

    def __call__(
        self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def kvops_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing of this user's own groups and settings is seen."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVOPS_", "XDG_"))}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    return env | {
        "KVOPS_STATE_DIR": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), env.get("PYTHONPATH")))),
    }


@pytest.fixture
def run(kvops_env: dict[str, str]) -> Run:
    """Run the command; its output is a pipe, as in scripts."""

    def run(
        *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "kvops", *args],
            input=stdin,
            capture_output=True,
            env=kvops_env | (env or {}),
            check=False,
            timeout=100,
        )
        return subprocess.CompletedProcess(
            done.args,
            done.returncode,
            done.stdout.decode("utf-8", "replace"),
            done.stderr.decode("utf-8", "replace"),
        )

    return run
