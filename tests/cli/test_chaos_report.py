"""``kvops chaos check`` and ``report`` as their users run them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvops.chaos.history import HistoryWriter, Row, Run
from tests.chaos.histories import Arm, World, clean_operations, simulate, swap
from tests.cli.conftest import Run as RunCommand

WORLD = World(
    seed=4, blocks=1, rps=30, before_s=3, fault_s=8, after_s=8, window_s=4, arms=(Arm.BASELINE, Arm.FAULT)
)


def write(folder: Path, rows: Sequence[Row]) -> Path:
    folder.mkdir()
    with HistoryWriter(folder / "runner.jsonl") as history:
        for row in rows:
            history.write(row)  # type: ignore[arg-type]
    return folder


def quick_run(folder: Path, **changes: object) -> Path:
    made = simulate(WORLD)
    run = msgspec.structs.replace(made.run, quick=True, **changes)
    return write(folder, [run, *made.blocks, *made.faults, *made.events, *made.requests, made.end or Run()])


def test_check_gives_the_verdict_and_its_exit_code(run: RunCommand, tmp_path: Path) -> None:
    """A good run passes with 0; one wrong byte in the same history is a FAIL with 1 and names the read."""
    good = quick_run(tmp_path / "good")
    with HistoryWriter(quick_run(tmp_path / "bad") / "c.jsonl") as history:
        for row in swap(clean_operations(), "g1", content="flipped"):
            history.write(row)  # type: ignore[arg-type]

    passed, failed = (
        run("chaos", "check", str(good)),
        run("chaos", "check", str(tmp_path / "bad"), "-o", "json"),
    )

    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "PASS  K " in passed.stderr
    assert "C1\tcontainment\tvalid" in passed.stdout
    assert failed.returncode == 1
    document = json.loads(failed.stdout)
    s1 = next(one for one in document["checkers"] if one["id"] == "S1")
    assert (document["verdict"], s1["verdict"], s1["counter_examples"][0]["rows"]) == (
        "FAIL",
        "invalid",
        ["g1"],
    )


def test_check_of_one_promise(run: RunCommand, tmp_path: Path) -> None:
    """Only the checkers that were asked for run, by id or by name; a typo is refused with the nearest name."""
    folder = quick_run(tmp_path / "run")

    asked = run("chaos", "check", str(folder), "--checker", "no_hang,C2", "-o", "json")
    typo = run("chaos", "check", str(folder), "--checker", "integrty")

    assert [one["id"] for one in json.loads(asked.stdout)["checkers"]] == ["L2", "C2"]
    assert typo.returncode == 2
    assert "did you mean integrity?" in typo.stderr


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("text", "PASS  K "),
        ("json", '"verdict": "PASS"'),
        ("junit", '<testcase classname="kvops.chaos" name="verdict"></testcase>'),
        ("html", "<!doctype html>"),
        ("ctk-journal", '"chaoslib-version"'),
    ],
)
def test_report_in_each_format(run: RunCommand, tmp_path: Path, kind: str, wanted: str) -> None:
    """Each format goes to stdout or to a file, the same either way."""
    folder, file = quick_run(tmp_path / "run"), tmp_path / "report"

    shown = run("chaos", "report", str(folder), "--format", kind)
    written = run("chaos", "report", str(folder), "--format", kind, "--to", str(file))

    assert (shown.returncode, written.returncode) == (0, 0), shown.stderr + written.stderr
    assert wanted in shown.stdout
    assert file.read_text() == shown.stdout


def test_reports_side_by_side(run: RunCommand, tmp_path: Path) -> None:
    """Two runs of one experiment are one table, or one page; runs of different seeds, and JUnit of two, are refused."""
    first, second = quick_run(tmp_path / "a"), quick_run(tmp_path / "b", without=("breaker",))
    other = quick_run(tmp_path / "c", seed=99)

    compared = run("chaos", "report", str(first), str(second))

    assert compared.returncode == 0, compared.stderr
    assert "differs: switched off" in compared.stdout
    assert "no difference that this run can tell from chance" in compared.stdout
    assert "2 runs side by side" in run("chaos", "report", str(first), str(second), "--format", "html").stdout
    assert run("chaos", "report", str(first), str(other)).returncode == 2
    assert run("chaos", "report", str(first), str(second), "--format", "junit").returncode == 2


def test_bad_input(run: RunCommand, tmp_path: Path) -> None:
    """No history, something else's file and an unwritable target are refused with what to do; nothing is written."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "started"}\nnot json\n')

    missing, foreign = run("chaos", "check", str(tmp_path / "none")), run("chaos", "check", str(log))
    unwritable = run(
        "chaos", "report", str(quick_run(tmp_path / "run")), "--to", str(tmp_path / "no" / "r.html")
    )

    assert (missing.returncode, foreign.returncode, unwritable.returncode) == (2, 2, 2)
    assert "there is no history" in missing.stderr
    assert "not the history of a chaos run" in foreign.stderr
    assert "mkdir -p" in unwritable.stderr
