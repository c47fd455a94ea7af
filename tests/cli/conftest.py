"""The command as its users run it: a process with its own state, configuration and environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

import kvops
from tests.waiting import WAIT_S, until

SOURCE = Path(kvops.__file__).parents[1]


# Commands that look give up after two seconds: a promise to operators, which a busy machine need not keep here.
PATIENT = ("status", "events", "object")


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
        patient = args[:1] and args[0] in PATIENT and not {"--timeout", "--wait"} & set(args)
        done = subprocess.run(
            [sys.executable, "-m", "kvops", *args, *(("--timeout", "20s") if patient else ())],
            input=stdin,
            capture_output=True,
            env=base | (env or {}),
            check=False,
            timeout=4 * WAIT_S,
        )
        out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        return subprocess.CompletedProcess(done.args, done.returncode, out, err)

    return run


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The command that is called within this process takes signals for itself; the test run's own come back."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def stop_whatever_runs(run: Run, folder: Path) -> None:
    """End a group that a test which failed or was interrupted left."""
    if (folder / "state/groups/local/group.yaml").exists():
        run("stop", "--now")


@pytest.fixture
def kvops_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of this test's commands; however it ends, what it started ends with it."""
    env = environment(tmp_path)
    yield env
    stop_whatever_runs(runner(env), tmp_path)


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


def wait_prepared(run: Run) -> None:
    """Wait until all of the stores' memory may be used: they serve as soon as the first piece may."""

    def whole() -> bool:
        stores = json.loads(run("status", "-o", "json").stdout)["stores"]
        return all(one["populated_bytes"] == one["capacity_bytes"] > 0 for one in stores)

    until(whole, "all memory is prepared")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """One master and two stores for a module's tests; each test leaves them healthy."""
    folder = tmp_path_factory.mktemp("group")
    env = environment(folder)
    run = runner(env)
    done = run("start", "--stores", "2", "--segment-size", "16MiB")
    try:
        assert done.returncode == 0, done.stderr
        wait_prepared(run)
        yield Started(run, folder, env)
    finally:
        assert run("stop", "--now").returncode == 0
