"""Faults of clocks, by a shared object in front of the C library's."""

from __future__ import annotations

import email.utils
import os
import shutil
import signal
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from kvops.chaos.faults.common import control_is_well, must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.steps import EndMarked, RemovePath, RestartRole, StartProcess, UndoStep
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.fleet.process import send_signal, wait_ended
from kvops.host import Host

RUN_DIR: Final = Path("/dev/shm")  # noqa: S108 (files with a token nobody can guess, made exclusively)
COMPILE_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 5.0
SLACK_S: Final = 3.0  # a Date header is whole seconds, asked for over a busy network
CONTROL: Final = struct.Struct("<qq")  # offset, end on CLOCK_MONOTONIC: both ns

# Skews the wall clock alone: CLOCK_MONOTONIC and CLOCK_BOOTTIME stay true, so that sleeps and leases do.
SOURCE: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
static volatile int64_t *control;
__attribute__((constructor)) static void start(void) {
  int fd = open(CONTROL_FILE, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  void *at = mmap(0, 16, PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (at != MAP_FAILED) control = at;
}
static int64_t skew(void) {
  struct timespec now;
  if (!control) return 0;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec < control[1] ? control[0] : 0;
}
int clock_gettime(clockid_t id, struct timespec *out) {
  int said = (int)syscall(SYS_clock_gettime, id, out);
  if (said == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
    int64_t ns = out->tv_sec * 1000000000LL + out->tv_nsec + skew();
    out->tv_sec = ns / 1000000000LL;
    out->tv_nsec = ns % 1000000000LL;
  }
  return said;
}
time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""


@fault("clock.skew")
@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """
    Let a role see another wall clock, from its restart on; its monotonic clocks stay true.

    The shim looks at the time itself: past its expiry it tells the truth, whoever is left.
    """

    target: Target
    control: Target
    skew_s: float = 20.0  # a member refuses to join when its clock is 30 s off
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.CLOCK
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL})
    certifies: ClassVar[str] = "a host whose wall clock is off: leases and deadlines do not follow it"
    does_not_certify: ClassVar[str] = (
        "programs that do not ask the C library (Go: etcd); a step while it runs"
    )
    conflicts: ClassVar[frozenset[str]] = frozenset({"clock.", "process."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 10 <= abs(self.skew_s) <= 10 * 365 * 86400:
            raise ValueError("skew_s must be 10 s or more, either way, and below ten years")

    @classmethod
    def here(cls) -> Here:
        found = shutil.which("cc")
        return Here("LD_PRELOAD shim", None if found else "no C compiler: apt install gcc libc6-dev")

    @property
    def library(self) -> Path:
        """The shim."""
        return RUN_DIR / f"{self.token}.so"

    @property
    def control_file(self) -> Path:
        """Offset and expiry."""
        return RUN_DIR / f"{self.token}.clock"

    def unavailable(self, host: Host) -> str | None:
        trouble = self.here().missing or not_here(host, self.target)
        if trouble is None and self.target.restart is None:
            return f"nobody knows how {self.target.name} is started again"
        if trouble is None and self.target.role == "etcd":
            return f"{self.target.name} is a Go program: it does not ask the C library"
        return trouble

    def undo(self) -> list[UndoStep]:
        steps: list[UndoStep] = [
            EndMarked(token=self.token),
            RemovePath(path=str(self.library)),
            RemovePath(path=str(self.control_file)),
        ]
        return [*steps, self.target.restart] if self.target.restart is not None else steps

    def inject(self, host: Host) -> None:
        until_ns = time.monotonic_ns() + int(self.expires_s * 1e9)
        handle = os.open(self.control_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.write(handle, CONTROL.pack(int(self.skew_s * 1e9), until_ns))
        os.close(handle)
        define = f'-DCONTROL_FILE="{self.control_file}"'
        result = subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", define, "-x", "c", "-", "-o", str(self.library)],
            input=SOURCE,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        must(result.returncode == 0, f"the shim cannot be compiled: {result.stderr.strip()[-300:]}")
        for one in self.target.processes:
            send_signal(one, signal.SIGTERM)
        left = wait_ended(self.target.processes, timeout_s=END_TIMEOUT_S)
        for one in left:
            send_signal(one, signal.SIGKILL)
        wait_ended(left, timeout_s=END_TIMEOUT_S)
        self._start()

    def _start(self) -> None:
        restart = self.target.restart
        if isinstance(restart, StartProcess):
            shimmed = {**restart.env, "LD_PRELOAD": str(self.library)}
            msgspec.structs.replace(restart, env=shimmed).act()
            return
        assert isinstance(restart, RestartRole)  # unavailable() said so
        restart.act(more_env={"LD_PRELOAD": str(self.library)})

    def verify(self, host: Host) -> Evidence:
        now = self.target.now
        maps = Path(f"/proc/{now.leader.pid}/maps")
        try:
            loaded = self.token in maps.read_text()
        except OSError:
            loaded = False
        must(loaded, f"{self.target.name} has not loaded the shim")
        off = _clock_of(now, self.control)
        must(abs(off - self.skew_s) <= SLACK_S, f"its clock is off by {off:.0f} s, not {self.skew_s:g}")
        true = _clock_of(self.control, self.control)
        must(abs(true) <= SLACK_S, f"the control's clock is off by {true:.0f} s, too")
        control_is_well(self.control)
        return Evidence(
            signals=(
                Signal(str(maps), "the shim is loaded"),
                Signal(f"Date of {self.target.name}", f"off by {off:+.0f} s"),
            ),
            control=Signal(f"Date of {self.control.name}", f"off by {true:+.0f} s"),
        )


def _clock_of(target: Target, control: Target) -> float:
    """How far a role's wall clock is off ours, s, by the Date of its answer."""
    seen = ask_target(target, timeout_s=2.0, from_netns=control.netns)
    must(seen.ending is Ending.ANSWERED, f"a request to {target.name} was {seen}")
    for line in seen.answer.partition(b"\r\n\r\n")[0].split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name.lower() == b"date":
            return email.utils.parsedate_to_datetime(value.decode("ascii")).timestamp() - time.time()
    raise FaultNotApplied(f"{target.name} does not say what time it has", fix="see kvops chaos doctor")
