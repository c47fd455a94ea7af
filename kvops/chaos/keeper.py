"""
Sees to it that a pool under test does not outlive the runner that started it.

A detached process: ``python -m kvops.chaos.keeper FOLDER LEDGERS PID STARTED_TICKS``. When the runner has ended and
the folder is still there, it gives guardians time to undo what is in force, stops every group under the folder, and
removes it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvops.chaos import lab
from kvops.errors import KvopsError
from kvops.fleet.group_folder import local_groups
from kvops.fleet.local import LocalGroup
from kvops.fleet.process import ProcessIdentity, identify, is_running
from kvops.fleet.programs import daemon_environment

GUARDIANS_S_MAX: Final = 90.0  # how long guardians may take before the pool is stopped under them
LOOK_S: Final = 0.2


@contextmanager
def kept(folder: Path, state_dir: Path) -> Iterator[None]:
    """While this lasts, ``folder`` has a keeper; afterwards it has none, and the folder must be gone."""
    me = identify(os.getpid())
    assert me is not None
    keeper = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "kvops.chaos.keeper",
            str(folder),
            str(state_dir),
            str(me.pid),
            str(me.started_ticks),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=daemon_environment(),
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        keeper.kill()
        keeper.wait()


def keep(folder: Path, state_dir: Path, runner: ProcessIdentity) -> None:
    """Wait for the runner's end, then clear up what it left."""
    try:
        pidfd = os.pidfd_open(runner.pid)
    except ProcessLookupError:
        pidfd = -1
    if pidfd >= 0 and is_running(runner):
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
    pause, deadline = threading.Event(), time.monotonic() + GUARDIANS_S_MAX
    while _undo_under_way(state_dir) and time.monotonic() < deadline:
        pause.wait(LOOK_S)
    for name in local_groups(folder):
        try:
            lab.down(folder, name, tell=lambda name, text: None)
            LocalGroup(folder, name).stop(grace_s=1.0)
        except KvopsError:
            continue  # what the kernel holds nobody can end; the others must still be stopped
    if folder.is_mount():  # a pool with a file system of its own
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=10, check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _undo_under_way(state_dir: Path) -> bool:
    from kvops.chaos.ledger import Book

    try:
        return bool(Book(state_dir).dirty())
    except KvopsError:
        return False


def main() -> int:
    """Entry of the process; ends with SIGKILL alone."""
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    folder, state_dir = Path(sys.argv[1]), Path(sys.argv[2])
    from kvops.store.clock import boot_id

    keep(
        folder,
        state_dir,
        ProcessIdentity(pid=int(sys.argv[3]), started_ticks=int(sys.argv[4]), boot_id=boot_id()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
