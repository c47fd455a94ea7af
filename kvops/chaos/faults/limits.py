"""Faults of what a process may have: descriptors, locked memory, huge pages, memory at all."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from kvops.chaos import holder
from kvops.chaos.faults.common import control_is_well, must, new_token, not_here, not_root
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
from kvops.chaos.steps import KillHolder, RemoveCgroup, RestoreRlimit, UndoStep
from kvops.chaos.targets import Target
from kvops.fleet.process import ProcessIdentity, is_running
from kvops.host import Host

CAP_IPC_LOCK: Final = 14  # capability.h
TRIED_BYTES: Final = 1 << 20
HUGE_PAGE_BYTES_MAX: Final = 64 << 30  # more than that is nobody's spare
# Takes another's user and limit, then locks memory: what a registration would meet.
_LOCKER: Final = """
import ctypes, os, resource, sys
soft, hard, uid, size = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
if os.geteuid() == 0 and uid: os.setgroups([]); os.setgid(uid); os.setuid(uid)
libc = ctypes.CDLL(None, use_errno=True)
area = ctypes.create_string_buffer(size)
print(0 if libc.mlock(area, ctypes.c_size_t(size)) == 0 else ctypes.get_errno())
"""


def _restore(before: dict[str, tuple[int, int]], identity: ProcessIdentity, limit: str) -> RestoreRlimit:
    soft, hard = before[f"{identity.pid}"]
    return RestoreRlimit(
        pid=identity.pid,
        started_ticks=identity.started_ticks,
        boot_id=identity.boot_id,
        limit=limit,
        soft=soft,
        hard=hard,
    )


def _limits(target: Target, limit: int) -> dict[str, tuple[int, int]]:
    found = {}
    for one in target.processes:
        try:
            found[f"{one.pid}"] = resource.prlimit(one.pid, limit)
        except (OSError, ProcessLookupError):
            continue  # it ended, or is not ours: unavailable() says so
    return found


def _shown(pid: int, name: str) -> str:
    """The soft limit as /proc/<pid>/limits shows it."""
    try:
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith(name):
                return line.removeprefix(name).split()[0]
    except OSError:
        pass  # it ended
    return "unknown"


@fault("fd.exhaust")
@dataclass(frozen=True, slots=True, kw_only=True)
class FdExhaust:
    """Let a role open no further descriptor: connections are taken by the kernel and by nobody else."""

    target: Target
    control: Target
    spare: int = 0  # descriptors it may still open
    seen: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.PROCESS
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL, Transport.SSD})
    certifies: ClassVar[str] = (
        "a descriptor leak at its end: accept fails, the process neither spins nor dies"
    )
    does_not_certify: ClassVar[str] = "the machine's own limit (ENFILE)"
    conflicts: ClassVar[frozenset[str]] = frozenset({"fd.", "process."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.spare <= 1000:
            raise ValueError("spare must be 0 to 1000")
        if not self.seen:
            self.seen.update(_limits(self.target, resource.RLIMIT_NOFILE))

    @classmethod
    def here(cls) -> Here:
        return Here("prlimit")

    def unavailable(self, host: Host) -> str | None:
        trouble = not_here(host, self.target)
        if trouble is None and any(f"{one.pid}" not in self.seen for one in self.target.processes):
            return f"the limits of {self.target.name} may not be changed by this user"
        return trouble

    def undo(self) -> list[UndoStep]:
        steps: list[UndoStep] = [_restore(self.seen, one, "NOFILE") for one in self.target.processes]
        # A role that did not survive it is started again.
        return [*steps, self.target.restart] if self.target.restart is not None else steps

    def inject(self, host: Host) -> None:
        for one in self.target.processes:
            if is_running(one):
                highest = max((int(name) for name in os.listdir(f"/proc/{one.pid}/fd")), default=2)  # noqa: PTH208
                hard = self.seen[f"{one.pid}"][1]
                resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (highest + 1 + self.spare, hard))

    def verify(self, host: Host) -> Evidence:
        must(is_running(self.target.leader), f"{self.target.name} has ended")
        pid = self.target.leader.pid
        shown = _shown(pid, "Max open files")
        before = self.seen[f"{pid}"][0]
        must(shown.isdigit() and int(shown) != before, f"its limit is {shown}, as it was")
        seen = ask_target(self.target, from_netns=self.control.netns)
        wanted = (Ending.CONNECTED, Ending.RESET, Ending.NO_CONNECTION)
        must(seen.ending in wanted, f"a request was {seen}: it can still open descriptors")
        return Evidence(
            signals=(
                Signal(f"/proc/{pid}/limits", f"open files {before} → {shown}"),
                Signal(f"request to {self.target.name}", str(seen)),
            ),
            control=control_is_well(self.control),
        )


@fault("memory.memlock")
@dataclass(frozen=True, slots=True, kw_only=True)
class Memlock:
    """Let a role lock no more memory: registering memory with an HCA fails."""

    target: Target
    control: Target
    limit_kib: int = 64
    seen: dict[str, tuple[int, int]] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.MEMORY
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.VERBS, Transport.SHM})
    certifies: ClassVar[str] = "ulimit -l too small: registration fails, and says so"
    does_not_certify: ClassVar[str] = "roles with CAP_IPC_LOCK (root): no limit holds them"
    conflicts: ClassVar[frozenset[str]] = frozenset({"memory.memlock"})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.limit_kib < TRIED_BYTES >> 10:
            raise ValueError(f"limit_kib must be 0 to {(TRIED_BYTES >> 10) - 1}")
        if not self.seen:
            self.seen.update(_limits(self.target, resource.RLIMIT_MEMLOCK))

    @classmethod
    def here(cls) -> Here:
        return Here("prlimit")

    def unavailable(self, host: Host) -> str | None:
        trouble = not_here(host, self.target, askable=False)
        if trouble is not None:
            return trouble
        for one in self.target.processes:
            if f"{one.pid}" not in self.seen:
                return f"the limits of pid {one.pid} may not be changed by this user"
            if _capabilities(one.pid) >> CAP_IPC_LOCK & 1:
                return f"pid {one.pid} has CAP_IPC_LOCK: no limit holds it"
        return None

    def undo(self) -> list[UndoStep]:
        return [_restore(self.seen, one, "MEMLOCK") for one in self.target.processes]

    def inject(self, host: Host) -> None:
        for one in self.target.processes:
            hard = self.seen[f"{one.pid}"][1]
            resource.prlimit(one.pid, resource.RLIMIT_MEMLOCK, (self.limit_kib << 10, hard))

    def verify(self, host: Host) -> Evidence:
        must(is_running(self.target.leader), f"{self.target.name} has ended")
        pid = self.target.leader.pid
        shown = _shown(pid, "Max locked memory")
        must(shown == str(self.limit_kib << 10), f"its limit is {shown}")
        refused = _lock_as(pid)
        must(refused != 0, f"{TRIED_BYTES >> 20} MiB could be locked with its user and limit")
        well = _lock_as(self.control.leader.pid)
        must(well == 0, f"the control may not lock memory either: {os.strerror(well)}")
        return Evidence(
            signals=(
                Signal(f"/proc/{pid}/limits", f"locked memory {shown} B"),
                Signal("mlock with its user and limit", os.strerror(refused)),
            ),
            control=Signal(f"mlock with the user and limit of {self.control.name}", "done"),
        )


def _capabilities(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("CapEff:")[2].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return 0


def _lock_as(pid: int) -> int:
    """Lock memory with a process's user and limit; the errno, 0 when it could."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
    uid = Path(f"/proc/{pid}").stat().st_uid
    words = [str(one) for one in (soft, hard, uid, TRIED_BYTES)]
    result = subprocess.run(
        [sys.executable, "-I", "-c", _LOCKER, *words], capture_output=True, text=True, timeout=10, check=False
    )
    must(result.returncode == 0, f"memory could not be tried: {result.stderr.strip()[-200:]}")
    return int(result.stdout)


@fault("memory.hugepages")
@dataclass(frozen=True, slots=True, kw_only=True)
class HugePages:
    """Take all free huge pages of the machine: a store that starts now finds none."""

    target: Target
    control: Target
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.MEMORY
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "no huge pages are left: a starting store says so, or falls back"
    does_not_certify: ClassVar[str] = "stores that have theirs already; fragmentation"
    conflicts: ClassVar[frozenset[str]] = frozenset({"memory.hugepages"})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        free, _ = _huge_pages()
        return Here("MAP_HUGETLB ballast", None if free else "no huge page is free: sysctl vm.nr_hugepages=N")

    def unavailable(self, host: Host) -> str | None:
        free, page = _huge_pages()
        if free * page > HUGE_PAGE_BYTES_MAX:
            return f"{free} huge pages are free: more than a test should take"
        return self.here().missing or not_here(host, self.target, askable=False)

    def undo(self) -> list[UndoStep]:
        return [KillHolder(token=self.token)]

    def inject(self, host: Host) -> None:
        free, page = _huge_pages()
        settings = {"pages": free, "page_bytes": page}
        holder.spawn("hugepages", settings, token=self.token, expires_s=self.expires_s)

    def verify(self, host: Host) -> Evidence:
        must(list(with_word(self.token)), "nobody holds them any more")
        free, page = _huge_pages()
        must(free == 0, f"{free} huge pages are free")
        said = ""
        try:
            mmap.mmap(-1, page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000).close()  # MAP_HUGETLB
        except OSError as error:
            said = error.strerror or str(error)
        must(said, "a huge page could be mapped")
        with contextlib.closing(mmap.mmap(-1, page)) as plain:
            plain[0] = 1
        return Evidence(
            signals=(Signal("/proc/meminfo", "HugePages_Free 0"), Signal("mapping one", said)),
            control=Signal("mapping ordinary pages", "done"),
        )


def _huge_pages() -> tuple[int, int]:
    """Free huge pages of the default size, and that size."""
    words = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("Huge")
    )
    free = int(words.get("HugePages_Free", "0"))
    return free, int(words.get("Hugepagesize", "2048 kB").split()[0]) << 10


GROW_TIMEOUT_S: Final = 1.0
CGROUP_MEMORY: Final = Path("/sys/fs/cgroup/memory")


@fault("memory.pressure")
@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """
    Leave a role little memory to grow into: when it has taken that, it waits, and is not ended.

    By a control group of version 1, whose limit holds what is taken from then on; version 2 is not done.
    """

    target: Target
    control: Target
    headroom_mib: int = 16
    token: str = field(default_factory=new_token)

    name: ClassVar[str]
    layer: ClassVar = Layer.MEMORY
    transports: ClassVar[frozenset[Transport]] = ALL_TRANSPORTS
    certifies: ClassVar[str] = "memory runs out while a role grows: it stalls, as a machine that swaps"
    does_not_certify: ClassVar[str] = "the kernel ending it (process.kill), pressure on the whole machine"
    conflicts: ClassVar[frozenset[str]] = frozenset({"memory.pressure", "process.slow"})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 4 <= self.headroom_mib <= 1 << 20:
            raise ValueError("headroom_mib must be 4 to 1048576")

    @classmethod
    def here(cls) -> Here:
        if not (CGROUP_MEMORY / "memory.limit_in_bytes").exists():
            return Here("control group version 1", "the memory controller of version 1 is not mounted")
        return Here("control group version 1", not_root("a memory limit"))

    @property
    def _group(self) -> tuple[Path, Path]:
        for line in self.target.cgroups.splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                here = CGROUP_MEMORY / path.lstrip("/")
                return here / self.token, here
        return CGROUP_MEMORY / self.token, CGROUP_MEMORY

    def unavailable(self, host: Host) -> str | None:
        return self.here().missing or not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        group, back = self._group
        steps: list[UndoStep] = [RemoveCgroup(path=str(group), back=str(back))]
        return [*steps, self.target.restart] if self.target.restart is not None else steps

    def inject(self, host: Host) -> None:
        group, _ = self._group
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(self.headroom_mib << 20))
        (group / "memory.oom_control").write_text("1")  # wait rather than be ended
        for one in self.target.processes:
            if is_running(one):
                (group / "cgroup.procs").write_text(str(one.pid))

    def verify(self, host: Host) -> Evidence:
        group, _ = self._group
        must(group.exists(), f"{self.target.name} has no limit")
        inside = (group / "cgroup.procs").read_text().split()
        must(str(self.target.leader.pid) in inside, f"{self.target.name} is not in the group with the limit")
        limit = int((group / "memory.limit_in_bytes").read_text())
        must(limit == self.headroom_mib << 20, f"its limit is {limit} B")
        inside_it, under_oom = _grow_in(group, limit)
        must(not inside_it, f"{limit} B could be taken in its group")
        must(under_oom, "the kernel does not say that its group is out of memory")
        outside_it, _ = _grow_in(None, limit)
        must(outside_it, "as much could not be taken outside it either")
        return Evidence(
            signals=(
                Signal("memory.oom_control", "under_oom 1 while a process of ours takes the rest"),
                Signal("taking memory in its group", f"waits, and does not end in {GROW_TIMEOUT_S:g} s"),
            ),
            control=Signal("taking as much outside it", "done"),
        )


_GROWER: Final = """
import os, sys
if sys.argv[1]: open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
area = bytearray(int(sys.argv[2]))
for at in range(0, len(area), 4096): area[at] = 1
"""


def _grow_in(group: Path | None, size: int) -> tuple[bool, bool]:
    """Take memory, in a group or outside; whether that was done, and whether the group was out of memory meanwhile."""
    words = [str(group) if group is not None else "", str(size)]
    process = subprocess.Popen([sys.executable, "-I", "-c", _GROWER, *words], stdin=subprocess.DEVNULL)
    try:
        return process.wait(GROW_TIMEOUT_S if group is not None else 20.0) == 0, False
    except subprocess.TimeoutExpired:
        text = (group / "memory.oom_control").read_text() if group is not None else ""
        return False, "under_oom 1" in text
    finally:
        process.kill()
        process.wait()
