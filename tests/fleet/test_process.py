"""Who a pid is, and that nobody else is ever signalled."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.errors import ConfigError, ParseError
from kvops.fleet.process import (
    ProcessIdentity,
    collect,
    identify,
    is_exiting,
    is_running,
    is_stopped,
    parse_stat,
    send_signal,
    spawn_detached,
    wait_ended,
)
from kvops.store.clock import boot_id


@pytest.fixture
def sleeper() -> Iterator[tuple[subprocess.Popen[bytes], ProcessIdentity]]:
    """A child that would sleep for ten minutes."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        identity = identify(process.pid)
        assert identity is not None
        yield process, identity
        process.kill()


def test_signal_reaches_the_process(sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """The process that was meant is signalled, and it counts as ended even before it is collected."""
    process, identity = sleeper

    assert send_signal(identity, signal.SIGKILL)

    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert not is_running(identity)
    assert not send_signal(identity, signal.SIGKILL)


def test_what_is_ending_is_not_hung(sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """One that runs or is held is not ending; one that the kernel still has to clear away is, and nobody else is it."""
    process, identity = sleeper
    running = is_exiting(identity)
    send_signal(identity, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    held = is_exiting(identity)
    send_signal(identity, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert (running, held) == (False, False)
    assert is_exiting(identity)
    assert not is_exiting(dataclasses.replace(identity, started_ticks=identity.started_ticks - 1))


@pytest.mark.parametrize("field", ["started_ticks", "boot_id"])
def test_reused_pid(field: str, sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """A pid that somebody else has by now, or that was written down before a reboot, is never signalled."""
    process, identity = sleeper
    change = (
        {"started_ticks": identity.started_ticks - 1} if field == "started_ticks" else {"boot_id": "another"}
    )
    other = dataclasses.replace(identity, **change)  # type: ignore[arg-type]

    assert not is_running(other)
    assert not send_signal(other, signal.SIGKILL)
    assert wait_ended([other], timeout_s=60) == []  # at once: there is nothing to wait for
    assert process.poll() is None


def test_stopped_is_not_ended(sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """A process held by SIGSTOP runs still, and is known to be held."""
    process, identity = sleeper

    send_signal(identity, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

    assert is_running(identity)
    assert is_stopped(identity)


def test_wait_ended(sleeper: tuple[subprocess.Popen[bytes], ProcessIdentity]) -> None:
    """Waiting names who still runs when the time is over, and nobody once all have ended."""
    process, identity = sleeper

    assert wait_ended([identity], timeout_s=0) == [identity]

    process.kill()
    assert wait_ended([identity], timeout_s=60) == []


@pytest.mark.parametrize("name", ["cat", "a b", "a) R 1 (b", ")"])
def test_stat_line(name: str) -> None:
    """A command's name may hold blanks and parentheses without moving the fields after it."""
    fields = " ".join(str(number) for number in range(4, 22))

    assert parse_stat(f"77 ({name}) S {fields} 4711 23") == ("S", 4711)


@given(st.text(max_size=100))
def test_any_stat_line(text: str) -> None:
    """Whatever /proc says, it is read or refused."""
    try:
        parse_stat(text)
    except ParseError:
        pass


SHOW_ITSELF = """
import os, sys
print(os.getsid(0) == os.getpid(), os.getcwd(), sorted(os.listdir("/proc/self/fd")), oct(os.umask(0)))
print("to stderr", file=sys.stderr)
"""


def test_detached(tmp_path: Path) -> None:
    """A daemon has its own session, no descriptor of ours, a private umask, and writes to its log."""
    log = tmp_path / "log"
    inherited = os.dup(0)
    os.set_inheritable(inherited, True)

    spawned = spawn_detached([sys.executable, "-c", SHOW_ITSELF], log_file=log, env=dict(os.environ))

    os.close(inherited)
    os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED | os.WNOWAIT)
    assert collect(spawned.pidfd) == 0
    os.close(spawned.pidfd)
    said, error = log.read_text().splitlines()
    # Descriptor 3 is the listing itself.
    assert said == "True / ['0', '1', '2', '3'] 0o77"
    assert error == "to stderr"
    assert log.stat().st_mode & 0o777 == 0o600


def test_no_such_program(tmp_path: Path) -> None:
    """A program that is not there is one clear error."""
    with pytest.raises(ConfigError, match="cannot run /no/such"):
        spawn_detached(["/no/such"], log_file=tmp_path / "log", env={})


def test_boot_id() -> None:
    """The kernel names each boot."""
    assert len(boot_id()) == 36
