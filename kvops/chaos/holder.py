"""
Helper processes that hold a fault: found by their token, ended by their own clock at the latest.

What a helper holds, the kernel gives back when it ends (a ballast file without a name, mapped memory). Where its
end alone does not undo the fault (a process it has stopped), the undo list says what does.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvops.chaos.steps import package_root
from kvops.errors import FaultNotApplied
from kvops.fleet.process import ProcessIdentity, send_signal
from kvops.store.clock import boot_ms

READY: Final = b"ready"
START_TIMEOUT_S: Final = 20.0
DUTY_PERIOD_S: Final = 0.1
ATTACH_TIMEOUT_S: Final = 10.0
BALLAST_CHUNK_BYTES: Final = 64 << 20
Ready = Callable[[], None]


def spawn(kind: str, settings: Mapping[str, Any], *, token: str, expires_s: float, enter: int = 0) -> None:
    """
    Start a helper and return when it holds; it is nobody's child.

    Args:
        kind: One of ``KINDS``.
        settings: What it needs, as JSON can say it.
        token: By which the undo step finds it.
        expires_s: After which it ends by itself.
        enter: Inode of the network namespace to run in; 0: ours.

    Raises:
        FaultNotApplied: It could not hold what it should; its words say why.
    """
    from kvops.chaos import netns

    prefix: list[str] = []
    handle = None
    if enter and enter != netns.inode_of():
        handle = netns.open_netns(enter)
        if handle is None:
            raise FaultNotApplied(f"network namespace {enter} has ended", fix="start the target again")
        prefix = ["nsenter", f"--net=/proc/self/fd/{handle}"]
    read_end, write_end = os.pipe()
    until = boot_ms() + int(expires_s * 1000)
    argv = [sys.executable, "-P", "-m", "kvops.chaos.holder", token, str(until), str(write_end), kind]
    try:
        process = subprocess.Popen(
            [*prefix, *argv, json.dumps(dict(settings))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=(write_end,) if handle is None else (write_end, handle),
            env={**os.environ, "PYTHONPATH": package_root()},
        )
        os.close(write_end)
        write_end = -1
        said = b""
        if select.select([read_end], [], [], START_TIMEOUT_S)[0]:
            said = os.read(read_end, 4096)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # the middleman; the helper itself is nobody's child
        if said != READY:
            reason = said.decode("utf-8", "replace") or "it ended, or said nothing in time"
            raise FaultNotApplied(f"the helper {kind} does not hold: {reason}", fix="see kvops chaos doctor")
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
        if handle is not None:
            os.close(handle)


def _wait(until_boot_ms: int) -> None:
    pause = threading.Event()
    while (left_ms := until_boot_ms - boot_ms()) > 0:
        pause.wait(min(left_ms / 1000, 1.0))


def duty(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Let processes run for a share of each period; SIGCONT when the time is over."""
    identities = [ProcessIdentity(**one) for one in settings["processes"]]
    run_s = DUTY_PERIOD_S * float(settings["share"])
    pause = threading.Event()
    ready()
    try:
        while boot_ms() < until:
            alive = [one for one in identities if send_signal(one, signal.SIGSTOP)]
            if not alive:
                return
            pause.wait(DUTY_PERIOD_S - run_s)
            for one in identities:
                send_signal(one, signal.SIGCONT)
            pause.wait(run_s)
    finally:
        for one in identities:
            send_signal(one, signal.SIGCONT)


def ballast(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Fill a file system with a file that has no name: gone with its holder (open(2), O_TMPFILE)."""
    folder, leave = settings["folder"], int(settings["leave_bytes"])
    handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    offset, chunk = 0, BALLAST_CHUNK_BYTES
    most = int(settings["bytes_max"])
    while chunk >= 4096:
        stat = os.statvfs(folder)
        free = stat.f_bavail * stat.f_frsize - leave
        size = min(chunk, free, most - offset)
        if size < 4096:
            break
        try:
            os.posix_fallocate(handle, offset, size)
            offset += size
        except OSError:
            chunk //= 2
    ready()
    _wait(until)


def hugepages(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Take all free huge pages of the default size."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000  # MAP_HUGETLB: mmap(2)
    area = mmap.mmap(-1, int(settings["pages"]) * int(settings["page_bytes"]), flags=flags)
    for offset in range(0, len(area), int(settings["page_bytes"])):
        area[offset] = 1
    ready()
    _wait(until)


def proxy(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Stand in the stream: see :mod:`kvops.chaos.proxy`."""
    from kvops.chaos.proxy import serve

    serve(settings, until, ready)


def incast(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Ask one address from many connections at once, at a bounded rate and for a bounded time."""
    from kvops.chaos.load import many_to_one

    many_to_one(settings, until, ready)


def strace(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Delay or fail system calls of processes, for as long as strace runs; the kernel detaches it when it ends."""
    # PR_SET_PDEATHSIG: a tracer that outlived us would be found by nobody.
    program = "import ctypes,os,sys;ctypes.CDLL(None).prctl(1,9);os.execvp(sys.argv[1],sys.argv[1:])"
    tracer = subprocess.Popen(
        [sys.executable, "-I", "-c", program, *settings["argv"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    pause = threading.Event()
    try:
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        while not all(_traced_by(pid, tracer.pid) for pid in settings["pids"]):
            if tracer.poll() is not None or time.monotonic() > deadline:
                tracer.kill()
                raise OSError(
                    tracer.communicate()[1].decode("utf-8", "replace")[-300:] or "strace did not attach"
                )
            pause.wait(0.02)
        ready()
        while boot_ms() < until and tracer.poll() is None:
            pause.wait(0.2)
    finally:
        tracer.kill()  # the kernel detaches it from all: ptrace(2)
        tracer.wait(5.0)


def _traced_by(pid: int, tracer: int) -> bool:
    return f"TracerPid:\t{tracer}\n" in Path(f"/proc/{pid}/status").read_text()


def flap(settings: dict[str, Any], until: int, ready: Ready) -> None:
    """Stop whichever master leads for longer than its lease, let it go on, and again."""
    from kvops.chaos.outside import kvops_json

    masters = {one["name"]: ProcessIdentity(**one["process"]) for one in settings["masters"]}
    pause = threading.Event()
    said_ready = False
    try:
        while boot_ms() < until:
            said = kvops_json(settings["state_dir"], settings["group"], "status") or {}
            leaders = [one["name"] for one in said.get("masters", []) if one.get("role") == "leader"]
            for name in leaders[:1]:
                if name in masters:
                    send_signal(masters[name], signal.SIGSTOP)
                    if not said_ready:
                        ready()
                        said_ready = True
                    pause.wait(float(settings["pause_s"]))
                    send_signal(masters[name], signal.SIGCONT)
            pause.wait(float(settings["between_s"]))
    finally:
        for identity in masters.values():
            send_signal(identity, signal.SIGCONT)


KINDS: Final[dict[str, Callable[[dict[str, Any], int, Ready], None]]] = {
    "duty": duty,
    "ballast": ballast,
    "hugepages": hugepages,
    "proxy": proxy,
    "incast": incast,
    "strace": strace,
    "flap": flap,
}


def main(argv: list[str]) -> int:
    """Become nobody's child, hold, say so, wait, let go."""
    _token, until, ack, kind, settings = argv
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def ready() -> None:
        os.write(int(ack), READY)
        os.close(int(ack))

    try:
        KINDS[kind](json.loads(settings), int(until), ready)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):  # it had said ready already
            os.write(int(ack), (str(error) or type(error).__name__).encode()[:4000])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
