"""The command as its users run it: a process with its own state, configuration and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

import kvops
from tests.waiting import WAIT_S

SOURCE = Path(kvops.__file__).parents[1]


class Run(Protocol):
    """Runs ``kvops`` with these arguments to its end."""

    def __call__(
        self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]: ...


def environment(folder: Path) -> dict[str, str]:
    """An environment in which nothing of this user's own groups and settings is seen."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVOPS_", "XDG_"))}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    return env | {
        "KVOPS_STATE_DIR": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), env.get("PYTHONPATH")))),
    }


def runner(base: dict[str, str]) -> Run:
    """Runs the command in this environment; its output is a pipe, as in scripts."""

    def run(
        *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "kvops", *args],
            input=stdin,
            capture_output=True,
            env=base | (env or {}),
            check=False,
            timeout=4 * WAIT_S,
        )
        out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return run


@pytest.fixture
def kvops_env(tmp_path: Path) -> dict[str, str]:
    """The environment of this test's commands."""
    return environment(tmp_path)


@pytest.fixture
def run(kvops_env: dict[str, str]) -> Run:
    """Run the command with state and settings of this test's own."""
    return runner(kvops_env)


@dataclass(frozen=True, slots=True)
class Started:
    """A running group: how to run commands on it, and where it lives."""

    run: Run
    folder: Path
    env: dict[str, str]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One master and two stores for a module's tests; each test leaves them healthy."""
    folder = tmp_path_factory.mktemp("group")
    env = environment(folder)
    run = runner(env)
    done = run("start", "--stores", "2", "--segment-size", "16MiB")
    try:
        assert done.returncode == 0, done.stderr
        yield Started(run, folder, env)
    finally:
        assert run("stop", "--now").returncode == 0
