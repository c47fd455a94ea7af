"""Faults of disks, as a process or a file system meets them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from kvops.chaos import holder, tracing
from kvops.chaos.faults.common import must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.steps import KillHolder, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.host import Host

BALLAST_BYTES_MAX: Final = 4 << 30  # more free space than that is not filled: use a file system of its own
WRITTEN_BYTES: Final = 1 << 16  # by the proof
ON_DISK: Final = frozenset({Transport.SSD})


@fault("disk.full")
@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Fill the file system that a role's files are on, with a file that has no name: gone with who holds it."""

    target: Target
    control: Target
    folder: str = ""  # the role's own by default
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.DISK
    transports: ClassVar[frozenset[Transport]] = ON_DISK
    certifies: ClassVar[str] = "no space left: journals and snapshots fail, lookups do not"
    does_not_certify: ClassVar[str] = "no inodes left, quotas"
    conflicts: ClassVar[frozenset[str]] = frozenset({"disk."})
    lasting: ClassVar[bool] = True

    @classmethod
    def here(cls) -> Here:
        return Here("O_TMPFILE ballast")

    @property
    def path(self) -> Path:
        """Where the ballast goes."""
        return Path(self.folder or self.target.state_dir or "/nonexistent")

    def unavailable(self, host: Host) -> str | None:
        trouble = not_here(host, self.target, askable=False)
        if trouble is not None:
            return trouble
        if not self.path.is_dir():
            return f"{self.path} is no folder"
        device = self.path.stat().st_dev
        for shared in (Path("/"), Path(tempfile.gettempdir()), Path("/dev/shm")):  # noqa: S108
            if shared.exists() and shared.stat().st_dev == device:
                return f"{self.path} shares the file system of {shared}: filling it would hit everybody"
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        if free > BALLAST_BYTES_MAX:
            return f"{free >> 20} MiB are free on {self.path}, more than {BALLAST_BYTES_MAX >> 20} are not filled"
        try:
            os.close(os.open(self.path, os.O_TMPFILE | os.O_WRONLY, 0o600))
        except OSError as error:
            return f"{self.path} takes no file without a name: {error.strerror}"
        return None

    def undo(self) -> list[UndoStep]:
        return [KillHolder(token=self.token)]

    def inject(self, host: Host) -> None:
        settings = {"folder": str(self.path), "leave_bytes": 0, "bytes_max": BALLAST_BYTES_MAX}
        holder.spawn("ballast", settings, token=self.token, expires_s=self.expires_s)

    def verify(self, host: Host) -> Evidence:
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        must(free < WRITTEN_BYTES, f"{free} B are free on {self.path}")
        try:
            _write(self.path)
            raise FaultNotApplied(f"a write to {self.path} was done", fix="see kvops chaos doctor")
        except OSError as error:
            said = error.strerror or ""
        elsewhere = Path(tempfile.gettempdir())
        try:
            _write(elsewhere)
        except OSError as error:
            raise FaultNotApplied(
                f"{elsewhere} is full as well: {error.strerror}", fix="free some space"
            ) from error
        return Evidence(
            signals=(Signal("statvfs", f"{free} B free"), Signal(f"a write to {self.path}", said)),
            control=Signal(f"a write to {elsewhere}", "done"),
        )


def _write(folder: Path) -> None:
    handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(handle, 0, WRITTEN_BYTES)
    finally:
        os.close(handle)


# Syncs a file of its own again and again; says after each how it went and how long it took.
_SYNCER: Final = """
import os, sys, time
handle = os.open(sys.argv[1], os.O_TMPFILE | os.O_WRONLY, 0o600)
while True:
    began = time.monotonic()
    try:
        os.pwrite(handle, b"x", 0); os.fsync(handle); said = "ok"
    except OSError as error:
        said = str(error.errno)
    print(said, round((time.monotonic() - began) * 1000), flush=True)
    if not sys.stdin.readline(): break
"""


class Syncer:
    """A process that syncs a file when it is asked to."""

    def __init__(self, token: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SYNCER, tempfile.gettempdir(), token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.last()  # its first one, untroubled

    def last(self) -> tuple[str, float]:
        """How the sync that was asked for went, and its ms."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        return (words[0], float(words[1])) if len(words) == 2 else ("ended", 0.0)

    def sync(self) -> tuple[str, float]:
        """Ask for one."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write("\n")
        return self.last()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Synced(tracing.Traced):
    """What faults of syncs share: a process of ours under the same tracer shows what the role meets."""

    seen: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    layer: ClassVar = Layer.DISK
    transports: ClassVar[frozenset[Transport]] = ON_DISK

    @contextlib.contextmanager
    def _watched(self) -> Iterator[tuple[Syncer, Syncer]]:
        """A sync under the tracer, and one outside it."""
        found = self.seen.get("syncer")
        if found is None:
            raise FaultNotApplied("no process was put under the tracer with it", fix="see kvops chaos doctor")
        if found.process.poll() is not None:
            found.close()
            raise FaultNotApplied("the process under the same tracer has ended", fix="was it undone?")
        outside = Syncer()
        try:
            yield found, outside
        finally:
            outside.close()

    def inject(self, host: Host) -> None:
        syncer = self.seen["syncer"] = Syncer(self.token)
        self.attach([*(one.pid for one in self.target.processes), syncer.process.pid])


@fault("disk.slow")
@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(_Synced):
    """Delay every sync of a role's files, by the kernel, when its call begins."""

    delay_ms: float = 200.0

    name: ClassVar[str]
    certifies: ClassVar[str] = "a slow disk: a stalled journal delays no lookup"
    does_not_certify: ClassVar[str] = (
        "slow reads, and writes that nobody waits for; the tracer slows other calls, too"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.delay_ms <= 5_000:
            raise ValueError("delay_ms must be 1 to 5000")

    def expression(self) -> str:
        return f"fsync,fdatasync,msync,sync_file_range:delay_enter={round(self.delay_ms * 1000)}"

    def verify(self, host: Host) -> Evidence:
        with self._watched() as (inside, outside):
            traced = self.traced()
            said, took = inside.sync()
            _, quick = outside.sync()
        must(
            said == "ok" and took >= 0.9 * self.delay_ms,
            f"a sync under the tracer took {took:.0f} ms ({said})",
        )
        must(quick < 0.9 * self.delay_ms, f"a sync outside took {quick:.0f} ms: the disk itself is slow")
        return Evidence(
            signals=(traced, Signal("a sync under the same tracer", f"{took:.0f} ms")),
            control=Signal("a sync outside it", f"{quick:.0f} ms"),
        )


@fault("disk.eio")
@dataclass(frozen=True, slots=True, kw_only=True)
class Eio(_Synced):
    """Let every sync of a role's files fail with EIO."""

    name: ClassVar[str]
    certifies: ClassVar[str] = "a disk that gives up: nothing is acknowledged that is not safe"
    does_not_certify: ClassVar[str] = "failing reads; a file system that becomes read-only"

    def undo(self) -> list[UndoStep]:
        steps = tracing.Traced.undo(self)
        # A role may rightly end itself on a disk that fails.
        return [*steps, self.target.restart] if self.target.restart is not None else steps

    def expression(self) -> str:
        return "fsync,fdatasync:error=EIO"

    def verify(self, host: Host) -> Evidence:
        with self._watched() as (inside, outside):
            traced = self.traced()
            said, _ = inside.sync()
            well, _ = outside.sync()
        must(said == "5", f"a sync under the tracer was {said}, not EIO")
        must(well == "ok", f"a sync outside it was {well}: the disk itself fails")
        return Evidence(
            signals=(traced, Signal("a sync under the same tracer", "EIO")),
            control=Signal("a sync outside it", "ok"),
        )
