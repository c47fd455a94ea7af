"""How members of a group on this machine are started."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvops.errors import StartFailed, Unreachable
from kvops.files import load_yaml, write_yaml
from kvops.fleet.group_folder import GroupFolder
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.process import Spawned, collect, spawn_detached
from kvops.fleet.programs import Command, daemon_environment
from kvops.limits import MIB
from kvops.notify import Notice, Receiver
from kvops.signals import signals_held
from kvops.timestamps import utc_now

LOG_BYTES_MAX: Final = 64 * MIB  # a longer log is set aside at the next start
LOG_TAIL_LINES: Final = 12  # shown when a member ends while starting
LOG_TAIL_BYTES: Final = 8192

Tell = Callable[[str, str], None]
"""Takes a member's name and what just happened to it, for people to read."""


@dataclass(slots=True)
class _Starting:
    """A process on its way to ready."""

    member: Member
    spawned: Spawned
    log_offset: int
    began_s: float = field(default_factory=time.monotonic)


class BringUp:
    """
    Starts members, wave by wave, until a deadline. The group's lock is held meanwhile.

    Args:
        folder: The group's.
        command: How a role is run.
        deadline: Of all waves together, in seconds of ``time.monotonic()``.
        tell: Told of each step.
    """

    def __init__(self, folder: GroupFolder, *, command: Command, deadline: float, tell: Tell) -> None:
        self._folder = folder
        self._command = command
        self._deadline = deadline
        self._tell = tell

    def start(self, state: GroupState, names: Sequence[str]) -> GroupState:
        """
        Start members at once and wait until all are ready; writes down each step.

        Raises:
            StartFailed: One ended.
            Unreachable: One was not ready in time.
        """
        with ExitStack() as cleanup:
            receiver = cleanup.enter_context(Receiver(self._folder.runtime_dir()))
            env = daemon_environment() | {"NOTIFY_SOCKET": str(receiver.path)}
            starting: dict[int, _Starting] = {}  # by pidfd
            for name in names:
                member = state.member(name)
                self._folder.forget_seen(name)
                log_file = self._folder.log_file(name)
                offset = _set_aside(log_file)
                # A process that runs but is not written down would be lost: the two are one step.
                with signals_held():
                    spawned = spawn_detached(
                        self._command(member.role, self._folder.config_file(name)),
                        log_file=log_file,
                        env=env,
                    )
                    cleanup.callback(os.close, spawned.pidfd)
                    member = msgspec.structs.replace(
                        member,
                        pid=spawned.identity.pid,
                        started_ticks=spawned.identity.started_ticks,
                        boot_id=spawned.identity.boot_id,
                        started=utc_now(),
                        ready=False,
                        addresses={},
                    )
                    state = state.with_member(member)
                    self._folder.write(state)
                starting[spawned.pidfd] = _Starting(member=member, spawned=spawned, log_offset=offset)
                self._tell(name, f"starting (pid {spawned.identity.pid})")
            return self._wait_ready(state, starting, receiver)

    def _wait_ready(
        self, state: GroupState, starting: dict[int, _Starting], receiver: Receiver
    ) -> GroupState:
        by_pid = {one.spawned.identity.pid: one for one in starting.values()}
        waiting = set(by_pid)
        poll = select.poll()
        poll.register(receiver.fileno(), select.POLLIN)
        for pidfd in starting:
            poll.register(pidfd, select.POLLIN)
        while waiting:
            left_ms = max(0.0, self._deadline - time.monotonic()) * 1000
            ready = [handle for handle, _ in poll.poll(left_ms)]
            # What a process said before it ended counts first: read all messages before looking at ends.
            while (notice := receiver.receive()) is not None:
                one = by_pid.get(notice.pid)
                if one is None or notice.pid not in waiting:
                    continue  # a former start's straggler
                if notice.ready:
                    waiting.discard(notice.pid)
                    state = self._note_ready(state, one, notice)
                    self._tell(one.member.name, f"ready in {time.monotonic() - one.began_s:.1f} s")
                elif notice.status:
                    self._tell(one.member.name, notice.status)
            for handle in ready:
                if handle in starting:
                    raise self._ended_while_starting(starting[handle], collect(handle))
            if not ready and left_ms == 0:
                late = [one for pid, one in by_pid.items() if pid in waiting]
                names = ", ".join(one.member.name for one in late)
                raise Unreachable(
                    f"{names} {'was' if len(late) == 1 else 'were'} not ready in time",
                    fix=f"see {self._folder.kvops} logs {late[0].member.name}, or allow more with --timeout",
                )
        return state

    def _note_ready(self, state: GroupState, one: _Starting, notice: Notice) -> GroupState:
        member = msgspec.structs.replace(
            state.member(one.member.name), ready=True, addresses=notice.addresses
        )
        if member.role == "master" and not member.addresses.get("listen"):
            raise StartFailed(
                f"{member.name} did not say where it listens",
                fix=f"see {self._folder.kvops} logs {member.name}",
                log_lines=_tail(self._folder.log_file(member.name), one.log_offset),
            )
        state = state.with_member(member)
        self._folder.write(state)
        if member.role == "master":
            self._pin_addresses(member)
        return state

    def _pin_addresses(self, member: Member) -> None:
        """A restarted master comes back where its stores and clients look for it."""
        from kvops.store.config import MasterConfig

        path = self._folder.config_file(member.name)
        config = load_yaml(path, MasterConfig)
        given = {
            name: member.addresses[name] for name in ("listen", "control", "http") if name in member.addresses
        }
        write_yaml(path, msgspec.structs.replace(config, **given))

    def _ended_while_starting(self, one: _Starting, code: int | None) -> StartFailed:
        name = one.member.name
        if code is not None and code < 0:
            how = f"by {signal.Signals(-code).name}"
        else:
            how = f"with exit code {code}" if code is not None else "at once"
        fix = f"its last log lines say why; all of it: {self._folder.kvops} logs {name}"
        if code == -signal.SIGKILL:
            fix = (
                "if nobody killed it, the kernel did for want of memory (dmesg): use a smaller --segment-size"
            )
        return StartFailed(
            f"{name} ended {how} while starting",
            fix=fix,
            log_lines=_tail(self._folder.log_file(name), one.log_offset),
            # Its own code tells more than "no", unless it makes no sense for a start that failed.
            exit_code=code if code in (2, 3, 5, 70) else 1,
        )


def _set_aside(log_file: Path) -> int:
    """Keep a long log as ``.1``; returns where the next run's lines begin."""
    try:
        size = log_file.stat().st_size
        if size > LOG_BYTES_MAX:
            log_file.replace(log_file.with_suffix(".log.1"))
            return 0
    except OSError:
        return 0
    return size


def _tail(log_file: Path, offset: int) -> list[str]:
    """The last lines written since ``offset``."""
    try:
        with log_file.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-LOG_TAIL_LINES:]
