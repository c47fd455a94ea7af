"""
Processes of this machine: who a pid really is, signals that cannot hit another, daemons that outlive their
starter.

A pid is reused; a pid with its start time and the machine's boot id is not. Signals go through a pidfd that
was opened *before* the identity was compared, so between the look and the signal nothing can take the pid's
place.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvops.errors import ConfigError, ParseError, Refused
from kvops.store.clock import boot_id

PROC: Final = Path("/proc")
_PF_EXITING: Final = 0x4
_ENDED_STATES: Final = "ZXx"  # zombie, dead: proc_pid_stat(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process for ever: no other has had or will have the same three values."""

    pid: int
    started_ticks: int  # /proc/<pid>/stat field 22, clock ticks since boot
    boot_id: str


def parse_stat(text: str) -> tuple[str, int]:
    """
    State letter and start time of a ``/proc/<pid>/stat`` line.

    The command's name stands in parentheses and may itself hold blanks and parentheses: fields are counted
    from the last one.

    Raises:
        ParseError: The text is no such line.
    """
    fields = text.rpartition(")")[2].split()
    # Field 3 is the first after the name, field 22 the start time.
    if len(fields) < 20 or not fields[19].isdigit():
        raise ParseError("not a /proc/<pid>/stat line", fix="mount /proc")
    return fields[0], int(fields[19])


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text(errors="replace"))
    except (OSError, ParseError):
        return None


def identify(pid: int) -> ProcessIdentity | None:
    """Who runs as ``pid`` now; None when nobody does, or when it has ended and only waits to be collected."""
    stat = _stat(pid)
    if stat is None or stat[0] in _ENDED_STATES:
        return None
    return ProcessIdentity(pid=pid, started_ticks=stat[1], boot_id=boot_id())


def is_running(identity: ProcessIdentity) -> bool:
    """Whether this very process runs (or is stopped): a zombie, a reused pid and a former boot's do not."""
    return identify(identity.pid) == identity


def is_stopped(identity: ProcessIdentity) -> bool:
    """Whether a signal or a debugger holds it: it answers nothing until SIGCONT."""
    stat = _stat(identity.pid)
    return stat is not None and stat[0] in "Tt" and is_running(identity)


def is_exiting(identity: ProcessIdentity) -> bool:
    """
    Whether it has begun to end and only the kernel still works for it, freeing its memory.

    Source: proc_pid_stat(5) field 9; PF_EXITING of the kernel's sched.h.
    """
    try:
        text = (PROC / str(identity.pid) / "stat").read_text(errors="replace")
        state, started_ticks = parse_stat(text)
        flags = int(text.rpartition(")")[2].split()[6])
    except (OSError, ParseError, ValueError):
        return False
    ours = started_ticks == identity.started_ticks and identity.boot_id == boot_id()
    return ours and (state in _ENDED_STATES or bool(flags & _PF_EXITING))


def _open_pidfd(identity: ProcessIdentity) -> int | None:
    """A pidfd of exactly this process (zombies included), or None."""
    if identity.boot_id != boot_id():
        return None
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    stat = _stat(identity.pid)
    if stat is None or stat[1] != identity.started_ticks:
        os.close(pidfd)
        return None
    return pidfd


def send_signal(identity: ProcessIdentity, signum: signal.Signals) -> bool:
    """
    Signal exactly this process.

    Returns:
        False when it does not run any more; nobody was signalled then.

    Raises:
        Refused: It runs as another user.
    """
    pidfd = _open_pidfd(identity)
    if pidfd is None or not is_running(identity):
        if pidfd is not None:
            os.close(pidfd)
        return False
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise Refused(
            f"process {identity.pid} belongs to another user", fix="run as the user who started the group"
        ) from error
    finally:
        os.close(pidfd)
    return True


def wait_ended(identities: Iterable[ProcessIdentity], *, timeout_s: float) -> list[ProcessIdentity]:
    """
    Wait until none of these processes runs any more; children of ours among them are collected.

    Returns:
        Those that still run when the time is over.
    """
    deadline = time.monotonic() + timeout_s
    waiting: dict[int, ProcessIdentity] = {}
    try:
        for identity in identities:
            pidfd = _open_pidfd(identity)
            if pidfd is not None:
                waiting[pidfd] = identity
        poll = select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)  # readable when the process has ended: pidfd_open(2)
        while waiting:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            ready = poll.poll(left_ms)
            if not ready and left_ms == 0:
                break
            for pidfd, _ in ready:
                collect(pidfd)
                poll.unregister(pidfd)
                del waiting[pidfd]
                os.close(pidfd)
        return list(waiting.values())
    finally:
        for pidfd in waiting:
            os.close(pidfd)


def collect(pidfd: int) -> int | None:
    """
    Collect an ended child.

    Returns:
        Its exit code, or minus the number of the signal that ended it; None while it runs, or when it is not
        our child.
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A daemon that was just started, and the pidfd to watch it by. Close the pidfd when done."""

    identity: ProcessIdentity
    pidfd: int


def spawn_detached(argv: Sequence[str], *, log_file: Path, env: Mapping[str, str]) -> Spawned:
    """
    Start a daemon in a session of its own: no terminal, no inherited descriptors, output appended to
    ``log_file``.

    Raises:
        ConfigError: The log file or the program cannot be opened.
    """
    try:
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write {log_file}: {error.strerror}", fix="make its folder writable"
        ) from error
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(env),
            cwd="/",  # a daemon must not keep a file system busy
            start_new_session=True,
            close_fds=True,
            umask=0o077,
        )
    except OSError as error:
        raise ConfigError(f"cannot run {argv[0]}: {error.strerror}", fix="reinstall kvops") from error
    finally:
        os.close(log)
    # A child cannot be collected by anybody else, so its pid cannot have been reused yet, even if it has
    # ended.
    pidfd = os.pidfd_open(process.pid)
    stat = _stat(process.pid)
    started_ticks = stat[1] if stat is not None else 0
    # It is meant to outlive us: Popen must neither warn about that nor wait for it.
    process.returncode = 0
    identity = ProcessIdentity(pid=process.pid, started_ticks=started_ticks, boot_id=boot_id())
    return Spawned(identity=identity, pidfd=pidfd)
