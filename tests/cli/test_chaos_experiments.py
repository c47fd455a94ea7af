"""``kvops chaos validate``, ``plan``, ``suite`` and ``soak``, as their users run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import kvops

if TYPE_CHECKING:
    from tests.cli.conftest import Run

EXPERIMENTS = Path(kvops.__file__).parents[1] / "playbooks" / "experiments"
PAUSE = str(EXPERIMENTS / "store-pause.yaml")


def test_a_typo_is_refused_before_anything_is_touched(run: Run, tmp_path: Path) -> None:
    """A misspelt argument ends with 2 and the right name, in validate, plan and run alike; no run folder is made."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(Path(PAUSE).read_text().replace("process_pause", "process_pauze"))

    validated = run("chaos", "validate", str(bad), "-o", "json")
    planned = run("chaos", "plan", str(bad))
    ran = run("chaos", "run", str(bad), "--runs", str(tmp_path / "runs"))

    assert [one.returncode for one in (validated, planned, ran)] == [2, 2, 2]
    assert any("process.pause" in one["fix"] for one in json.loads(validated.stdout)["remarks"])
    assert "process.pause" in ran.stderr
    assert not (tmp_path / "runs").exists()


def test_validate_says_what_a_good_file_cannot_show(run: Run) -> None:
    """A file that stands is valid, and remarks are not errors."""
    done = run("chaos", "validate", PAUSE, "-o", "json")

    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert said["valid"] is True
    assert {one["severity"] for one in said["remarks"]} <= {"info", "warning"}


def test_validate_takes_a_folder(run: Run, tmp_path: Path) -> None:
    """A folder is all of its experiments, as for suite; one without any is refused."""
    (tmp_path / "one.yaml").write_text(Path(PAUSE).read_text())
    (tmp_path / "two.yaml").write_text("not: an experiment")

    said = json.loads(run("chaos", "validate", str(tmp_path), "-o", "json").stdout)
    (tmp_path / "empty").mkdir()
    empty = run("chaos", "validate", str(tmp_path / "empty"))

    assert (said["valid"], len(said["files"])) == (False, 2)
    assert {Path(row["file"]).name for row in said["remarks"] if row["severity"] == "error"} == {"two.yaml"}
    assert empty.returncode == 2
    assert "no experiment" in empty.stderr


def test_the_schema_is_printed(run: Run) -> None:
    """Editors get the schema from the command, as it is published."""
    done = run("chaos", "validate", "--schema")

    assert json.loads(done.stdout) == json.loads((EXPERIMENTS / "schema.json").read_text())


def test_a_plan_as_json(run: Run) -> None:
    """Targets, undo and cost are there for programs."""
    plan = json.loads(run("chaos", "plan", PAUSE, "-o", "json").stdout)

    assert plan["schema"] == 1
    assert plan["faults"][0]["undo"][0].startswith("kill -CONT")
    assert 0.3 < plan["capacity_share"] < 0.34


def test_a_suite_says_what_it_would_run(run: Run) -> None:
    """The list names each experiment with its time, and runs none."""
    said = json.loads(run("chaos", "suite", str(EXPERIMENTS), "--quick", "--list", "-o", "json").stdout)

    names = {one["experiment"] for one in said["experiments"]}
    assert {"store-kill", "store-pause", "group-kill", "master-pause"} <= names
    assert sum(one["seconds"] for one in said["experiments"]) <= 480


def test_a_soak_shows_its_rounds(run: Run) -> None:
    """The same seed shows the same rounds; bounds that leave nothing to do are refused."""
    words = ("chaos", "soak", "--for", "5m", "--seed", "3", "--dry-run", "-o", "json")
    once, again = run(*words), run(*words)
    none = run("chaos", "soak", "--stores", "3", "--min-up", "3", "--dry-run")

    assert json.loads(once.stdout)["rounds"]
    assert once.stdout == again.stdout
    assert none.returncode == 2


def test_an_unknown_safeguard_is_refused(run: Run, tmp_path: Path) -> None:
    """A misspelt safeguard is named before anything runs."""
    done = run("chaos", "run", PAUSE, "--without", "braker", "--runs", str(tmp_path / "runs"))

    assert done.returncode == 2
    assert "breaker" in done.stderr
    assert not (tmp_path / "runs").exists()
