"""
The write-ahead ledger: what an experiment is about to do is on disk before it is done.

::

    <state-dir>/chaos/
        running             flock(2) of the one experiment that runs
        runner              flock(2) of the one run, with all its blocks
        lock                JSON: who forbade experiments, and why
        experiments/<id>/
            ledger          JSON lines, appended and synced
            undo.lock       flock(2) of whoever undoes
            lease           until when the runner was last known to be well
            abort           exists when somebody asked for the end
            guardian.log    what the guardian wrote

An experiment whose ledger does not end ``clean`` is dirty: nothing new is begun until it was recovered. The
files of experiments that ended are kept up to ``KEPT_MAX``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from kvops.chaos.model import ENDED, State
from kvops.chaos.steps import UndoStep
from kvops.errors import ConfigError, LeftBehind, Refused
from kvops.files import take_lock, write_private
from kvops.store.clock import boot_id
from kvops.timestamps import utc_now

SCHEMA: Final = 1
KEPT_MAX: Final = 50  # ended experiments whose files stay
LEDGER_BYTES_MAX: Final = 8 << 20
LOOK_S: Final = 0.2


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a ledger."""

    at: str  # RFC 3339, UTC
    by: str  # runner, guardian, recover, abort
    state: State
    boot_id: str = ""
    schema: int = SCHEMA
    detail: str = ""
    faults: list[str] = []
    undo: list[UndoStep] = []
    picture: dict[str, str] = {}
    commands: list[str] = []  # of DIRTY: what a person runs
    facts: dict[str, Any] = {}


class Experiment:
    """One experiment's files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.id = folder.name
        self.ledger_file = folder / "ledger"
        self.lease_file = folder / "lease"
        self.abort_file = folder / "abort"

    def append(self, state: State, *, by: str, **more: Any) -> None:
        """
        Write one line, and return when it is on disk.

        Raises:
            ConfigError: It cannot be written: nothing may be done then.
        """
        line = msgspec.json.encode(Entry(at=utc_now(), by=by, state=state, boot_id=boot_id(), **more)) + b"\n"
        try:
            handle = os.open(self.ledger_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                # One write: lines of runner and guardian do not mix (O_APPEND, open(2)).
                written = os.write(handle, line)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.ledger_file}: {error.strerror}", fix="free some space"
            ) from error
        if written != len(line):
            raise ConfigError(f"{self.ledger_file} was cut short: the disk is full", fix="free some space")

    def ask_abort(self, reason: str) -> None:
        """Ask the guardian to end it: it looks all the time, and finds the whole reason in one step."""
        try:
            write_private(self.abort_file, reason.encode())
        except ConfigError:  # a full disk still has room for a name: the end matters more than its reason
            self.abort_file.touch()

    def size_bytes(self) -> int:
        """Of the ledger: grows with every line that anybody writes."""
        try:
            return self.ledger_file.stat().st_size
        except OSError:
            return 0

    def entries(self) -> list[Entry]:
        """
        All whole lines. A line that was cut by a crash was never acted upon.

        Raises:
            LeftBehind: A line is of a kvops that this one does not understand.
        """
        try:
            with self.ledger_file.open("rb") as file:
                raw = file.read(LEDGER_BYTES_MAX)
        except FileNotFoundError:
            return []
        whole, _, _ = raw.rpartition(b"\n")
        found = []
        for line in whole.splitlines():
            if line.strip(b"\0 "):
                try:
                    found.append(msgspec.json.decode(line, type=Entry))
                except msgspec.DecodeError as error:
                    raise LeftBehind(
                        f"{self.ledger_file} cannot be read: {error}", fix="use the kvops that wrote it"
                    ) from error
        return found

    @property
    def state(self) -> State:
        """The last one written; PLANNED when none is."""
        entries = self.entries()
        return entries[-1].state if entries else State.PLANNED

    @property
    def open(self) -> bool:
        """Whether its end was not written yet."""
        entries = self.entries()
        return bool(entries) and entries[-1].state not in ENDED

    @property
    def dirty(self) -> bool:
        """
        Whether something of it may be left: an injection was begun, and no clean end was reached.

        INJECTING is on disk before anything is touched: without it nothing was.
        """
        entries = self.entries()
        return any(entry.state is State.INJECTING for entry in entries) and entries[-1].state not in ENDED

    def undo_steps(self) -> tuple[list[UndoStep], str]:
        """What takes it back, and the boot it was written in."""
        for entry in reversed(self.entries()):
            if entry.undo:
                return entry.undo, entry.boot_id
        return [], boot_id()

    @contextmanager
    def undoing(self, *, timeout_s: float) -> Iterator[None]:
        """
        Be the only one who undoes it: runner, guardian and ``recover`` may all want to.

        Raises:
            Refused: Somebody else was for too long.
        """
        handle = os.open(self.folder / "undo.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not take_lock(handle, timeout_s=timeout_s):
                raise Refused(f"experiment {self.id} is being undone by another", fix="wait for it")
            yield
        finally:
            os.close(handle)


class Lock(msgspec.Struct, frozen=True, kw_only=True):
    """The safety lever: who forbade experiments, when, and why."""

    by: str
    at: str
    reason: str


class Book:
    """All experiments under one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = state_dir / "chaos"
        self._lock_file = self.folder / "lock"

    def experiments(self) -> list[Experiment]:
        """Oldest first."""
        try:
            return [
                Experiment(path) for path in sorted((self.folder / "experiments").iterdir()) if path.is_dir()
            ]
        except FileNotFoundError:
            return []

    def dirty(self) -> list[Experiment]:
        """Those of which something may be left."""
        return [one for one in self.experiments() if one.dirty]

    def experiment(self, name: str) -> Experiment:
        """The one of that id."""
        return Experiment(self.folder / "experiments" / name)

    def create(self, name: str) -> Experiment:
        """
        Make an experiment's folder.

        Raises:
            ConfigError: It cannot be made.
        """
        folder = self.folder / "experiments" / name
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            raise ConfigError(f"{folder} exists", fix="give the experiment another id") from None
        except OSError as error:
            raise ConfigError(
                f"cannot make {folder}: {error.strerror}", fix="make its parent writable"
            ) from error
        ended = [one for one in self.experiments() if one.id != name and not one.dirty]
        for one in ended[:-KEPT_MAX]:
            shutil.rmtree(one.folder, ignore_errors=True)
        return Experiment(folder)

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """
        Be the one experiment that runs; the kernel gives it up when we die.

        Raises:
            Refused: Another runs.
        """
        handle = self.take(name)
        try:
            yield
        finally:
            os.close(handle)

    def take(self, name: str) -> int:
        """As ``running``, as a descriptor to close."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.folder / "running", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Who only looks whether it is free (``run_by``) holds it for a moment.
        if not take_lock(handle, timeout_s=LOOK_S):
            other = os.pread(handle, 100, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise Refused(f"experiment {other} is running", fix="wait for it, or end it: kvops chaos abort")
        os.ftruncate(handle, 0)
        os.pwrite(handle, name.encode(), 0)
        return handle

    def run_by(self) -> str | None:
        """The id of the experiment that runs now."""
        try:
            handle = os.open(self.folder / "running", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return os.pread(handle, 100, 0).decode("ascii", "replace").strip()
        finally:
            os.close(handle)

    def locked(self) -> Lock | None:
        """Who forbids experiments now."""
        try:
            return msgspec.json.decode(self._lock_file.read_bytes(), type=Lock)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            return Lock(by="unknown", at="unknown", reason=f"{self._lock_file} cannot be read")

    def lock(self, *, by: str, reason: str) -> Lock:
        """Forbid experiments until ``unlock``."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(by=by, at=utc_now(), reason=reason)
        write_private(self._lock_file, msgspec.json.encode(lock))
        return lock

    def unlock(self) -> bool:
        """Allow experiments again; False when they were."""
        try:
            self._lock_file.unlink()
        except FileNotFoundError:
            return False
        return True

    def refuse_if_not_ready(self) -> None:
        """
        Guard the start of an experiment.

        Raises:
            Refused: The lever is pulled, or something of a former experiment may be left.
        """
        lock = self.locked()
        if lock is not None:
            raise Refused(
                f"experiments are locked by {lock.by} since {lock.at}: {lock.reason}",
                fix="kvops chaos unlock, when the reason is gone",
            )
        dirty = self.dirty()
        if dirty:
            names = ", ".join(one.id for one in dirty)
            raise Refused(f"something of {names} may be left behind", fix="kvops chaos recover")


@contextmanager
def one_at_a_time(state_dir: Path, run_id: str) -> Iterator[None]:
    """
    Be the only run under a state folder; the kernel gives it up when we die.

    A run that acts on the machine it is ordered from meets its own name there, and shares it.

    Raises:
        Refused: Another one runs.
    """
    folder = state_dir / "chaos"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder / "runner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(handle, 100, 0).decode("ascii", "replace").strip() or "unknown"
            if other != run_id:
                raise Refused(
                    f"experiment {other} is running", fix="wait for it, or end it: kvops chaos abort"
                ) from None
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, run_id.encode(), 0)
        yield
    finally:
        os.close(handle)
