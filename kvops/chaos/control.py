"""What works without the runner: end an experiment, take back what one left, say how things stand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kvops.chaos import picture
from kvops.chaos.ledger import Book, Entry, Experiment
from kvops.chaos.model import ENDED, State
from kvops.chaos.undo import UNDO_TIMEOUT_S, left, undo
from kvops.errors import KvopsError, LeftBehind, Refused, UsageError
from kvops.fleet.process import ProcessIdentity, is_running
from kvops.store.clock import boot_id

ABORT_TIMEOUT_S: Final = 10.0  # for the guardian to have undone, before we do it ourselves
_PAUSE_S: Final = 0.05
Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What became of one experiment that was aborted or recovered."""

    id: str
    state: State  # CLEAN or DIRTY
    by: str  # guardian, recover
    steps: list[str] = field(default_factory=list)  # one line each
    commands: list[str] = field(default_factory=list)  # of DIRTY: what a person runs
    detail: str = ""

    @property
    def clean(self) -> bool:
        """Nothing is left."""
        return self.state in ENDED


def _guardian(entries: Sequence[Entry]) -> ProcessIdentity | None:
    """The guardian of an experiment, if it runs."""
    for entry in entries:
        said = entry.facts.get("guardian")
        if isinstance(said, dict) and entry.boot_id == boot_id():
            identity = ProcessIdentity(**said)
            return identity if is_running(identity) else None
    return None


def recover_one(experiment: Experiment, *, by: str = "recover", timeout_s: float = UNDO_TIMEOUT_S) -> Taken:
    """
    Take back what one experiment left, from its ledger alone. Again and again does no harm.

    Raises:
        LeftBehind: Its ledger cannot be read.
        Refused: Somebody else has been undoing it for ``timeout_s``.
    """
    with experiment.undoing(timeout_s=timeout_s):
        entries = experiment.entries()
        if not experiment.dirty:
            return Taken(id=experiment.id, state=State.CLEAN, by=entries[-1].by if entries else by)
        steps, of_boot = experiment.undo_steps()
        experiment.append(State.UNDOING, by=by)
        results = undo(steps, timeout_s=timeout_s, of_boot=of_boot)
        changed = [] if of_boot != boot_id() else _changed(entries)
        commands = left(results)
        lines = [result.text for result in results]
        if commands or changed:
            detail = "; ".join([*(result.text for result in results if not result.done), *changed])
            experiment.append(State.DIRTY, by=by, detail=detail, commands=commands)
            return Taken(
                id=experiment.id, state=State.DIRTY, by=by, steps=lines, commands=commands, detail=detail
            )
        experiment.append(State.CLEAN, by=by)
        return Taken(id=experiment.id, state=State.CLEAN, by=by, steps=lines)


def _changed(entries: Sequence[Entry]) -> list[str]:
    before = next((entry.picture for entry in entries if entry.state is State.PICTURED), None)
    scope = next((entry.facts["scope"] for entry in entries if "scope" in entry.facts), None)
    if before is None or scope is None:
        return []
    return picture.differences(before, picture.take(msgspec.convert(scope, picture.Scope)))


def recover(state_dir: Path, *, tell: Tell = lambda name, text: None) -> list[Taken]:
    """Take back whatever dead experiments left; one that runs is left to its runner."""
    book = Book(state_dir)
    running = book.run_by()
    found = []
    for experiment in book.dirty():
        if experiment.id == running:
            tell(experiment.id, "runs; end it with: kvops chaos abort")
            continue
        found.append(_recovered(experiment))
    return found


def _recovered(experiment: Experiment) -> Taken:
    try:
        return recover_one(experiment)
    except KvopsError as error:
        return Taken(
            id=experiment.id, state=State.DIRTY, by="recover", detail=error.what, commands=[error.fix]
        )


def accept(state_dir: Path, name: str, *, reason: str) -> Taken:
    """
    Close one experiment's ledger although its undo is not proved: a person has looked, and says why.

    It is taken back once more first, as far as that goes. A ledger that cannot be read is set aside.

    Raises:
        UsageError: There is no such experiment.
        Refused: It runs.
    """
    book = Book(state_dir)
    experiment = book.experiment(name)
    if not experiment.folder.is_dir():
        known = ", ".join(one.id for one in book.experiments()[-5:]) or "none"
        raise UsageError(f"there is no experiment {name}", fix=f"the latest: {known}")
    if book.run_by() == name:
        raise Refused(f"experiment {name} is running", fix="end it: kvops chaos abort")
    try:
        taken = recover_one(experiment)
    except LeftBehind as error:
        taken = Taken(id=name, state=State.DIRTY, by="recover", detail=error.what)
        experiment.ledger_file.rename(experiment.folder / "ledger.unreadable")
    if taken.clean:
        return taken
    experiment.append(State.CLEAN, by="person", detail=f"accepted: {reason}; {taken.detail}"[:4000])
    return Taken(id=name, state=State.CLEAN, by="person", steps=taken.steps, detail=f"accepted: {reason}")


def abort(state_dir: Path, *, reason: str, timeout_s: float = ABORT_TIMEOUT_S) -> list[Taken]:
    """
    End every experiment now, through its guardian, and without one ourselves.

    Returns:
        What became of each; empty when there was none.
    """
    book = Book(state_dir)
    asked = book.dirty()
    running = book.run_by()
    if running and all(one.id != running for one in asked):
        asked.append(book.experiment(running))  # on its way: it must not go on
    for experiment in asked:
        experiment.ask_abort(reason)
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    found = []
    for experiment in asked:
        while experiment.open and time.monotonic() < deadline and _guardian(experiment.entries()) is not None:
            pause.wait(_PAUSE_S)
        if experiment.dirty:
            found.append(_recovered(experiment))
        else:
            last = experiment.entries()[-1]
            found.append(Taken(id=experiment.id, state=last.state, by=last.by, detail=last.detail))
    return found


def status(state_dir: Path, *, limit: int = 10) -> dict[str, Any]:
    """How things stand, as JSON gives it: the lever, the one that runs, the latest experiments."""
    book = Book(state_dir)
    lock = book.locked()
    running = book.run_by()
    experiments: list[dict[str, Any]] = []
    for experiment in reversed(book.experiments()[-limit:]):
        try:
            entries = experiment.entries()
        except KvopsError as error:
            experiments.append({"id": experiment.id, "state": State.DIRTY, "detail": error.what})
            continue
        if not entries:
            continue
        guardian = _guardian(entries)
        experiments.append(
            {
                "id": experiment.id,
                "state": str(entries[-1].state),
                "since": entries[-1].at,
                "by": entries[-1].by,
                "faults": next((entry.faults for entry in entries if entry.faults), []),
                "running": experiment.id == running,
                "dirty": experiment.dirty and experiment.id != running,
                "guardian": guardian.pid if guardian else None,
                "commands": entries[-1].commands,
                "detail": entries[-1].detail,
            }
        )
    return {
        "locked": msgspec.to_builtins(lock) if lock else None,
        "running": running,
        "dirty": [one["id"] for one in experiments if one.get("dirty")],
        "experiments": experiments,
    }
