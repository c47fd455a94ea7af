"""The root command: help everywhere, exit codes, errors in the form asked for, what is not loaded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

import kvops
from kvops.cli import main
from kvops.cli.interrupt import Terminated
from kvops.cli.main import COMMANDS, Root, wants_json
from kvops.errors import KvopsError

if TYPE_CHECKING:
    from tests.cli.conftest import Run


def every_command() -> list[tuple[str, ...]]:
    """The words of every command and command below it."""
    found: list[tuple[str, ...]] = []
    for name in COMMANDS:
        found.append((name,))
        command = main.cli.get_command(click.Context(main.cli), name)
        if isinstance(command, click.Group):
            found += [(name, inner) for inner in command.list_commands(click.Context(command))]
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has help, with an example and the options that go anywhere."""
    code = main.main([*words, "--help"])

    said = capsys.readouterr().out
    assert code == 0
    assert f"kvops {' '.join(words)}" in said
    assert re.search(r"Examples?:\n\s+.*kvops", said)
    assert "--output" in said


def test_root_help(run: Run) -> None:
    """The root's help lists every command; without arguments it is shown too, and is no mistake."""
    alone, asked = run(), run("--help")

    assert alone.returncode == asked.returncode == 0
    assert alone.stdout == asked.stdout
    assert all(f"\n  {name} " in asked.stdout for name in COMMANDS)


def test_the_package_shows_what_it_has() -> None:
    """Completion in a Python shell offers connect, although nothing has imported it yet."""
    assert {"connect", "Pool", "PutOptions", "Outcome", "Reason"} <= set(dir(kvops))


@pytest.mark.parametrize("name", ["bench", "object", "workload"])
def test_a_groups_list_is_not_cut(name: str, run: Run) -> None:
    """What a command does is said whole where commands are listed."""
    listed = run(name, "--help").stdout.partition("Commands:")[2]

    assert listed
    assert "..." not in listed


HEAVY = ("numpy", "grpc", "rich", "yaml", "msgspec", "asyncio", "uvloop", "psutil")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["help", "exit-codes"], ["start", "--help"]])
def test_help_loads_little(args: list[str], kvops_env: dict[str, str]) -> None:
    """Help and version answer at once because they load nothing heavy."""
    code = (
        f"import sys; from kvops.cli.main import main; main({args!r}); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=kvops_env, check=True
    )

    heavy = HEAVY if args != ["start", "--help"] else ("grpc", "rich", "numpy", "uvloop")
    assert not set(heavy) & set(done.stderr.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["stort"], "Did you mean start"),
        (["object", "remove"], "Did you mean rm"),
        (["get", "key"], "Did you mean object get"),
        (["list"], "Did you mean object ls"),
        (["doctor"], "Did you mean chaos doctor"),
        (["completion"], "Choose from: bash, zsh, fish"),
        (["--nope"], "No such option"),
        (["start", "--stores", "x"], "--stores"),
        (["start", "--segment-size", "1"], "its unit is missing"),
        (["start", "--segment-size", "5B"], "multiple of 4096"),
        (["start", "--transports", "udp"], "unknown transport udp"),
        (["start", "--listen", "nowhere"], "is not an address"),
        (["status", "--timeout", "5"], "is not a duration"),
        (["status", "-o", "xml"], "xml"),
        (["object", "nope"], "No such command"),
        (["serve", "store"], "--config"),
        (["serve", "master", "--config", "/no/such/file"], "cannot read /no/such/file"),
        (["-g", "nope", "status"], "there is no group nope"),
        (["-g", "../x", "status"], "cannot be a group's name"),
        (["help", "nope"], "No command or topic"),
        (["context", "show"], "start it: kvops start"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage(args: list[str], words: str, run: Run) -> None:
    """A mistake on the line is exit code 2, says what is wrong and what to do, and nothing on stdout."""
    done = run(*args)

    assert done.returncode == 2
    assert words in done.stderr
    assert "fix:" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "args", [["-o", "json", "--nope"], ["status", "--output=json", "--nope"], ["-ojson", "stort"]]
)
def test_json_errors(args: list[str], run: Run) -> None:
    """Where JSON was asked for, errors are JSON on stdout too, even of a line that cannot be parsed."""
    done = run(*args)

    document = json.loads(done.stdout)
    assert document["schema"] == 1
    assert document["error"]["exit_code"] == done.returncode == 2
    assert document["error"]["fix"]


@pytest.mark.parametrize(
    ("line", "json_wanted"),
    [
        ("-o json x", True),
        ("x --output=jsonl", True),
        ("-ojson", True),
        ("-o table", False),
        ("object put -- -o json", False),
        ("-o", False),
    ],
)
def test_wants_json(line: str, json_wanted: bool) -> None:
    """JSON is recognised in every way to write the option, and not behind --."""
    assert wants_json(line.split()) is json_wanted


class Failing(Root):
    """A root whose one command fails in a given way."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("kvops")
        self.error = error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """A command that raises."""

        def fail() -> None:
            raise self.error

        return click.Command(cmd_name, callback=fail)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KvopsError("no", fix="do"), 1),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (Terminated(signal.SIGTERM), 143),
        (Terminated(signal.SIGHUP), 129),
        (OSError(28, "No space left on device", "/x"), 1),
        (click.exceptions.Exit(7), 7),
    ],
    ids=["ours", "ctrl-c", "abort", "sigterm", "sighup", "disk full", "exit"],
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """However a command ends, its exit code is one of the table's."""
    assert main.main(["fail"], root=Failing(error)) == code
    assert "Traceback" not in capsys.readouterr().err


def test_our_own_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bug of ours is exit code 70; the traceback is in a file that the message names."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    code = main.main(["fail"], root=Failing(ZeroDivisionError("oops\nTraceback of an engine")))

    said = capsys.readouterr().err
    (file,) = tmp_path.glob("kvops-crash-*.txt")
    assert code == 70
    assert str(file) in said
    assert "ZeroDivisionError: oops" in file.read_text()
    assert "Traceback" not in said


def test_a_bug_met_with_a_strange_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments that are no UTF-8 do not keep a bug from being reported."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    code = main.main(["fail\udcff"], root=Failing(ZeroDivisionError("oops")))

    (file,) = tmp_path.glob("kvops-crash-*.txt")
    assert code == 70
    assert str(file) in capsys.readouterr().err
    assert "\\udcff" in file.read_text()


INTERRUPTED_WHILE_LOADING = """
import os, runpy, signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.argv = ["kvops", "--help"]
runpy.run_module("kvops", run_name="__main__")
"""


def test_ctrl_c_while_loading(kvops_env: dict[str, str]) -> None:
    """Ctrl-C before the command has begun ends it as any other program, without a traceback."""
    command = [sys.executable, "-c", INTERRUPTED_WHILE_LOADING]
    done = subprocess.run(command, capture_output=True, env=kvops_env, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("closed", ["reader", "stdout"])
def test_closed_output(closed: str, kvops_env: dict[str, str]) -> None:
    """A reader that has seen enough (| head), or no stdout at all, is no failure and no traceback."""
    command = [sys.executable, "-m", "kvops", "--help"]
    if closed == "stdout":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=kvops_env, check=False)
    os.close(writing)

    assert (done.returncode, done.stderr) == (0, b"")


def test_full_disk(kvops_env: dict[str, str]) -> None:
    """Output that cannot be written is a failure that says so."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvops", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=kvops_env,
            check=False,
        )

    assert done.returncode == 1
    assert b"No space left on device" in done.stderr


def test_hostile_text(run: Run) -> None:
    """What the line holds never steers the terminal."""
    done = run("-g", "a\x1b[31mb", "status")

    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, run: Run) -> None:
    """Each shell gets a script that names our completion variable."""
    done = run("completion", shell)

    assert done.returncode == 0
    assert "_KVOPS_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("kvops st", "status"), ("kvops object p", "put"), ("kvops start --seg", "--segment-size")],
)
def test_completes(words: str, expected: str, run: Run) -> None:
    """Commands, commands below them and options are completed."""
    env = {"_KVOPS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}

    assert expected in run(env=env).stdout


def test_help_topics(run: Run) -> None:
    """The exit codes are a page of help, and help NAME is NAME --help."""
    assert "70" in run("help", "exit-codes").stdout
    assert run("help", "object", "get").stdout == run("object", "get", "--help").stdout
