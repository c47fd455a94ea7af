"""``kvops chaos``: the commands that work without a runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvops.chaos.ledger import Book
from kvops.chaos.model import State
from kvops.chaos.steps import RestoreFile
from tests.cli.conftest import Run


def test_doctor_says_how_or_why_not(run: Run) -> None:
    """Each fault is available with a back end, or is not with a reason; the exit code says whether all are."""
    done = run("chaos", "doctor", "-o", "json")
    found = json.loads(done.stdout)

    assert {"schema", "facts", "dirty", "faults"} <= set(found)
    for row in found["faults"]:
        assert (row["available"] == "yes") == (row["reason"] == "")
        assert row["backend"]
    assert done.returncode == (0 if all(row["available"] == "yes" for row in found["faults"]) else 1)


def test_a_misspelt_fault_is_misuse(run: Run) -> None:
    """The nearest name is said."""
    done = run("chaos", "doctor", "proces.pause")

    assert done.returncode == 2
    assert "process.pause" in done.stderr


def test_catalog_says_what_a_fault_does_not_certify(run: Run) -> None:
    """Every fault says what it certifies, what it does not, and which data paths it reaches."""
    rows = json.loads(run("chaos", "catalog", "-o", "json").stdout)["faults"]

    assert all(
        row["certifies"] and row["does_not_certify"] and row["transports"] and row["about"] for row in rows
    )
    assert {"process.pause", "net.partition", "etcd.quorum"} <= {row["fault"] for row in rows}


def test_lock_and_unlock(run: Run) -> None:
    """The lever is seen in the status with its reason, and let go."""
    locked = run("chaos", "lock", "--reason", "release week", "-o", "json")
    seen = json.loads(run("chaos", "status", "-o", "json").stdout)
    unlocked = run("chaos", "unlock")
    after = json.loads(run("chaos", "status", "-o", "json").stdout)

    assert locked.returncode == unlocked.returncode == 0
    assert seen["locked"]["reason"] == "release week"
    assert after["locked"] is None


def test_recover_takes_back_what_was_left(run: Run, kvops_env: dict[str, str], tmp_path: Path) -> None:
    """What a dead experiment left is shown with exit code 4, planned by --dry-run, and taken back."""
    file = tmp_path / "setting"
    file.write_text("good")
    book = Book(Path(kvops_env["KVOPS_STATE_DIR"]))
    experiment = book.create("dead")
    experiment.append(State.JOURNALLED, by="runner", undo=[RestoreFile.of(file)])
    experiment.append(State.INJECTING, by="runner")
    file.write_text("bad")

    status = run("chaos", "status")
    dry = run("chaos", "recover", "--dry-run", "-o", "json")
    still = file.read_text()
    recovered = run("chaos", "recover", "-o", "json")

    assert status.returncode == 4
    assert [step["id"] for step in json.loads(dry.stdout)["steps"]] == ["dead"]
    assert still == "bad"
    assert recovered.returncode == 0
    assert json.loads(recovered.stdout)["experiments"][0]["state"] == "clean"
    assert file.read_text() == "good"
    assert run("chaos", "status").returncode == 0


def test_what_a_person_has_looked_at_is_accepted(run: Run, kvops_env: dict[str, str]) -> None:
    """A ledger that nobody can read holds up everything until a person closes it, with a reason that stays."""
    book = Book(Path(kvops_env["KVOPS_STATE_DIR"]))
    experiment = book.create("strange")
    experiment.append(State.INJECTING, by="runner")
    with experiment.ledger_file.open("ab") as file:
        file.write(b"not a ledger\n")

    stuck = run("chaos", "recover")
    silent = run("chaos", "recover", "--accept", "strange")
    wrong = run("chaos", "recover", "--accept", "strang", "--reason", "looked")
    accepted = run("chaos", "recover", "--accept", "strange", "--reason", "looked: nothing is there")

    assert stuck.returncode == 4
    assert silent.returncode == wrong.returncode == 2
    assert accepted.returncode == 0
    assert "looked: nothing is there" in experiment.entries()[-1].detail
    assert (experiment.folder / "ledger.unreadable").exists()
    assert run("chaos", "status").returncode == 0


@pytest.mark.parametrize("words", [["abort"], ["recover"], ["lab", "down"]])
def test_nothing_to_do_is_a_success(run: Run, words: list[str]) -> None:
    """Ending, recovering and removing what is not there does nothing, and is no failure."""
    assert run("chaos", *words).returncode == 0
