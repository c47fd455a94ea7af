"""System calls that the kernel delays or fails for a tracer: it detaches by itself when the tracer ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvops.chaos import holder
from kvops.chaos.faults.common import must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, Here, Signal
from kvops.chaos.steps import KillHolder, RemovePath, UndoStep
from kvops.chaos.targets import Target
from kvops.fleet.process import ProcessIdentity
from kvops.host import Host

TRY_TIMEOUT_S = 5.0
RUN_DIR = Path("/dev/shm")  # noqa: S108 (a file with a token nobody can guess)


@cache
def missing() -> str | None:
    """Why nothing can be traced here."""
    if shutil.which("strace") is None:
        return "strace is not installed: apt install strace"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        scope = 0  # no Yama: the classic rules
    if scope >= 3 or (scope >= 1 and os.geteuid() != 0):
        return f"kernel.yama.ptrace_scope is {scope}: no process may be traced"
    argv = ["strace", "-qq", "-e", "trace=none", "-o", "/dev/null", "true"]
    tried = subprocess.run(argv, capture_output=True, timeout=TRY_TIMEOUT_S, check=False)
    return None if tried.returncode == 0 else "the kernel lets us trace nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What faults by strace share; the class says with ``expression`` what is done to which calls."""

    target: Target
    control: Target
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    conflicts: ClassVar[frozenset[str]] = frozenset({"disk.", "etcd.", "process."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("strace -e inject", missing())

    def unavailable(self, host: Host) -> str | None:
        return self.here().missing or not_here(host, self.target)

    def expression(self) -> str:
        """What strace(1) injects."""
        raise NotImplementedError

    @property
    def log_file(self) -> Path:
        """What strace writes: a line for each call it touched."""
        return RUN_DIR / f"{self.token}.log"

    def undo(self) -> list[UndoStep]:
        return [KillHolder(token=self.token), RemovePath(path=str(self.log_file))]

    def inject(self, host: Host) -> None:
        self.attach([one.pid for one in self.target.processes])

    def attach(self, pids: list[int]) -> None:
        """Trace these processes with all their threads."""
        expression = self.expression()
        calls = expression.partition(":")[0]
        argv = ["strace", "-f", "-qq", "-e", f"trace={calls}", "-e", f"inject={expression}"]
        argv += ["-o", str(self.log_file)]
        for pid in pids:
            argv += ["-p", str(pid)]
        settings = {"argv": argv, "pids": pids}
        holder.spawn("strace", settings, token=self.token, expires_s=self.expires_s)

    def traced(self, identities: tuple[ProcessIdentity, ...] = ()) -> Signal:
        """
        Every thread has a tracer, as the kernel sees it.

        Raises:
            FaultNotApplied: One has none.
        """
        tracers = set()
        for identity in identities or self.target.processes:
            for pid, tracer in _tracers(identity.pid):
                must(tracer != 0, f"thread {pid} of {self.target.name} has no tracer")
                tracers.add(tracer)
        must(tracers, f"{self.target.name} has ended")
        return Signal("TracerPid", f"every thread is traced by pid {', '.join(map(str, sorted(tracers)))}")


def _tracers(pid: int) -> Iterator[tuple[int, int]]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            text = (task / "status").read_text()
        except OSError:
            continue  # the thread ended
        yield int(task.name), int(text.partition("TracerPid:")[2].split()[0])
