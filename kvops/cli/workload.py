"""``kvops workload``: makes and describes request traces."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output
from kvops.errors import Refused

COLUMNS: Final = (Column("figure"), Column("value"))


@options.group("workload")
def command() -> None:
    r"""
    Make or describe request traces, in the format of the traces that Mooncake publishes.

    \b
    Example:
      kvops workload agentic --requests 5000 --seed 7 --to agents.jsonl
    """


def _generator(name: str, text: str) -> None:
    @command.command(name, help=text)
    @click.option(
        "--requests", type=click.IntRange(1, 5_000_000), default=2_000, show_default=True, help="How many."
    )
    @click.option("--seed", type=int, default=1, show_default=True, help="The same seed, the same trace.")
    @click.option(
        "--to", default="-", metavar="FILE", show_default="standard output", help="Where to write it."
    )
    @click.option("--force", is_flag=True, help="Replace a file that is there.")
    @click.pass_obj
    def make(settings: Settings, requests: int, seed: int, to: str, force: bool) -> int:
        from kvops.inference.synth import WORKLOADS, generate
        from kvops.inference.trace import write_trace

        if to != "-" and Path(to).exists() and not force:
            raise Refused(f"{to} exists", fix="name another file, or add --force")
        count = write_trace(to, generate(WORKLOADS[name], requests=requests, seed=seed))
        if to == "-":
            return 0
        out = Output(settings)
        if out.structured:
            out.document({"workload": name, "seed": seed, "requests": count, "file": to})
        else:
            out.note(f"{count:,} requests in {to}    describe: kvops workload describe {to}")
        return 0


_generator(
    "synth",
    """Make a trace like published conversations: sessions of a few turns, a third of all tokens repeats.

    \b
    Example:
      kvops workload synth --requests 12000 --to chat.jsonl""",
)
_generator(
    "agentic",
    """Make a trace of tool loops: long shared prompts, many turns seconds apart, nearly everything repeats.

    \b
    Example:
      kvops workload agentic --to agents.jsonl""",
)


@command.command("describe")
@click.argument("trace")
@click.option("--requests", type=click.IntRange(1), help="Look only at so many.")
@click.pass_obj
def describe(settings: Settings, trace: str, requests: int | None) -> int:
    r"""
    Say what a trace contains, and the most that any cache could serve of it.

    \b
    Example:
      kvops workload describe conversation_trace.jsonl
    """
    from kvops.inference.trace import describe as facts_of
    from kvops.inference.trace import read_trace

    out = Output(settings)
    found = dataclasses.asdict(facts_of(read_trace(trace, requests=requests)))
    facts = {name: _rounded(name, value) for name, value in found.items()}
    if out.structured:
        out.document({"trace": trace, **facts})
        return 0
    out.table(COLUMNS, [{"figure": name, "value": _text(name, value, out)} for name, value in facts.items()])
    return 0


def _rounded(name: str, value: Any) -> Any:
    """With the digits that mean something: shares as a replay gives them, times to the millisecond."""
    return round(value, 6 if name.endswith("_limit") else 3) if isinstance(value, float) else value


def _text(name: str, value: Any, out: Output) -> str:
    if not out.human:
        return str(value)
    if name.endswith("_limit"):
        return f"{value:.2%}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
