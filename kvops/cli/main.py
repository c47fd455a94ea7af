"""
The ``kvops`` command: finds the command that was asked for, imports it, and turns how it ended into an exit
code.

Commands are named in ``COMMANDS`` alone; a module is imported when its command is used, so that ``kvops
--help`` and ``--version`` load little more than click. Each module holds its command as ``command``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

import click

from kvops import __version__
from kvops.cli.interrupt import Terminated
from kvops.cli.options import Command, Group
from kvops.errors import KvopsError, StartFailed

EXIT_OK: Final = 0
EXIT_NO: Final = 1
EXIT_USAGE: Final = 2
EXIT_UNSEEN: Final = 3
EXIT_LEFT_BEHIND: Final = 4
EXIT_REFUSED: Final = 5
EXIT_BUG: Final = 70
EXIT_INTERRUPTED: Final = 130

# What a full machine answers: no bug of ours, wherever it comes up.
_MACHINE_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Row(NamedTuple):
    """One command: where it lives, under which heading and with which words help lists it."""

    section: str
    help: str
    module: str


_RUN, _LOOK, _USE, _SETUP = "Run a pool", "Look", "Use and measure", "Set up"

COMMANDS: Final[dict[str, Row]] = {
    "start": Row(_RUN, "Start a group on this machine; returns when it is ready.", "start"),
    "stop": Row(_RUN, "Stop a local group.", "stop"),
    "restart": Row(_RUN, "Restart a local group, or some of its members.", "restart"),
    "drain": Row(_RUN, "Take stores or hosts out of use; waits until nothing is left.", "drain"),
    "undrain": Row(_RUN, "Let drained or cordoned stores take part again.", "undrain"),
    "cordon": Row(_RUN, "Put nothing new on stores; what they hold is read.", "cordon"),
    "ok-to-stop": Row(_RUN, "May these stores be taken away now?", "ok_to_stop"),
    "rollout": Row(_RUN, "Restart a group one node at a time, and resume where that stopped.", "rollout"),
    "master": Row(_RUN, "Who of several masters leads.", "master_cmd"),
    "serve": Row(_RUN, "Run one master or store in the foreground.", "serve"),
    "status": Row(_LOOK, "Is the pool healthy, and what is in it?", "status"),
    "events": Row(_LOOK, "What changed: breakers, stores, evictions.", "events"),
    "logs": Row(_LOOK, "What the processes of a local group wrote.", "logs"),
    "journal": Row(_LOOK, "What a master's journal says.", "journal_cmd"),
    "diagnose": Row(_LOOK, "The whole RDMA path of a host, with the cause and the fix.", "diagnose"),
    "explain": Row(_LOOK, "What a check means, and what an error text points to.", "explain"),
    "object": Row(_USE, "Get, put, list and remove objects.", "object"),
    "replay": Row(_USE, "Replay a request trace through the pool.", "replay"),
    "workload": Row(_USE, "Make or describe request traces.", "workload"),
    "bench": Row(_USE, "Measure the pool.", "bench"),
    "chaos": Row(_USE, "Break it on purpose, and prove that nobody else noticed.", "chaos"),
    "context": Row(_SETUP, "Which groups are known, and which is used.", "context_cmd"),
    "config": Row(_SETUP, "Settings, and where each came from.", "config_cmd"),
    "completion": Row(_SETUP, "Print a shell's completion script.", "completion"),
    "help": Row(_SETUP, "Help on a command or a topic, such as exit-codes.", "help"),
}

HIDDEN: Final[dict[str, Row]] = {"demo": Row("", "What make demo runs.", "demo")}
"""Commands that work and that no help or completion lists."""


class Root(Group):
    """The root: knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order help shows them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        row = COMMANDS.get(cmd_name) or HIDDEN.get(cmd_name)
        if row is None:
            return None
        found = import_module(f"kvops.cli.{row.module}").command
        assert isinstance(found, click.Command), f"kvops.cli.{row.module}.command is no click command"
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """From the table: nothing is imported for help."""
        for section in dict.fromkeys(row.section for row in COMMANDS.values()):
            with formatter.section(section):
                formatter.write_dl(
                    [(name, row.help) for name, row in COMMANDS.items() if row.section == section]
                )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """From the table as well: completion must be quick."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return list(Command.shell_complete(self, ctx, incomplete))
        return [
            CompletionItem(name, help=row.help)
            for name, row in COMMANDS.items()
            if name.startswith(incomplete)
        ]


@click.group("kvops", cls=Root)
@click.version_option(__version__, message="kvops %(version)s")
def cli() -> None:
    r"""
    Run, drain, diagnose and break (on purpose) the KV-cache pool of an LLM inference cluster.

    \b
    Example:
      kvops start --stores 3 && kvops status
    """


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(signum)


def main(argv: Sequence[str] | None = None, *, root: click.Command = cli) -> int:
    """Run ``kvops``, or another root, with arguments (the process's own by default); gives the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup asked for no end with the terminal
        signal.signal(signal.SIGHUP, _terminate)
    if "_KVOPS_COMPLETE" in os.environ:
        from kvops.cli.complete import register

        register()
        cli.main(args=args, prog_name="kvops", complete_var="_KVOPS_COMPLETE")
    code = _run(root, args)
    return _flush(code, args)


def _run(root: click.Command, args: list[str]) -> int:
    try:
        with root.make_context("kvops", args.copy()) as ctx:
            result = root.invoke(ctx)
        return result if isinstance(result, int) else EXIT_OK
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "kvops"
        # click puts each of several choices on a line of its own
        said = " ".join(error.format_message().split())
        return _report("UsageError", said, f"see {where} --help", EXIT_USAGE, args)
    except click.ClickException as error:
        return _report("UsageError", error.format_message(), "see kvops --help", EXIT_USAGE, args)
    except KvopsError as error:
        if isinstance(error, StartFailed):
            for line in error.log_lines:
                click.echo(f"  | {_printable(line)}", err=True)
        return _report(type(error).__name__, error.what, error.fix, error.exit_code, args)
    except (KeyboardInterrupt, click.Abort):
        return _report("Interrupted", "interrupted", "", EXIT_INTERRUPTED, args)
    except Terminated as end:
        name = signal.Signals(end.signum).name
        return _report("Interrupted", f"ended by {name}", "", 128 + end.signum, args)
    except BrokenPipeError as error:
        if _reader_is_gone():
            return EXIT_OK
        return _bug(error, args)
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            return _bug(error, args)
        what = error.strerror or str(error)
        if error.filename:
            what = f"{error.filename}: {what}"
        return _report(
            "MachineError", what, "the machine has run out of it: free some, then try again", EXIT_NO, args
        )
    except Exception as error:  # noqa: BLE001 (the one place where everything unexpected becomes exit code 70)
        return _bug(error, args)


def _report(kind: str, what: str, fix: str, code: int, args: list[str]) -> int:
    """An error as the caller can use it: JSON on stdout where that was asked for, else lines on stderr."""
    if wants_json(args):
        import json

        error = {"kind": kind, "what": what, "fix": fix, "exit_code": code}
        try:
            click.echo(json.dumps({"schema": 1, "error": error}, ensure_ascii=False))
        except OSError:
            pass  # nobody reads, or nothing can be written: the code still says it
    else:
        color = None if "NO_COLOR" not in os.environ else False
        click.secho("error: ", fg="red", bold=True, nl=False, err=True, color=color)
        click.echo(_printable(what), err=True)
        if fix:
            click.echo(f"fix:   {_printable(fix)}", err=True)
    return code


def wants_json(args: Sequence[str]) -> bool:
    """Whether the line asks for JSON, even a line that cannot be parsed."""
    for position, arg in enumerate(args):
        if arg == "--":
            return False
        if arg in ("-o", "--output") and list(args[position + 1 : position + 2]) in (["json"], ["jsonl"]):
            return True
        if arg in ("-ojson", "-ojsonl", "--output=json", "--output=jsonl"):
            return True
    return False


def _bug(error: BaseException, args: list[str]) -> int:
    """Keep the traceback in a file, name the file, say what to do with it."""
    import platform
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    machine = f"kvops {__version__}, Python {platform.python_version()}, {platform.platform()}"
    head = f"{machine}\nkvops {' '.join(args)}\n\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="kvops-crash-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(head + text)
        fix = f"report it with {file.name}"
    except OSError:
        click.echo(head + text, err=True)
        fix = "report it with the traceback above"
    said = next(iter(str(error).splitlines()), "")  # the rest may be the traceback of another process
    return _report("Bug", f"a bug in kvops: {type(error).__name__}: {said}", fix, EXIT_BUG, args)


def _printable(text: str) -> str:
    """Text that cannot steer a terminal: it may hold a key or a peer's words."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _reader_is_gone() -> bool:
    import select

    poll = select.poll()
    poll.register(1, 0)  # POLLERR is always reported: the other end of the pipe was closed
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def _flush(code: int, args: list[str]) -> int:
    """Write out what is buffered: a closed pipe is no failure, a full disk is one."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes again at exit and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        click.echo(f"error: cannot write the output: {error.strerror}", err=True)
        return code or EXIT_NO
    except (AttributeError, ValueError):
        pass  # stdout was closed before we began
    return code


if __name__ == "__main__":
    sys.exit(main())
