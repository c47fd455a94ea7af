"""What every command shares: the options that go anywhere, values with units, and the settings they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.errors import ParseError

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]  # generic for type checkers alone: click 8.1's cannot be subscripted
else:
    _ParamType = click.ParamType

FORMATS: Final = ("table", "wide", "json", "jsonl", "name", "tsv")
HELP_WIDTH: Final = 100
SYNONYMS: Final = {"list": "ls", "remove": "rm", "delete": "rm", "del": "rm", "ps": "status", "log": "logs"}
"""What somebody may type first, where another word is the command's name."""
DEEPER: Final = {
    **dict.fromkeys(("get", "put", "stat", "rm", "ls", "stats"), "object"),
    **dict.fromkeys(("doctor", "catalog", "run", "plan", "validate", "inject", "abort", "recover"), "chaos"),
    **dict.fromkeys(("matrix", "watch"), "diagnose"),
    "agentic": "workload",
}
"""Commands of a group that somebody may look for without it."""
SENTENCE_MAX: Final = 200  # of a command in its group's list


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options that go anywhere on the line; None means not said."""

    group: str | None = None
    state_dir: Path | None = None
    output: str | None = None
    timeout_ms: int | None = None
    color: str | None = None
    quiet: bool = False
    verbose: int = 0

    def timeout_s(self, default: float = 2.0) -> float:
        """How long to wait, in seconds; a command says what it waits by default."""
        return default if self.timeout_ms is None else self.timeout_ms / 1000


class Unit(_ParamType):
    """An option's value with a unit, read by a function of ``kvops.cli.units`` (imported when needed)."""

    def __init__(self, name: str, parser: str) -> None:
        self.name = name
        self._parser = parser

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What help shows; click 8.1 passes no context."""
        return self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value as the parser gives it; defaults that are numbers already pass."""
        if not isinstance(value, str):
            return value
        from kvops.cli import units

        try:
            return getattr(units, self._parser)(value)
        except ParseError as error:
            self.fail(f"{error.what}; {error.fix}", param, ctx)


DURATION_MS: Final = Unit("duration", "parse_duration_ms")
SIZE_BYTES: Final = Unit("size", "parse_size_bytes")
RATE_BPS: Final = Unit("rate", "parse_rate_bps")


class Address(_ParamType):
    """``HOST:PORT``."""

    name = "host:port"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """What help shows."""
        return "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as it was written, if it is one."""
        from kvops.addresses import split_address
        from kvops.errors import UsageError

        try:
            split_address(value)
        except UsageError as error:
            self.fail(f"{error.what}; {error.fix}", param, ctx)
        return str(value)


def offer(what: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What completion offers for a parameter: a function of ``kvops.cli.complete`` (imported when needed)."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from kvops.cli import complete as completers

        found: list[str] = getattr(completers, what)(ctx, param, incomplete)
        return found

    return complete


ADDRESS: Final = Address()
PATH: Final = click.Path(path_type=Path)

_COMMON: Final = ("group", "state_dir", "output", "timeout_ms", "color", "quiet", "verbose")


def common_options(formats: Sequence[str] = FORMATS) -> list[click.Parameter]:
    """The options that every command takes, and the root before it."""
    return [
        click.Option(
            ["-g", "--group"],
            metavar="NAME",
            help="Group to act on (KVOPS_GROUP).",
            shell_complete=offer("groups"),
        ),
        click.Option(
            ["-o", "--output"],
            type=click.Choice(formats),
            metavar="FORMAT",
            help=f"Output: {', '.join(formats)}.",
        ),
        click.Option(
            ["--state-dir"], type=PATH, metavar="DIR", help="Where local groups live (KVOPS_STATE_DIR)."
        ),
        click.Option(
            ["--timeout", "timeout_ms"],
            type=DURATION_MS,
            metavar="DURATION",
            help="How long to wait, such as 10s.",
        ),
        click.Option(
            ["--color"],
            type=click.Choice(["auto", "always", "never"]),
            help="Colours; also NO_COLOR, FORCE_COLOR.",
        ),
        click.Option(["-q", "--quiet"], is_flag=True, help="Data and errors only."),
        click.Option(["-v", "--verbose"], count=True, help="Say more."),
    ]


def merge(ctx: click.Context) -> None:
    """Take the shared options out of a command's parameters; what is said nearer to the command wins."""
    settings: Settings = ctx.obj if isinstance(ctx.obj, Settings) else Settings()
    said = {name: ctx.params.pop(name) for name in _COMMON if name in ctx.params}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value not in (None, False, 0)}
    # --timeout 0s is said, though it equals nothing.
    if said.get("timeout_ms") is not None:
        changes["timeout_ms"] = said["timeout_ms"]
    changes["verbose"] = settings.verbose + int(said.get("verbose") or 0)
    ctx.obj = replace(settings, **changes)


class _Shared:
    """Help that keeps a command's own options apart from those that go anywhere."""

    params: list[click.Parameter]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        shared: list[tuple[str, str]] = []
        for param in self.params:
            record = param.get_help_record(ctx)
            if record is not None:
                (shared if param.name in _COMMON else own).append(record)
        own.append(("--help", "Show this page."))
        with formatter.section("Options"):
            formatter.write_dl(own)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        with formatter.section("Options of every command"):
            formatter.write_dl(shared)


def _with_paragraph_marks(attributes: dict[str, Any]) -> dict[str, Any]:
    """
    Help from raw docstrings, which our linter wants where there is a backslash: click looks for the backspace
    character itself before a paragraph whose lines it must not join.
    """
    if attributes.get("help"):
        attributes["help"] = attributes["help"].replace("\\b\n", "\b\n")
    return attributes


class Command(_Shared, click.Command):
    """A command that takes the shared options; its callback finds ``Settings`` by ``@click.pass_obj``."""

    def __init__(self, *args: Any, formats: Sequence[str] = FORMATS, **kwargs: Any) -> None:
        kwargs.setdefault(
            "context_settings", {"help_option_names": ["--help", "-h"], "max_content_width": HELP_WIDTH}
        )
        super().__init__(*args, **_with_paragraph_marks(kwargs))
        self.params.extend(common_options(formats))

    def invoke(self, ctx: click.Context) -> Any:
        """Merge the shared options, then run."""
        merge(ctx)
        return super().invoke(ctx)


@click.pass_context
def _help_if_alone(ctx: click.Context) -> int:
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


class Group(_Shared, click.Group):
    """A command with commands below it."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault(
            "context_settings", {"help_option_names": ["--help", "-h"], "max_content_width": HELP_WIDTH}
        )
        # Without a command below it, a group shows help: that is a look, not a mistake.
        kwargs |= {"invoke_without_command": True, "no_args_is_help": False, "callback": _help_if_alone}
        super().__init__(*args, **_with_paragraph_marks(kwargs))
        self.params.extend(common_options())

    def invoke(self, ctx: click.Context) -> Any:
        """Merge the shared options, then go on to the command below."""
        merge(ctx)
        return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest names when there is no such command."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from difflib import get_close_matches

            known = self.list_commands(ctx)
            word = SYNONYMS.get(name, name)
            near = [word] if word in known else get_close_matches(name, known, n=3)
            if DEEPER.get(word) in known:
                near = [f"{DEEPER[word]} {word}"]
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, with whole sentences: they wrap, and are not cut after 45 characters."""
        names = self.list_commands(ctx)
        found = [(name, one) for name in names if (one := self.get_command(ctx, name)) and not one.hidden]
        if found:
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(name, one.get_short_help_str(limit=SENTENCE_MAX)) for name, one in found]
                )


def command(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a kvops command."""
    return click.command(name, cls=Command, **attributes)


def group(name: str, **attributes: Any) -> Callable[[Callable[..., Any]], Group]:
    """Make a function a kvops command with commands below it."""
    return click.group(name, cls=Group, **attributes)
