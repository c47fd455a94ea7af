"""What a run leaves behind survives its writers, and damage to it is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.chaos import history
from kvops.chaos.history import (
    Arm,
    Block,
    Event,
    Fault,
    FaultState,
    Finish,
    HistoryWriter,
    Kind,
    Operation,
    Outcome,
    Request,
    Run,
    Sample,
    outcome_of,
    read_run,
)
from kvops.errors import ConfigError, ParseError
from tests.chaos.histories import read
from tests.waiting import WAIT_S


def op(number: int) -> Operation:
    return Operation(
        op_id=f"c{number}",
        client="c",
        kind=Kind.GET,
        outcome=Outcome.OK,
        t_invoke_ns=number,
        t_return_ns=number + 1,
    )


CHILD = """
import os, resource, signal, sys
from pathlib import Path
from kvops.chaos import history
from kvops.chaos.history import HistoryWriter, Kind, Operation, Outcome, Run
path = Path(sys.argv[1])
def op(number):
    return Operation(op_id=f"c{number}", client="c", kind=Kind.GET, outcome=Outcome.OK, t_invoke_ns=number,
                     t_return_ns=number + 1)
"""


def child(code: str, path: Path, *, expect: int = 0) -> None:
    """Run code in a process of its own, which writes to ``path``."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(code), str(path)],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == expect, done.stderr.decode()


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Every type of row that was written is read back equal, from whichever file of the folder it is in."""
    rows = [
        Run(run_id="1", seed=7),
        Block(arm=Arm.FAULT, block=0, t_start_ns=5, t_end_ns=9, seed=7),
        Fault(state=FaultState.ACTIVE, t_ns=6, fault="process.pause", proof=("state T", "a read hung")),
        Event(t_ns=7, kind="breaker.opened", subject="c"),
        Sample(t_ns=8, subject="store-0", used_bytes=0),
        Finish(t_ns=10),
    ]
    request = Request(request="r1", client="c", outcome=Outcome.OK, t_intended_ns=6, losses={"MISS": 512})
    with (
        HistoryWriter(tmp_path / "runner.jsonl", sync=True) as runner,
        HistoryWriter(tmp_path / "c.jsonl") as client,
    ):
        for row in rows:
            runner.write(row)
        client.write(op(1))
        client.write(request)

    record = read_run(tmp_path)

    assert [record.run, *record.blocks, *record.faults, *record.events, *record.samples, record.end] == rows
    assert (record.operations, record.requests) == ((op(1),), (request,))
    assert record.complete


def test_killed_writer_tears_one_line_at_most(tmp_path: Path) -> None:
    """A writer that was killed after a flush leaves every row up to there, and one that appends later loses none."""
    path = tmp_path / "c.jsonl"
    child(
        """
        writer = HistoryWriter(path)
        writer.write(Run())
        for number in range(100):
            writer.write(op(number))
        writer.flush()
        os.write(os.open(path, os.O_WRONLY | os.O_APPEND), history.encode(op(100))[:30])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
        expect=-signal.SIGKILL,
    )
    torn = read_run(path)
    with HistoryWriter(path) as writer:
        writer.write(op(101))
    record = read_run(path)

    assert len(torn.operations) == 100
    assert [bad.torn for bad in torn.bad_lines] == [True]
    assert str(torn.bad_lines[0]).startswith("c.jsonl:102: torn: ")
    assert not torn.complete
    assert len(record.operations) == 101
    assert record.bad_line_count == 1


def test_damage_is_named_and_skipped() -> None:
    """A line of something else, an unknown type and a row without a needed field are named with their lines."""
    lines = [
        history.encode(Run()),
        b"\xff\xfe\n",
        b'{"type":"nonsense"}\n',
        b'{"type":"op"}\n',
        history.encode(op(3)),
    ]

    record = read(b"".join(lines))

    assert [(bad.line, bad.torn) for bad in record.bad_lines] == [(2, False), (3, False), (4, False)]
    assert record.operations == (op(3),)


def test_full_disk_never_stops_the_caller(tmp_path: Path) -> None:
    """While the disk takes nothing rows wait, then are dropped; the gap is in the history once there is room."""
    path = tmp_path / "c.jsonl"
    # A limit on the size of files stands for a full disk; only the child is to feel it.
    child(
        """
        history.BUFFER_BYTES_MAX = 2000
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        writer = HistoryWriter(path)
        writer.write(Run())
        writer.write(op(0))
        writer.flush()
        for number in range(1, 1001):
            writer.write(op(number))
        assert not writer.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.close()
        """,
        path,
    )

    record = read_run(path)

    assert len(record.operations) + sum(gap.rows for gap in record.gaps) == 1001
    assert [gap.why for gap in record.gaps] == ["File too large"]
    assert not record.complete


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")
def test_a_reserve_holds_when_the_disk_is_full(tmp_path: Path) -> None:
    """Whoever keeps room for its rows can write them when others have filled the disk, and says when it cannot."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvops-test", str(tmp_path)]
    subprocess.run(mount, check=True, timeout=WAIT_S)
    try:
        with (
            HistoryWriter(tmp_path / "kept.jsonl", reserve_bytes=64 << 10) as kept,
            HistoryWriter(tmp_path / "bare.jsonl") as bare,
        ):
            with (tmp_path / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
                while True:
                    ballast.write(bytes(4096))
            for writer in (kept, bare):
                writer.write(op(1))
                writer.flush()
        assert (kept.trouble, bare.trouble) == ("", "No space left on device")
        assert read_run_rows(tmp_path / "kept.jsonl") == 1
        assert read_run_rows(tmp_path / "bare.jsonl") == 0
        assert (tmp_path / "kept.jsonl").stat().st_blocks * 512 <= 4096, "the reserve was not given back"
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True, timeout=WAIT_S)


def read_run_rows(path: Path) -> int:
    """Lines of a history."""
    return len(path.read_bytes().splitlines())


def test_no_history_says_what_to_name(tmp_path: Path) -> None:
    """A missing path, an empty folder, a history without its run row, and one from a later kvops are refused."""
    with pytest.raises(ConfigError, match="there is no history"):
        read_run(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no history"):
        read_run(tmp_path)
    with pytest.raises(ParseError, match="no run row"):
        read(history.encode(op(1)))
    with pytest.raises(ParseError, match="schema 2"):
        read(history.encode(Run(schema=2)))


def test_fault_windows_are_put_together_from_states() -> None:
    """Two injections on one target are two windows; one that was never proven has no active time."""
    rows = [
        Run(),
        Fault(state=FaultState.INJECTING, t_ns=1, fault="f", target="t", commands=("kill -STOP 1",)),
        Fault(state=FaultState.ACTIVE, t_ns=2, fault="f", target="t", lost_share=0.5, capacity_share=0.25),
        Fault(state=FaultState.UNDOING, t_ns=3, fault="f", target="t", commands=("kill -CONT 1",)),
        Fault(state=FaultState.CLEAN, t_ns=4, fault="f", target="t"),
        Fault(state=FaultState.INJECTING, t_ns=5, fault="f", target="t"),
        Fault(state=FaultState.NOT_ACTIVE, t_ns=6, fault="f", target="t", why="state S"),
        Fault(state=FaultState.DIRTY, t_ns=7, fault="f", target="t", commands=("by hand",)),
    ]

    first, second = read(b"".join(history.encode(row) for row in rows)).fault_windows()

    assert (first.t_inject_ns, first.t_active_ns, first.t_undo_ns, first.t_clean_ns) == (1, 2, 3, 4)
    assert (first.lost_share, first.capacity_share, first.dirty) == (0.5, 0.25, False)
    assert (first.commands, first.undo_commands) == (("kill -STOP 1",), ("kill -CONT 1",))
    assert (second.t_active_ns, second.dirty, second.why) == (None, True, "state S")


@pytest.mark.parametrize(
    ("kind", "reason", "outcome"),
    [
        (Kind.GET, "MISS", Outcome.OK),
        (Kind.GET, "TIMEOUT", Outcome.FAIL),
        (Kind.PUT, "TIMEOUT", Outcome.INFO),
        (Kind.PUT, "BREAKER_OPEN", Outcome.FAIL),
        (Kind.REMOVE, "MASTER_DOWN", Outcome.INFO),
    ],
)
def test_outcome_follows_from_the_reason(kind: Kind, reason: str, outcome: Outcome) -> None:
    """A write without an answer may have happened; a read without one, or a refused write, certainly did not."""
    assert outcome_of(kind, reason) is outcome


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Whatever follows the first row, the reader names it as damage and goes on."""
    record = read(history.encode(Run(seed=3)) + data)

    assert record.run.seed == 3
