"""One experiment from beginning to end, on real processes: proven, undone, judged, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvops
from kvops.chaos.calibrate import trials, without_fault
from kvops.chaos.experiment import Experiment, parse
from kvops.chaos.faults.net import netem_missing
from kvops.chaos.history import Arm, End, read_run
from kvops.chaos.ledger import Book
from kvops.chaos.runner import Options, one_at_a_time, run, within
from kvops.chaos.suite import run_judged
from kvops.chaos.verdict import RunVerdict, judge
from kvops.errors import Refused, UsageError
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.process

SHORT = """
title: a store hangs
description: a short run
method:
  - {{type: action, provider: {{type: python, module: kvops.chaos.faults, func: {func}, arguments: {{}}}}}}
kvops:
  pool: {{stores: 2, engines: 2, segment_size: 16MiB}}
  scope: {{max_capacity_fraction: 0.5}}
  workload: {{rps: 16, arms: [{arms}], windows: 1x{window}s, warmup: 500ms, register_rps: 4}}
  verify: {{timeout: {verify}s}}
  deadlines: {{fault: {fault}s, lease: 10s}}
  guards: [{guards}]
"""


def short(
    func: str = "process_pause",
    *,
    arms: str = "baseline, fault",
    window: float = 5,
    fault: float = 2,
    guards: str = "",
    verify: float = 20,
) -> Experiment:
    """A run of about a quarter of a minute."""
    return parse(
        SHORT.format(func=func, arms=arms, window=window, fault=fault, guards=guards, verify=verify),
        source="short",
    )


@pytest.fixture
def options(tmp_path: Path) -> Iterator[Options]:
    """Everything under one folder, of which only runs and ledgers are left."""
    yield Options(
        state_dir=tmp_path / "state", runs_dir=tmp_path / "runs", source="short", folder=tmp_path / "pools"
    )
    assert list((tmp_path / "pools").iterdir()) == [], "a pool under test was left behind"
    until(lambda: processes_of(tmp_path) == [], "no process of it is left")  # a guardian ends after us


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in words:
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_a_store_that_hangs(options: Options) -> None:
    """The fault is proven from outside, held, undone and proven gone; no promise is broken; reports are written."""
    ran, record, judged = run_judged(short(fault=3, window=6), options, say=lambda step, text: None)

    (window,) = record.fault_windows()
    assert ran.end is End.COMPLETED
    assert judged.injected
    assert judged.undone
    assert len(window.proof) >= 2
    assert not judged.safety, judged.reasons
    assert judged.verdict in (RunVerdict.PASS, RunVerdict.UNKNOWN, RunVerdict.FAIL)
    valid = {one.checker.id for one in judged.checkers if one.result.verdict == "valid"}
    assert valid >= {"S1", "S4", "S5", "S7", "S8"}
    assert record.events, "somebody noticed: a breaker, or the master"
    assert not Book(options.state_dir).dirty()
    assert json.loads((ran.folder / "report.json").read_text())["verdict"] == judged.verdict.value
    assert (ran.folder / "report.html").stat().st_size > 1_000


def test_without_its_fault_a_run_is_judged_and_never_passes(options: Options) -> None:
    """A trial for noise has every arm and phase, touches no process, and is no proof of anything."""
    tried = without_fault(short(), windows="1x3s", warmup="500ms")

    (trial,) = trials(tried, options, runs=1, seed=3, say=lambda step, text: None)

    record = read_run(trial.folder)
    judged = judge(record)
    (window,) = record.fault_windows()
    assert judged.verdict is not RunVerdict.PASS
    assert not judged.injected
    assert window.proof == ()
    assert {row.arm for row in record.blocks} == {Arm.BASELINE, Arm.CONTROL, Arm.FAULT}
    assert judged.containment.requests > 0
    assert not any(name.startswith("S") for name in trial.blamed), trial.blamed
    assert not [row for row in record.events if row.kind == "store.lost"]


def test_a_guard_ends_it_and_it_is_undone(options: Options) -> None:
    """A guard that trips ends the fault long before its time, and the run is ABORTED, not judged by its fault."""
    guards = "{probe: success_rate, below: 1.1, times: 1, every: 100ms}"  # nothing is ever above 1
    ran = run(short(fault=3, window=5, guards=guards), options)

    record = read_run(ran.folder)
    (window,) = record.fault_windows()
    assert ran.end is End.ABORTED
    assert "success_rate" in ran.why
    assert window.t_clean_ns is not None
    assert judge(record).verdict is RunVerdict.ABORTED
    assert not Book(options.state_dir).dirty()


@pytest.mark.skipif(netem_missing() is None, reason="this kernel can do all that is needed here")
def test_what_the_machine_cannot_do_is_known_before_anything_starts(options: Options) -> None:
    """A fault that this kernel has not is UNSUPPORTED with the reason, and no pool is started to find that out."""
    said: list[str] = []
    ran = run(short("net_netem"), options, say=lambda step, text: said.append(step))

    assert ran.end is End.UNSUPPORTED
    assert netem_missing() in ran.why
    assert "start" not in said
    assert judge(read_run(ran.folder)).verdict is RunVerdict.UNSUPPORTED


def test_an_injector_that_does_nothing_is_never_a_pass(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that was not proven is NOT_INJECTED, however well the clients fared."""
    from kvops.chaos.faults.process import Pause

    monkeypatch.setattr(Pause, "inject", lambda self, host: None)
    ran = run(short(window=3, fault=1, verify=2), options)

    judged = judge(read_run(ran.folder))
    assert judged.verdict is RunVerdict.NOT_INJECTED
    assert judged.exit_code == 11
    assert not Book(options.state_dir).dirty()


def test_without_a_baseline_nothing_is_touched(options: Options) -> None:
    """There is nothing to compare with: BASELINE_NOT_STEADY, and no pool was started for it."""
    ran = run(short(arms="fault"), options)

    record = read_run(ran.folder)
    assert judge(record).verdict is RunVerdict.BASELINE_NOT_STEADY
    assert (record.blocks, record.samples) == ((), ())


def test_a_fault_that_this_version_lacks_is_unsupported(options: Options) -> None:
    """A designed fault that is not built ends UNSUPPORTED with its name; a misspelt one is refused."""
    ran = run(short("rdma_link_down"), options)

    judged = judge(read_run(ran.folder))
    assert judged.verdict is RunVerdict.UNSUPPORTED
    assert "rdma.link_down" in judged.reasons[0]
    with pytest.raises(UsageError, match=r"process\.pause"):
        run(short("process_pauze"), options)


def test_one_experiment_at_a_time(options: Options) -> None:
    """A second experiment under the same state folder is refused, and the first one is named."""
    with one_at_a_time(options.state_dir, "first"), pytest.raises(Refused, match="first"):
        run(short(), options)


def test_a_locked_or_foreign_environment_is_refused(options: Options) -> None:
    """The safety lever and environment.must_match hold before anything is started."""
    Book(options.state_dir).lock(by="somebody", reason="a demonstration")
    with pytest.raises(Refused, match="a demonstration"):
        run(short(), options)
    Book(options.state_dir).unlock()
    staging = parse(
        SHORT.format(func="process_pause", arms="baseline, fault", window=6, fault=2, guards="", verify=2)
        + "  environment: {must_match: staging}\n",
        source="short",
    )
    with pytest.raises(Refused, match="staging"):
        run(staging, options)


def command_line(options: Options, tmp_path: Path) -> subprocess.Popen[str]:
    """``kvops chaos run`` of a long hold, as a process."""
    file = tmp_path / "long.yaml"
    file.write_text(
        SHORT.format(
            func="process_pause", arms="baseline, fault", window=9, fault=7, guards="", verify=20
        ).replace("1x9s", "1x9s, profile: chat-prefix")
    )
    env = {**os.environ, "PYTHONPATH": str(Path(kvops.__file__).parents[1]), "TMPDIR": str(options.folder)}
    words = [
        "--state-dir",
        str(options.state_dir),
        "chaos",
        "run",
        str(file),
        "--runs",
        str(options.runs_dir),
    ]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvops", *words],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], step: str) -> None:
    """Read what a run says until it is at a step."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(step):
            return
    raise AssertionError("".join(said))


def stopped(folder: Path) -> list[int]:
    """Processes that name this folder and are stopped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.fsencode(folder) in (entry / "cmdline").read_bytes() and (
                    (entry / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_ctrl_c_undoes(options: Options, tmp_path: Path) -> None:
    """An interrupted run takes its fault back, says so, and ends with 130."""
    process = command_line(options, tmp_path)
    try:
        wait_for(process, "hold")
        assert stopped(tmp_path)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=2 * WAIT_S)
    finally:
        process.kill()

    assert process.returncode == 130, said
    assert "INTERRUPTED" in said
    assert not Book(options.state_dir).dirty()


def test_a_killed_runner_leaves_nothing(options: Options, tmp_path: Path) -> None:
    """SIGKILL in the middle of the hold: the guardian undoes, and the pool under test is cleared up."""
    process = command_line(options, tmp_path)
    try:
        wait_for(process, "hold")
        assert stopped(tmp_path)
        process.kill()
        process.communicate(timeout=2 * WAIT_S)
        until(lambda: not Book(options.state_dir).dirty(), "the guardian has undone")
        until(lambda: not processes_of(tmp_path), "nothing of the pool runs", timeout_s=2 * WAIT_S)
        until(lambda: list((tmp_path / "pools").iterdir()) == [], "its files are gone")
    finally:
        process.kill()

    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("value", "tolerance", "good"),
    [
        (0.995, {"type": "range", "range": [0.99, 1.0]}, True),
        (0.9, {"type": "range", "range": [0.99, 1.0]}, False),
        (0.5, [0, 1], True),
        (1.0, 1.0, True),
        (0.9, True, False),
    ],
)
def test_tolerances(value: float, tolerance: object, good: bool) -> None:
    """Tolerances mean what they mean in the Chaos Toolkit."""
    assert within(value, tolerance) is good
