"""How results are printed in each format, on a terminal and through a pipe."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvops.cli.options import Settings
from kvops.cli.output import Column, Output, Progress, printable

COLUMNS = (Column("name"), Column("state"), Column("used_bytes", "bytes"), Column("tags", "list", wide=True))
ROWS: list[dict[str, Any]] = [
    {"name": "store-0", "state": "ready", "used_bytes": 1536, "tags": ["shm", "tcp"]},
    {"name": "evil\x1b[31m\tname", "state": "down", "used_bytes": None, "tags": []},
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def shown(monkeypatch: pytest.MonkeyPatch, settings: Settings, *, terminal: bool) -> str:
    """The rows as a command would print them."""
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Output(settings)
    out.header("local (local)", "healthy")
    out.rows("stores", COLUMNS, ROWS, group="local")
    return stream.getvalue()


def test_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets the group first, then a table for people, with no foreign control characters."""
    said = shown(monkeypatch, Settings(color="never"), terminal=True)

    lines = said.splitlines()
    assert lines[0] == "local (local)  healthy"
    assert lines[1].split() == ["NAME", "STATE", "USED"]
    assert "1.5 KiB" in lines[2]
    assert "\x1b" not in said
    assert "evil\\x1b[31m\\tname" in said


def test_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe gets tab-separated values, uncut, sizes in bytes, all columns, one row a line."""
    lines = shown(monkeypatch, Settings(), terminal=False).splitlines()

    assert lines[0].split("\t") == ["name", "state", "used_bytes", "tags"]
    assert lines[1].split("\t") == ["store-0", "ready", "1536", "shm,tcp"]
    assert [line.count("\t") for line in lines] == [3, 3, 3]


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON is one document with its schema and the values as they are, wherever it goes."""
    for terminal in (True, False):
        document = json.loads(shown(monkeypatch, Settings(output="json"), terminal=terminal))

        assert document == {"schema": 1, "stores": ROWS, "group": "local"}


def test_jsonl_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines are one object a row; names are one a line, and nothing else."""
    lines = shown(monkeypatch, Settings(output="jsonl"), terminal=False).splitlines()
    names = shown(monkeypatch, Settings(output="name"), terminal=True).splitlines()

    assert [json.loads(line) for line in lines] == ROWS
    assert names == ["store-0", "evil\\x1b[31m\\tname"]


@pytest.mark.parametrize(
    ("flag", "env", "terminal", "colored"),
    [
        (None, {}, True, True),
        (None, {}, False, False),
        (None, {"NO_COLOR": "1"}, True, False),
        (None, {"FORCE_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        (None, {"TERM": "dumb"}, True, False),
    ],
)
def test_color(
    flag: str | None, env: dict[str, str], terminal: bool, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag decides, then NO_COLOR and FORCE_COLOR, then whether a person watches."""
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())

    assert Output(Settings(color=flag)).color is colored


@given(st.text(max_size=50))
def test_printable(text: str) -> None:
    """Whatever a key holds, what is printed is one line without control characters."""
    assert printable(text).isprintable()


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, progress is about ten plain lines on stderr, and none with -q."""
    with Progress(Settings(), "replay", total=1000) as bar:
        for _ in range(1000):
            bar.advance(1, "hit 61 %")
    with Progress(Settings(quiet=True), "replay", total=1000) as quiet:
        quiet.advance(1000)

    said = capsys.readouterr()
    assert said.out == ""
    assert 9 <= len(said.err.splitlines()) <= 10
    assert "replay  100/1,000  hit 61 %" in said.err


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, progress is a bar on stderr, and lines said meanwhile stay."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)

    with Progress(Settings(), "replay", total=2) as bar:
        bar.advance(1)
        bar.say("at 30 s  store-2 killed [on purpose]")
        bar.advance(1)

    assert "store-2 killed [on purpose]" in stream.getvalue()
    assert "2/2" in stream.getvalue()
