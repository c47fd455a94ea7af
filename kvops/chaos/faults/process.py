"""Faults of whole processes: killed, stopped, restarted, starved of CPU."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

from kvops.chaos import holder
from kvops.chaos.faults.common import (
    control_is_well,
    expect,
    must,
    new_token,
    not_here,
    thread_states,
)
from kvops.chaos.model import (
    ALL_TRANSPORTS,
    EXPIRES_S_DEFAULT,
    Evidence,
    Here,
    Layer,
    Signal,
    Transport,
    fault,
)
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.procs import with_word
from kvops.chaos.steps import KillHolder, RemoveCgroup, SignalProcess, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.fleet.process import is_running, send_signal, wait_ended
from kvops.host import Host

END_TIMEOUT_S: Final = 5.0
TERM_GRACE_S: Final = 10.0
CPU_PERIOD_US: Final = 100_000  # of a quota: the kernel's default
ASKED_MAX: Final = 200  # requests that make a starved process use up its quota
CGROUP_ROOT: Final = Path("/sys/fs/cgroup")


def _continue(target: Target) -> list[UndoStep]:
    return [
        SignalProcess(pid=one.pid, started_ticks=one.started_ticks, boot_id=one.boot_id, signal="CONT")
        for one in target.processes
    ]


def _restart(target: Target) -> list[UndoStep]:
    return [target.restart] if target.restart is not None else []


def _cannot_restart(target: Target) -> str | None:
    return None if target.restart is not None else f"nobody knows how {target.name} is started again"


@fault("process.kill")
@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End all processes of a role at once, as the kernel does for want of memory: peers see resets, then refusals."""

    target: Target
    control: Target

    name: ClassVar[str]
    layer: ClassVar = Layer.PROCESS
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "a crash: connections are reset, memory is gone, the role comes back empty"
    does_not_certify: ClassVar[str] = (
        "a hang (process.pause), a lost host (net.partition): neither resets anything"
    )
    conflicts: ClassVar[frozenset[str]] = frozenset({"process."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("signals by pidfd")

    def unavailable(self, host: Host) -> str | None:
        return not_here(host, self.target) or _cannot_restart(self.target)

    def undo(self) -> list[UndoStep]:
        return _restart(self.target)

    def inject(self, host: Host) -> None:
        for identity in self.target.processes:
            send_signal(identity, signal.SIGKILL)
        left = wait_ended(self.target.processes, timeout_s=END_TIMEOUT_S)
        must(not left, f"{self.target.name} has not ended {END_TIMEOUT_S:g} s after SIGKILL", fix="see dmesg")

    def verify(self, host: Host) -> Evidence:
        alive = [one.pid for one in self.target.processes if is_running(one)]
        must(not alive, f"{self.target.name} runs: pid {alive}")
        again = [one.pid for one in self.target.now.processes if is_running(one)]
        must(not again, f"{self.target.name} was started again as pid {again}", fix="stop what restarts it")
        return Evidence(
            signals=(
                Signal("/proc", f"pid {self.target.leader.pid} is gone"),
                expect(
                    ask_target(self.target, from_netns=self.control.netns),
                    Ending.REFUSED,
                    Ending.UNREACHABLE,
                    target=self.target,
                ),
            ),
            control=control_is_well(self.control),
        )


@fault("process.pause")
@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """
    Stop all processes of a role with their sockets open: peers can connect, and then hear nothing.

    The kernel answers for it: TCP handshakes and keep-alives succeed, memory that others have mapped stays
    readable.
    """

    target: Target
    control: Target

    name: ClassVar[str]
    layer: ClassVar = Layer.PROCESS
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL, Transport.SSD})
    certifies: ClassVar[str] = (
        "a hang: a stalled VM, a debugger, a machine that swaps; only deadlines end a wait"
    )
    does_not_certify: ClassVar[str] = "reads that need no help of the process: shared memory, one-sided verbs"
    conflicts: ClassVar[frozenset[str]] = frozenset({"process."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("signals by pidfd")

    def unavailable(self, host: Host) -> str | None:
        return not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return _continue(self.target)

    def inject(self, host: Host) -> None:
        for identity in self.target.processes:
            send_signal(identity, signal.SIGSTOP)  # by pidfd: no race between look and signal

    def verify(self, host: Host) -> Evidence:
        states = {one.pid: thread_states(one) for one in self.target.processes}
        for pid, letters in states.items():
            must(letters, f"pid {pid} has ended")
            must(set(letters) == {"T"}, f"threads of pid {pid} are in states {letters}, not all T")
        seen = ask_target(self.target, from_netns=self.control.netns)
        # A full backlog of a process that accepts nothing drops handshakes: that is silence, too.
        return Evidence(
            signals=(
                Signal("/proc/<pid>/task/*/stat", f"state T of pid {', '.join(map(str, states))}"),
                expect(seen, Ending.CONNECTED, Ending.NO_CONNECTION, target=self.target),
            ),
            control=control_is_well(self.control),
        )


@fault("process.restart")
@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Ask a role to end, and start it again as it was: what an upgrade does to it."""

    target: Target
    control: Target

    name: ClassVar[str]
    layer: ClassVar = Layer.PROCESS
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = (
        "an orderly restart: SIGTERM is handled, the role comes back and is found again"
    )
    does_not_certify: ClassVar[str] = "a crash (process.kill)"
    conflicts: ClassVar[frozenset[str]] = frozenset({"process."})
    lasting: ClassVar[bool] = False

    @classmethod
    def here(cls) -> Here:
        return Here("signals by pidfd")

    def unavailable(self, host: Host) -> str | None:
        return not_here(host, self.target) or _cannot_restart(self.target)

    def undo(self) -> list[UndoStep]:
        return _restart(self.target)

    def inject(self, host: Host) -> None:
        for identity in self.target.processes:
            send_signal(identity, signal.SIGTERM)
        left = wait_ended(self.target.processes, timeout_s=TERM_GRACE_S)
        must(not left, f"{self.target.name} did not end {TERM_GRACE_S:g} s after SIGTERM")
        assert self.target.restart is not None  # unavailable() said so
        self.target.restart.act()

    def verify(self, host: Host) -> Evidence:
        now = self.target.now
        fresh = [one for one in now.processes if is_running(one) and one not in self.target.processes]
        must(fresh, f"{self.target.name} has no new process")
        must(
            not is_running(self.target.leader),
            f"{self.target.name} still runs as pid {self.target.leader.pid}",
        )
        return Evidence(
            signals=(
                Signal("/proc/<pid>/stat", f"pid {fresh[0].pid} instead of {self.target.leader.pid}"),
                expect(
                    ask_target(now, timeout_s=2.0, from_netns=self.control.netns), Ending.ANSWERED, target=now
                ),
            ),
            control=control_is_well(self.control),
        )


@fault("process.slow")
@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """
    Let a role have only a share of one CPU: most requests are as quick as ever, some stall.

    By the CPU quota of a control group (version 1 or 2); without one by stopping and continuing the role.
    """

    target: Target
    control: Target
    cpu_share: float = 0.05
    how: Literal["auto", "cgroup", "duty"] = "auto"
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.PROCESS
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL, Transport.SSD})
    certifies: ClassVar[str] = (
        "a slow node that passes its health checks: the tail suffers, the median does not"
    )
    does_not_certify: ClassVar[str] = "slow memory, slow disks, and reads that need no help of the process"
    conflicts: ClassVar[frozenset[str]] = frozenset({"process."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.01 <= self.cpu_share <= 0.9:
            raise ValueError(f"cpu_share {self.cpu_share:g} is not between 0.01 and 0.9")

    @property
    def backend(self) -> str:
        """``cgroup`` or ``duty``: what would be used here."""
        return "cgroup" if self.how != "duty" and self._cgroup() is not None else "duty"

    def _cgroup(self) -> tuple[Path, Path, int] | None:
        """A new group's path, the one the target is in, and the version; None where no quota can be set."""
        for line in self.target.cgroups.splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                here = CGROUP_ROOT / "cpu" / path.lstrip("/")
                return (here / self.token, here, 1) if _writable(here) else None
            if not controllers and "cpu" in _words(CGROUP_ROOT / "cgroup.subtree_control"):
                if not _writable(CGROUP_ROOT):
                    return None
                # Beside the root's others: a group that holds processes may have no limited children.
                return CGROUP_ROOT / self.token, CGROUP_ROOT / path.lstrip("/"), 2
        return None

    @classmethod
    def here(cls) -> Here:
        if (CGROUP_ROOT / "cpu").is_dir() and _writable(CGROUP_ROOT / "cpu"):
            return Here("CPU quota, control groups version 1")
        if "cpu" in _words(CGROUP_ROOT / "cgroup.subtree_control") and _writable(CGROUP_ROOT):
            return Here("CPU quota, control groups version 2")
        return Here("stop and continue in turn")

    def unavailable(self, host: Host) -> str | None:
        trouble = not_here(host, self.target)
        if trouble is None and self.how == "cgroup" and self._cgroup() is None:
            return "no CPU quota can be set here: not root, or the controller is not enabled"
        return trouble

    def undo(self) -> list[UndoStep]:
        if self.backend == "cgroup":
            found = self._cgroup()
            assert found is not None
            return [RemoveCgroup(path=str(found[0]), back=str(found[1]))]
        return [KillHolder(token=self.token), *_continue(self.target)]

    def inject(self, host: Host) -> None:
        if self.backend == "duty":
            processes = [dataclasses.asdict(one) for one in self.target.processes]
            settings = {"processes": processes, "share": self.cpu_share}
            holder.spawn("duty", settings, token=self.token, expires_s=self.expires_s)
            return
        found = self._cgroup()
        assert found is not None
        path, _, version = found
        path.mkdir()
        quota_us = int(CPU_PERIOD_US * self.cpu_share)
        if version == 1:
            (path / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_US))
            (path / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (path / "cpu.max").write_text(f"{quota_us} {CPU_PERIOD_US}")
        for identity in self.target.processes:
            if is_running(identity):
                (path / "cgroup.procs").write_text(str(identity.pid))

    def verify(self, host: Host) -> Evidence:
        must(is_running(self.target.leader), f"{self.target.name} has ended")
        stall_ms = (CPU_PERIOD_US / 1000) * (1 - self.cpu_share) / 2
        kernel = self._throttled() if self.backend == "cgroup" else self._stopped_share()
        before = next(kernel)
        slowest = 0.0
        deadline = time.monotonic() + 2.0
        for _ in range(ASKED_MAX):
            seen = ask_target(self.target, timeout_s=2.0, from_netns=self.control.netns)
            slowest = max(slowest, seen.total_ms)
            if (slowest >= stall_ms and next(kernel) > before) or time.monotonic() > deadline:
                break
        after = next(kernel)
        must(after > before, f"{self.target.name} was not held back while it was asked")
        must(slowest >= stall_ms, f"the slowest request took {slowest:.0f} ms, below {stall_ms:.0f} ms")
        return Evidence(
            signals=(
                Signal(
                    "nr_throttled" if self.backend == "cgroup" else "/proc/<pid>/stat", f"+{after - before}"
                ),
                Signal(f"requests to {self.target.name}", f"slowest {slowest:.0f} ms"),
            ),
            control=control_is_well(self.control),
        )

    def _throttled(self) -> Iterator[int]:
        found = self._cgroup()
        must(found is not None and found[0].exists(), f"{self.target.name} has no quota")
        assert found is not None
        while True:
            try:
                inside = str(self.target.leader.pid) in (found[0] / "cgroup.procs").read_text().split()
                must(inside, f"{self.target.name} is not in the group with the quota")
                stat = dict(line.split() for line in (found[0] / "cpu.stat").read_text().splitlines())
            except OSError as error:
                raise FaultNotApplied(f"the quota is gone: {error.strerror}", fix="see the ledger") from error
            yield int(stat["nr_throttled"])

    def _stopped_share(self) -> Iterator[int]:
        """How often the role was seen stopped; each call looks for one period."""
        must(list(with_word(self.token)), "the helper that stops and continues it is gone")
        count, pause = 0, threading.Event()
        yield count
        while True:
            for _ in range(10):
                count += "T" in thread_states(self.target.leader)
                pause.wait(holder.DUTY_PERIOD_S / 10)
            yield count


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
