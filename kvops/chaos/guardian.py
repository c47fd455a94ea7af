"""
The dead man's switch: a detached process that takes a fault back when nobody else does.

One for each experiment and host. It is given everything it needs before anything is injected: the complete undo
list, a lease that the runner must renew, and an absolute deadline. It undoes when the runner has ended, when
the lease was not renewed, when the deadline has come, or when somebody asks (``abort``); it ends by itself once
the ledger says clean.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from kvops.chaos import netns, picture
from kvops.chaos.ledger import Experiment
from kvops.chaos.model import ENDED, State
from kvops.chaos.steps import UndoStep, decode, encode, package_root
from kvops.chaos.undo import UNDO_TIMEOUT_S, left, undo
from kvops.errors import KvopsError, Refused
from kvops.fleet.process import ProcessIdentity, identify
from kvops.store.clock import boot_ms

DEADLINE_S_MAX: Final = 900.0
ARM_TIMEOUT_S: Final = 10.0
LOOK_S: Final = 0.05  # between looks at lease, ledger and abort file
_IGNORED: Final = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTSTP,
)


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a guardian is told, on its standard input, before anything is injected."""

    folder: str
    runner: picture.Process
    deadline_boot_ms: int
    undo: list[UndoStep]
    scope: picture.Scope
    before: dict[str, str]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers once it stands by."""

    pid: int
    started_ticks: int
    boot_id: str
    steps: int

    @property
    def identity(self) -> ProcessIdentity:
        """Who it is."""
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)


def arm(orders: Orders) -> ProcessIdentity:
    """
    Start a guardian and return when it stands by with the whole list.

    Raises:
        Refused: It did not say so in time: nothing may be injected.
    """
    read_end, write_end = os.pipe()
    try:
        with (Path(orders.folder) / "guardian.log").open("ab") as log:
            starter = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvops.chaos.guardian", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(write_end,),
                env={**os.environ, "PYTHONPATH": package_root()},
            )
        os.close(write_end)
        write_end = -1
        raw = b""
        try:
            starter.communicate(msgspec.json.encode(orders), timeout=ARM_TIMEOUT_S)
            if select.select([read_end], [], [], ARM_TIMEOUT_S)[0]:
                raw = os.read(read_end, 4096)
            answer = msgspec.json.decode(raw, type=Answer)
        except (subprocess.TimeoutExpired, msgspec.DecodeError, BrokenPipeError) as error:
            starter.kill()
            starter.communicate()
            raise Refused(
                "the guardian did not start: nothing was injected", fix=f"see {orders.folder}/guardian.log"
            ) from error
        if answer.steps != len(orders.undo):
            raise Refused("the guardian has another undo list than we: nothing was injected", fix="try again")
        return answer.identity
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def write_lease(experiment: Experiment, *, lease_s: float) -> None:
    """Say that the runner is well, for ``lease_s`` from now."""
    handle = os.open(experiment.lease_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, b"%020d" % (boot_ms() + int(lease_s * 1000)), 0)  # fixed width: never torn
    finally:
        os.close(handle)


def _lease_boot_ms(experiment: Experiment) -> int:
    try:
        return int(experiment.lease_file.read_bytes() or b"0")
    except (OSError, ValueError):
        return 0


class Guardian:
    """What the process does."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.experiment = Experiment(Path(orders.folder))
        # A namespace lives as long as somebody holds it: ours must be there when we are needed.
        self.held = [netns.open_netns(inode) for inode in orders.scope.netns]
        self._size = -1
        self._ended = False

    def watch(self) -> str | None:
        """Wait for a reason to undo; None when the runner has finished well."""
        try:
            pidfd = os.pidfd_open(self.orders.runner.pid)
        except ProcessLookupError:
            pidfd = -1
        poll = select.poll()
        if pidfd >= 0:
            poll.register(pidfd, select.POLLIN)
        while True:
            gone = pidfd < 0 or bool(poll.poll(LOOK_S * 1000))
            if self._clean():
                return None
            if gone or identify(self.orders.runner.pid) != self.orders.runner.identity:
                return "the runner has ended"
            now = boot_ms()
            if self.experiment.abort_file.exists():
                return f"abort was asked for: {self.experiment.abort_file.read_text().strip()}"
            if now >= self.orders.deadline_boot_ms:
                return "the deadline has come"
            if now >= _lease_boot_ms(self.experiment):
                return "the runner did not renew its lease"

    def _clean(self) -> bool:
        try:
            size = self.experiment.ledger_file.stat().st_size
        except OSError:
            return False  # the folder was removed under us: undo from memory when the time comes
        if size != self._size:
            self._size = size
            self._ended = self.experiment.state in ENDED
        return self._ended

    def undo(self, reason: str) -> State:
        """Take everything back, prove it, write it down."""
        with contextlib.suppress(Refused), self.experiment.undoing(timeout_s=UNDO_TIMEOUT_S):
            if self._clean():
                return State.CLEAN  # the runner was quicker
            self._note(State.UNDOING, detail=reason)
            results = undo(self.orders.undo)
            found = left(results)
            changed = picture.differences(self.orders.before, picture.take(self.orders.scope))
            if not found and not changed:
                self._note(State.CLEAN, detail=reason)
                return State.CLEAN
            detail = "; ".join([*(result.text for result in results if not result.done), *changed])
            self._note(State.DIRTY, detail=detail, commands=found or ["kvops chaos recover"])
        return State.DIRTY

    def _note(self, state: State, *, detail: str, commands: list[str] | None = None) -> None:
        print(f"{time.strftime('%FT%TZ', time.gmtime())} {state} {detail}", flush=True)  # noqa: T201 (its log file)
        with contextlib.suppress(KvopsError):  # a full disk must not keep us from undoing
            self.experiment.append(state, by="guardian", detail=detail, commands=commands or [])


def main(ack_fd: int) -> int:
    """Read the orders, become nobody's child, answer, stand by."""
    orders = msgspec.json.decode(sys.stdin.buffer.read(), type=Orders)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    with contextlib.suppress(OSError):  # only root may be spared
        Path("/proc/self/oom_score_adj").write_text("-1000")
    guardian = Guardian(orders)
    me = identify(os.getpid())
    assert me is not None
    answer = Answer(
        pid=me.pid,
        started_ticks=me.started_ticks,
        boot_id=me.boot_id,
        steps=len(decode(encode(orders.undo))),
    )
    os.write(ack_fd, msgspec.json.encode(answer))
    os.close(ack_fd)
    reason = guardian.watch()
    if reason is None:
        return 0
    return 0 if guardian.undo(reason) is State.CLEAN else 4


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
