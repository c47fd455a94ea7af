"""``kvops bench``: measures the pool, each benchmark with processes of its own that end with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import click

from kvops.cli import options
from kvops.cli.options import Settings
from kvops.cli.output import Column, Output, Progress

BENCHMARKS: Final = {
    "lookup": """Lookups over the wire: presence, and location with a lease.

    By batch (1, 32, 128, 1,000 keys), objects (50 k, 1 M), and client processes (1, 2, 4). About 3 minutes.""",
    "read": """Reads by shm and tcp, whole and verified, beside the machine's own copy and socket.

    64 KiB, 1 MiB and 4 MiB, in batches of 1, 16 and 64. About 3 minutes, 2 GiB of memory.""",
    "write": """Writes from registered memory, by the Unix socket, by tcp, beside bare sockets.

    64 KiB, 1 MiB and 4 MiB, in batches of 1, 16 and 64. About 4 minutes, 2 GiB of memory.""",
    "evict": """What eviction costs readers: lookups while quiet, quiet again, written to, and evicting.

    6,000 objects a second of a million are evicted. About 3 minutes.""",
    "memory": """The master's memory for each object, and its longest pause while it grows.

    1 M and 5 M objects. About 2 minutes, 2 GiB of memory.""",
    "drain": """A drain's call, readers beside its sweep, a migration, SIGTERM and SIGKILL of a store.

    1 k, 100 k and 1 M objects. About 8 minutes, 2 GiB of memory.""",
    "start": """A store's start and stop: memory prepared beside the kernel's own pace, and its first use.

    1, 4 and 8 GiB, where that fits. About 4 minutes.""",
    "failover": """Three masters by etcd: the leader dies, hangs or is cut off, under load; the cost of replication.

    Needs the program etcd. About 5 minutes.""",
    "hung": """What callers notice of a store, and of a master, that is stopped by SIGSTOP.

    About 2 minutes.""",
    "replay_quality": """Token hit ratio of eviction on a trace, beside exact LRU with as much memory.

    In virtual time. About 1 minute.""",
}

COLUMNS: Final = (
    Column("name"),
    Column("params"),
    Column("value"),
    Column("unit"),
    Column("spread"),
    Column("runs", "list", wide=True),
)


@options.group("bench")
def command() -> None:
    r"""
    Measure the pool on this machine.

    Each benchmark starts processes of its own in a temporary directory and ends them. A figure is the median of
    its runs; the spread is the lowest and the highest. -o json names the machine.

    \b
    Examples:
      kvops bench lookup
      kvops bench all --quick -o json > bench.json
    """


def _benchmark(name: str, text: str, *extra: Callable[[Any], Any]) -> None:
    def measure(settings: Settings, quick: bool, repeats: int, **more: Any) -> int:
        return _run(settings, [name], quick=quick, repeats=repeats, **more)

    _with_options(name.replace("_", "-"), text, measure, *extra)


def _with_options(name: str, text: str, measure: Callable[..., int], *extra: Callable[[Any], Any]) -> None:
    decorators = (
        command.command(name, help=f"{text}\n\n    \b\n    Example:\n      kvops bench {name} --quick"),
        *extra,
        click.option("--quick", is_flag=True, help="A few seconds, for CI: the order of magnitude only."),
        click.option(
            "--repeats",
            type=click.IntRange(1, 50),
            default=5,
            show_default=True,
            help="Runs behind each figure.",
        ),
        click.pass_obj,
    )
    made: Any = measure
    for decorate in reversed(decorators):
        made = decorate(made)


def _run(settings: Settings, names: list[str], *, quick: bool, repeats: int, **more: Any) -> int:
    from kvops.bench.machine import machine
    from kvops.bench.model import Effort, Result

    out = Output(settings)
    facts = machine()
    results: list[Result] = []
    began = time.monotonic()
    with Progress(settings, "bench", total=0) as progress:

        def tell(result: Result) -> None:
            results.append(result)
            progress.advance(1, f"{result.name} {result.row()['value']} {result.unit}")

        for name in names:
            module = import_module(f"kvops.bench.{name}")
            module.run(Effort(quick=quick, repeats=repeats), tell, **(more if len(names) == 1 else {}))
    rows = [result.row() for result in results]
    if out.structured:
        out.rows("results", COLUMNS, rows, machine=facts, took_s=round(time.monotonic() - began, 1))
        return 0
    loads = ", ".join(map(str, facts["load_average"]))
    out.header(
        f"{facts['cpu']}, {facts['cores']} cores", f"{facts['kernel']}  {facts['python']}  load {loads}"
    )
    out.table(COLUMNS, [_shown(row) for row in rows])
    return 0


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose cells are texts."""
    low, high = row["spread"]
    params = " ".join(f"{name}={value}" for name, value in row["params"].items())
    return {**row, "params": params, "value": f"{row['value']:,}", "spread": f"{low:,} … {high:,}"}


_TRACE: Final = click.option(
    "--trace", type=options.PATH, metavar="FILE", help="A trace in Mooncake's format; else a generated one."
)

for _name, _text in BENCHMARKS.items():
    _benchmark(_name, _text, *([_TRACE] if _name == "replay_quality" else []))


def _all(settings: Settings, quick: bool, repeats: int) -> int:
    return _run(settings, list(BENCHMARKS), quick=quick, repeats=repeats)


_with_options("all", "All of them, one after the other. About 30 minutes.", _all)
