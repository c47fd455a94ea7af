"""``kvops logs``: last lines, new lines, and one stream of several members."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.cli.logs import Tail
from kvops.files import write_yaml
from kvops.fleet.group_state import GroupState, Member
from kvops.fleet.local import LocalGroup
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Run


@pytest.fixture
def group(tmp_path: Path) -> LocalGroup:
    """A stopped group whose members left logs."""
    group = LocalGroup(tmp_path / "state", "local")
    (group.folder / "logs").mkdir(parents=True)
    members = [
        Member(name="master-0", role="master", host="host-0"),
        Member(name="store-0", role="store", host="host-0"),
    ]
    write_yaml(group.state_file, GroupState(group="local", members=members))
    group.log_file("master-0").write_text(
        '{"timestamp": "2031-01-01T00:00:01Z", "level": "info", "event": "store.mounted"}\n'
        '{"timestamp": "2031-01-01T00:00:03Z", "level": "warning", "event": "store.lost"}\n'
    )
    group.log_file("store-0").write_text(
        '{"timestamp": "2031-01-01T00:00:02Z", "level": "info", "event": "object.stored"}\n'
        "Traceback, no JSON \x1b[2J\n"
    )
    return group


def test_one_stream(group: LocalGroup, run: Run) -> None:
    """Lines of several members come in the order of their times; a line without one stays where it was."""
    done = run("logs", "-o", "jsonl")

    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("event", line.get("line", "")[:9]) for line in lines] == [
        "store.mounted",
        "object.stored",
        "Traceback",
        "store.lost",
    ]
    assert [line["member"] for line in lines] == ["master-0", "store-0", "store-0", "master-0"]


@pytest.mark.parametrize(
    ("args", "count"),
    [
        (["master"], 2),
        (["stores"], 2),
        (["store-0", "-n", "1"], 1),
        (["--since", "2031-01-01T00:00:02Z"], 2),
        (["-n", "0"], 0),
    ],
)
def test_choice(args: list[str], count: int, group: LocalGroup, run: Run) -> None:
    """Members, roles, a number of lines and a time choose what is shown."""
    assert len(run("logs", *args).stdout.splitlines()) == count


def test_terminal_is_safe(group: LocalGroup, run: Run) -> None:
    """A log line cannot steer the terminal."""
    assert "\x1b" not in run("logs", "store-0").stdout


def test_through_a_pipe(group: LocalGroup, run: Run) -> None:
    """One member's lines come as they were written, whatever letters they hold; several carry their names."""
    line = '{"event": "x", "text": "a\u00a0b\tc"}'
    group.log_file("master-0").write_text(f"{line}\n")

    assert run("logs", "master-0").stdout == f"{line}\n"
    assert run("logs", "master-0", "store-0").stdout.startswith("master-0\t{")


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_following_ends_quietly(
    group: LocalGroup, kvops_env: dict[str, str], signum: signal.Signals, code: int
) -> None:
    """Ctrl-C and SIGTERM are how -f ends: the exit code says so, and nothing else."""
    argv = [sys.executable, "-m", "kvops", "logs", "store-0", "-f", "-q"]
    with subprocess.Popen(argv, env=kvops_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with group.log_file("store-0").open("a") as log:
            log.write("fresh\n")
        while process.stdout.readline() != b"fresh\n":
            pass  # it follows
        process.send_signal(signum)
        _, said = process.communicate(timeout=WAIT_S)

    assert (process.returncode, said) == (code, b"")


def test_unknown_member(group: LocalGroup, run: Run) -> None:
    """A member that is none is a usage error that names those there are."""
    done = run("logs", "store-7")

    assert done.returncode == 2
    assert "master-0, store-0" in done.stderr


@given(
    st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=30)),
    st.integers(0, 5),
)
def test_last_lines(lines: list[str], count: int) -> None:
    """The last lines of a file are its last lines, whatever they hold."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())

        assert Tail("m", path).last(count) == (lines[-count:] if count else [])


def test_long_file(tmp_path: Path) -> None:
    """The last lines of a file much longer than a block are found from its end."""
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(50_000)))

    assert Tail("m", path).last(2) == ["line 49998", "line 49999"]


def test_fresh_lines(tmp_path: Path) -> None:
    """New lines are shown once each and whole, also when the file is set aside and begun anew."""
    path = tmp_path / "log"
    path.write_text("old\n")
    tail = Tail("m", path)
    tail.last(10)

    with path.open("a") as file:
        file.write("one\ntw")
    first = list(tail.fresh())
    with path.open("a") as file:
        file.write("o\n")
    second = list(tail.fresh())
    path.rename(tmp_path / "log.1")
    between = list(tail.fresh())
    path.write_text("three\n")

    assert (first, second, between, list(tail.fresh())) == (["one"], ["two"], [], ["three"])


def test_no_log_yet(tmp_path: Path) -> None:
    """A member that has not written yet has no lines, and they are seen when they come."""
    tail = Tail("m", tmp_path / "log")

    assert tail.last(10) == []
    (tmp_path / "log").write_text("first\n")
    assert list(tail.fresh()) == ["first"]
