"""
The demonstration that ``make demo`` runs: a pool serves a trace, loses a store in the middle, and carries on.

It starts a group of its own in a temporary folder, touches no other, and leaves nothing but its report.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvops import __version__
from kvops.cli import options
from kvops.cli.context import Target, resolve
from kvops.cli.options import PATH, SIZE_BYTES, Settings
from kvops.cli.output import Output, Progress
from kvops.cli.replay import Said, exit_code, make_config, read_requests, run
from kvops.errors import LeftBehind, Refused
from kvops.fleet.local import LocalGroup
from kvops.fleet.start_plan import StartPlan
from kvops.limits import GIB, MIB

if TYPE_CHECKING:
    from kvops.inference.results import Impact, ReplayEvent, ReplayResult

GROUP: Final = "demo"
STORES: Final = 3
VICTIM: Final = "store-2"
REQUESTS: Final = 2_000
SEGMENT_BYTES: Final = GIB
SEGMENT_BYTES_SMALL: Final = 256 * MIB  # where a full one does not fit: half of what the workload writes does
L2_BYTES: Final = 8 * MIB  # small, so that the pool is what matters
START_TIMEOUT_S: Final = 120.0
EVENTS_SHOWN_MAX: Final = 6
REPORT: Final = Path("demo/report.html")
WIDTH: Final = 22  # of the first column of the result


@options.command("demo", hidden=True)
@click.option("--requests", type=click.IntRange(100), default=REQUESTS, show_default=True, help="How many.")
@click.option("--segment-size", type=SIZE_BYTES, help="Memory of each store  [default: 1GiB, or what fits].")
@click.option("--report", type=PATH, default=str(REPORT), show_default=True, help="Where to write it.")
@click.pass_obj
def command(settings: Settings, requests: int, segment_size: int | None, report: Path) -> int:
    r"""
    Show the pool at work: start it, replay a trace, kill a store in the middle, report, stop.

    \b
    Example:
      kvops demo
    """
    from kvops.inference.outfile import check_writable
    from kvops.inference.report import write_report
    from kvops.inference.results import impact, summary

    if report == REPORT:
        report.parent.mkdir(exist_ok=True)  # of our own; others name folders that are there
    check_writable(str(report), what="the report")
    click.echo(
        f"[1/5] set-up   kvops {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    with _group(settings, segment_size) as target:
        said = Said(
            workload="agentic",
            requests=requests,
            nodes=STORES,
            l2_size=L2_BYTES,
            at=(f"50%:kill:{VICTIM}",),
        )
        made, title = read_requests(said)
        config = make_config(target, made, said)
        with Progress(settings, "[3/5] replay  ", total=len(made)) as bar:
            result = run(target, made, config, bar=bar, tell=lambda event: _tell(bar, event))
        hit = impact(result)
        assert hit is not None, "the replay killed a store"
        for line in _aftermath(result, hit.event):
            click.echo(line)
        _show(Output(settings), hit)
        write_report(str(report), result, title=f"demo: {title}, {VICTIM} killed in the middle")
    click.echo(f"[5/5] report   {report}    stopped, 0 processes left")
    click.echo(f"try: {_reach()}kvops start --stores 3 && kvops status")
    return exit_code(summary(result))


@contextmanager
def _group(settings: Settings, segment_size: int | None) -> Iterator[Target]:
    """A group of our own, ready; stopped and gone afterwards, whatever happened."""
    folder = Path(tempfile.mkdtemp(prefix="kvops-demo-"))
    local = LocalGroup(folder, GROUP)
    try:
        began_s = time.monotonic()
        size = _start(local, segment_size)
        took_s = time.monotonic() - began_s
        memory = f"{size / GIB:g} GiB" if size >= GIB else f"{size // MIB} MiB"
        click.echo(f"[2/5] start    1 master, {STORES} stores of {memory}, ready in {took_s:.1f} s")
        yield resolve(replace(settings, group=GROUP, state_dir=folder))
    except BaseException:
        local.stop(now=True)
        raise
    else:
        local.stop()
        state = local.read()
        left = [member.name for member in (state.members if state else []) if member.running]
        if left:
            raise LeftBehind(
                f"still running: {', '.join(left)}", fix=f"kvops --state-dir {folder} -g {GROUP} stop --now"
            )
    finally:
        state = local.read()
        if not any(member.running for member in (state.members if state else [])):
            shutil.rmtree(folder, ignore_errors=True)


def _reach() -> str:
    """What makes the word kvops work in the reader's shell: ``make demo`` runs one that is not on its PATH."""
    activate = Path(sys.executable).with_name("activate")
    if shutil.which("kvops") is not None or not activate.is_file():
        return ""
    here = Path.cwd()
    return f". {activate.relative_to(here) if activate.is_relative_to(here) else activate} && "


def _start(local: LocalGroup, segment_size: int | None) -> int:
    """Start with the wanted memory, or with less where that does not fit and nothing was wanted."""
    sizes = [segment_size] if segment_size is not None else [SEGMENT_BYTES, SEGMENT_BYTES_SMALL]
    for size in sizes:
        try:
            local.start(StartPlan(stores=STORES, segment_size_bytes=size), timeout_s=START_TIMEOUT_S)
        except Refused:
            if size == sizes[-1]:
                raise
        else:
            return size
    raise AssertionError("the last size either started or raised")


def _tell(bar: Progress, event: ReplayEvent) -> None:
    """The fault as it happens; the rest is told in order afterwards."""
    if event.fault:
        bar.say(f"      at {event.at_s:.1f} s   {event.subject} killed, on purpose")


def _aftermath(result: ReplayResult, fault: ReplayEvent) -> Iterator[str]:
    """What the pool and its clients did about the fault, the first of each kind."""
    seen: set[tuple[str, str]] = set()
    for event in result.events:
        kind = (event.event, event.subject if event.event.startswith("breaker") else "")
        if event.at_s < fault.at_s or event.fault or kind in seen or len(seen) == EVENTS_SHOWN_MAX:
            continue
        seen.add(kind)
        noun, _, verb = event.event.replace("_", " ").partition(".")
        what = verb if event.subject.startswith(noun) else f"{noun} {verb}"
        detail = f" ({event.detail})" if event.detail else ""
        yield f"      +{event.at_s - fault.at_s:.1f} s     {event.subject}: {what}{detail}"


def _show(out: Output, hit: Impact) -> None:
    from kvops.inference.report import size

    before, after = hit.before, hit.after
    back = ", not back by the end"
    if hit.recovered_after_s is not None:
        back = f", back after {hit.recovered_after_s:.1f} s" if hit.recovered_after_s else ""
    rows = [
        ("requests answered", f"{before.requests:,}", f"{after.requests:,}", ""),
        ("blocked requests", f"{before.blocked:,}", f"{after.blocked:,}", ""),
        (
            "wrong bytes",
            f"{before.wrong_bytes:,}",
            f"{after.wrong_bytes:,}",
            f"({size(before.bytes_checked + after.bytes_checked)} checked)",
        ),
        ("token hit ratio", f"{before.hit_ratio:.1%}", f"{after.hit_ratio:.1%}", ""),
        (
            "… of the possible",
            f"{before.served_share:.1%}",
            f"{after.served_share:.1%}",
            f"({hit.lowest_share:.1%} at worst{back})" if hit.lowest_share is not None else "",
        ),
        ("slow reads", f"{before.slow:,}", f"{after.slow:,}", ""),
        ("TTFT p99, ms", f"{before.ttft_p99_ms:,.0f}", f"{after.ttft_p99_ms:,.0f}", "(with a modelled GPU)"),
    ]
    click.echo(out.style(f"[4/5] result   {'':<{WIDTH - 9}}{'before':>10}{'after':>10}", bold=True))
    for name, one, two, note in rows:
        click.echo(f"      {name:<{WIDTH}}{one:>10}{two:>10}  {note}".rstrip())
