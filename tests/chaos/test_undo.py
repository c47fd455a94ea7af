"""Undo from plain data: idempotent, self-checking, bounded, and honest about what it could not do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvops.chaos import netns, steps
from kvops.chaos.control import abort, recover, recover_one
from kvops.chaos.ledger import KEPT_MAX, Book
from kvops.chaos.model import State
from kvops.chaos.undo import left, undo
from kvops.errors import LeftBehind
from kvops.fleet.process import ProcessIdentity, identify, is_stopped

OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
def sleeper() -> Iterator[ProcessIdentity]:
    """A process that only waits."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        found = identify(process.pid)
        assert found is not None
        yield found
        process.kill()


def resume(identity: ProcessIdentity, **changes: object) -> steps.SignalProcess:
    """The step that continues a process."""
    step = steps.SignalProcess(
        pid=identity.pid, started_ticks=identity.started_ticks, boot_id=identity.boot_id, signal="CONT"
    )
    return msgspec.structs.replace(step, **changes)


def stop(identity: ProcessIdentity) -> None:
    """Stop a process and wait until it is."""
    os.kill(identity.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, identity.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_namespace_that_goes_while_we_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's namespace that is removed between two looks is in no command's way."""
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(netns, "NAMED", tmp_path)

    assert steps.DeleteNftTable(netns=1, table="kvops_0").command().startswith("# namespace has ended")


def test_steps_survive_the_ledger(tmp_path: Path, sleeper: ProcessIdentity) -> None:
    """Every kind of step reads back equal: what recover carries out is what was planned."""
    planned: list[steps.UndoStep] = [
        resume(sleeper),
        steps.KillHolder(token="kvops_0"),
        steps.DeleteNftTable(netns=1, table="kvops_0"),
        steps.RestoreFile.of(tmp_path / "absent"),
        steps.RestoreMemory(pid=1, started_ticks=2, boot_id="b", spots=[(4096, 1, 0)]),
        steps.RestartRole(state_dir="/s", group="g", member="store-0"),
        steps.StartProcess(argv=["a", "b c"], env={"X": "1"}, cwd="/", log_file=""),
        steps.RemoveCgroup(path="/sys/fs/cgroup/cpu/kvops_0", back="/sys/fs/cgroup/cpu"),
        steps.RestoreRlimit(pid=1, started_ticks=2, boot_id="b", limit="NOFILE", soft=1, hard=2),
    ]

    assert steps.decode(steps.encode(planned)) == planned
    assert all(step.command() for step in planned)


def test_only_the_same_process_is_signalled(sleeper: ProcessIdentity) -> None:
    """A pid that somebody else has by now, or that is of a former boot, needs nothing and gets nothing."""
    stop(sleeper)

    for step in (resume(sleeper, started_ticks=1), resume(sleeper, boot_id=OTHER_BOOT)):
        results = undo([step], timeout_s=1.0)
        assert [(one.done, one.acted) for one in results] == [(True, False)]
    assert is_stopped(sleeper)
    assert [one.acted for one in undo([resume(sleeper)], timeout_s=5.0)] == [True]
    assert not is_stopped(sleeper)


def test_after_a_reboot_only_files_are_left_to_do(tmp_path: Path, sleeper: ProcessIdentity) -> None:
    """Of a former boot the kernel has forgotten everything but what lies on disk."""
    stop(sleeper)
    file = tmp_path / "config"
    file.write_text("good")
    restore = steps.RestoreFile.of(file)
    file.write_text("bad")

    results = undo([resume(sleeper), restore], of_boot=OTHER_BOOT)

    assert [one.acted for one in results] == [False, True]
    assert file.read_text() == "good"
    assert is_stopped(sleeper)


def test_one_failing_step_holds_up_no_other(tmp_path: Path) -> None:
    """A step that cannot be done is tried until the time is over and named; those after it are done."""
    stuck = steps.RestoreFile(path=str(tmp_path / "no-folder" / "file"), content="eA==")
    leftover = tmp_path / "leftover"
    leftover.touch()

    results = undo([stuck, steps.RemovePath(path=str(leftover))], timeout_s=0.2)

    assert [one.done for one in results] == [False, True]
    assert not leftover.exists()
    assert left(results) == [stuck.command()]
    assert "No such file" in results[0].text


def begin(book: Book, name: str, undo_steps: list[steps.UndoStep]) -> None:
    """A ledger as a killed runner and guardian leave it."""
    experiment = book.create(name)
    experiment.append(State.JOURNALLED, by="runner", undo=undo_steps)
    experiment.append(State.INJECTING, by="runner")


def test_dirty_says_what_to_run_and_becomes_clean(tmp_path: Path) -> None:
    """What recover cannot take back stays dirty with its command; once the reason is gone, recover makes it clean."""
    book = Book(tmp_path)
    folder = tmp_path / "gone"
    step = steps.RestoreFile(path=str(folder / "config"), content="Z29vZA==")
    begin(book, "one", [step])

    first = recover_one(book.experiment("one"), timeout_s=0.2)
    dirty = [one.id for one in book.dirty()]
    folder.mkdir()
    second = recover(tmp_path)

    assert (first.state, first.commands, dirty) == (State.DIRTY, [step.command()], ["one"])
    assert [one.clean for one in second] == [True]
    assert (folder / "config").read_text() == "good"
    assert book.dirty() == []


def test_the_reason_of_an_abort_is_there_in_one_step(tmp_path: Path) -> None:
    """Whoever looks sees an abort with its whole reason, or none: the file is never one without it."""
    book = Book(tmp_path)
    begin(book, "one", [steps.RemovePath(path=str(tmp_path / "x"))])
    file = book.experiment("one").abort_file
    file.write_text("before")
    seen = tmp_path / "seen"
    seen.hardlink_to(file)

    taken = abort(tmp_path, reason="INC-7")

    assert [one.clean for one in taken] == [True]
    assert (file.read_text(), seen.read_text()) == ("INC-7", "before")


def test_a_torn_line_was_never_acted_upon(tmp_path: Path) -> None:
    """A ledger cut in the middle of a line by a crash reads as it was before that line."""
    book = Book(tmp_path)
    begin(book, "one", [steps.RemovePath(path=str(tmp_path / "x"))])
    experiment = book.experiment("one")
    whole = experiment.entries()
    with experiment.ledger_file.open("ab") as file:
        file.write(b'{"at":"2026","by":"runner","state":"cle')

    assert experiment.entries() == whole
    assert experiment.dirty


def test_an_unreadable_ledger_is_no_clean_one(tmp_path: Path) -> None:
    """A line that this kvops does not understand is said to be so, never passed over."""
    book = Book(tmp_path)
    begin(book, "one", [])
    with book.experiment("one").ledger_file.open("ab") as file:
        file.write(b'{"state":"from-the-future"}\n')

    with pytest.raises(LeftBehind, match="cannot be read"):
        book.dirty()


def test_planned_but_not_begun_is_not_dirty(tmp_path: Path) -> None:
    """Before INJECTING is on disk nothing was touched: nothing is left to recover."""
    book = Book(tmp_path)
    book.create("one").append(State.JOURNALLED, by="runner", undo=[steps.KillHolder(token="kvops_0")])

    assert book.dirty() == []


def test_old_experiments_are_removed_and_dirty_ones_kept(tmp_path: Path) -> None:
    """The files of ended experiments are bounded; one that may have left something is never forgotten."""
    book = Book(tmp_path)
    begin(book, "000-dirty", [steps.KillHolder(token="kvops_0")])
    for index in range(KEPT_MAX + 5):
        book.create(f"100-{index:03}").append(State.CLEAN, by="runner")

    names = [one.id for one in book.experiments()]

    assert "000-dirty" in names
    assert "100-000" not in names
    assert len(names) <= KEPT_MAX + 2
