"""``kvops replay``: a request trace through the pool, with real bytes."""

from __future__ import annotations

import secrets
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvops.cli import options
from kvops.cli.context import Target, resolve
from kvops.cli.options import DURATION_MS, PATH, SIZE_BYTES, Settings
from kvops.cli.output import Column, Output, Progress
from kvops.errors import KvopsError, ParseError, Refused, UsageError
from kvops.limits import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvops.inference.replay import Planned, ReplayConfig
    from kvops.inference.replay import Progress as Reached
    from kvops.inference.results import ReplayEvent, ReplayResult
    from kvops.inference.trace import Request

REQUESTS_DEFAULT: Final = 2_000  # of a generated workload
OVERLOADED_SHARE: Final = 0.95  # of a node's GPU time
GROUP_EVENTS_TIMEOUT_S: Final = 2.0
QUIET_SUBJECTS: Final = ("client.", "replay.")  # events of a group that say nothing about the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What is to be replayed, and how, as the command line says it."""

    trace: str | None = None
    workload: str | None = None
    requests: int | None = None
    seed: int = 1
    speed: float = 0.0
    nodes: int = 2
    at: tuple[str, ...] = ()
    report: Path | None = None
    page_size: int = 64 * KIB
    l2_size: int = 64 * MIB
    prefetch: str = "timeout"
    deadline: int = 200
    model: str = "llama-70b"
    transports: tuple[str, ...] = ()
    warm: bool = False
    metrics: str | None = None
    yes: bool = False


@options.command("replay")
@click.argument("trace", required=False, metavar="[TRACE]")
@click.option("--workload", type=click.Choice(["synth", "agentic"]), help="Generate the requests instead.")
@click.option("--requests", type=click.IntRange(1), help="Only so many  [default: all; generated: 2000].")
@click.option("--seed", type=int, default=1, show_default=True, help="Of a generated workload.")
@click.option(
    "--speed", type=click.FloatRange(0), default=0.0, show_default=True, help="1: as recorded; 0: flat out."
)
@click.option(
    "--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Prefill nodes, one a host."
)
@click.option(
    "--at",
    multiple=True,
    metavar="WHEN:DO:MEMBER",
    help="Such as 30s:kill:store-2, or 50%:pause:store-0.",
    shell_complete=options.offer("planned"),
)
@click.option("--report", type=PATH, metavar="FILE.html", help="Write a report with plots.")
@click.option(
    "--page-size", type=SIZE_BYTES, default="64KiB", show_default=True, help="Bytes of a block of 512 tokens."
)
@click.option(
    "--l2-size", type=SIZE_BYTES, default="64MiB", show_default=True, help="Host memory of each node."
)
@click.option(
    "--prefetch",
    type=click.Choice(["best_effort", "timeout", "wait_complete"]),
    default="timeout",
    show_default=True,
    help="How long a request waits for pages.",
)
@click.option(
    "--deadline", type=DURATION_MS, default="200ms", show_default=True, help="Of each call to the pool."
)
@click.option(
    "--model",
    type=click.Choice(["llama-70b", "llama-8b"]),
    default="llama-70b",
    show_default=True,
    help="GPU time of.",
)
@click.option(
    "--transports", multiple=True, metavar="LIST", help="Allowed between logical hosts, such as tcp."
)
@click.option("--warm", is_flag=True, help="Use pages that earlier --warm replays of this trace left.")
@click.option(
    "--metrics",
    type=options.ADDRESS,
    help="Serve /metrics there meanwhile: for kvops diagnose watch --metrics.",
)
@click.option("--yes", is_flag=True, help="Put the load on a protected group.")
@click.pass_obj
def command(settings: Settings, /, **values: Any) -> int:
    r"""
    Replay a request trace through the pool: nodes look up, read, "compute", write back, check every byte.

    TRACE is a file in Mooncake's format, or - for standard input. Bytes and reads are real; GPU time follows
    a model. --at acts on members of a local group when the replay reaches that time of the trace (or share
    of the requests): kill, stop, pause, resume, start.

    Exit code 1: bytes were wrong, or requests went unanswered.

    \b
    Examples:
      kvops replay conversation_trace.jsonl --nodes 3 --report replay.html
      kvops replay --workload agentic --requests 2000 --at 50%:kill:store-2
    """
    from kvops.inference.outfile import check_writable
    from kvops.inference.report import write_report
    from kvops.inference.results import summary

    said = Said(**values)
    out = Output(settings)
    target = resolve(settings)
    if target.protect and not said.yes:
        what = f"{target.name} is protected, and a replay puts load on it"
        raise Refused(what, fix="add --yes, or name another group")
    requests, title = read_requests(said)
    config = make_config(target, requests, said)
    if said.report is not None:
        check_writable(str(said.report), what="the report")
    out.header(target.label, f"{title}: {len(requests):,} requests on {said.nodes} nodes")
    with Progress(settings, "replay", total=len(requests)) as bar:
        result = run(
            target,
            requests,
            config,
            bar=bar,
            tell=lambda event: bar.say(event_text(event)),
            metrics=said.metrics,
        )
    figures = summary(result)
    if said.report is not None:
        write_report(str(said.report), result, title=title)
        figures["report"] = str(said.report)
    show(out, result, figures)
    for line in left_behind(resolve(settings), [one.target for one in config.events]):
        out.note(line)
    return exit_code(figures)


def left_behind(target: Target, names: Sequence[str]) -> Iterator[str]:
    """Members among these that ``--at`` left down or stopped, and what brings each back."""
    if target.state is None:
        return
    for name in dict.fromkeys(names):
        member = target.state.member(name)
        if not member.running:
            yield f"{name} is still down: {target.kvops} restart {name}"
        elif member.stopped:
            yield f"{name} is still stopped: kill -CONT {member.pid}, or {target.kvops} restart {name}"


def exit_code(figures: dict[str, Any]) -> int:
    """1 when a promise was broken: bytes were wrong, or requests went unanswered."""
    return 1 if figures["wrong_bytes"] or figures["failed"] else 0


def parse_planned(text: str) -> Planned:
    """
    Read one ``--at``: ``30s:kill:store-2`` or ``50%:kill:store-2``.

    Raises:
        UsageError: It is none.
    """
    from kvops.cli.units import parse_duration_ms
    from kvops.inference.replay import ACTIONS, Planned

    when, _, rest = text.partition(":")
    action, _, member = rest.partition(":")
    fix = f"write WHEN:DO:MEMBER, such as 30s:kill:store-2 or 50%:pause:store-0; DO: {', '.join(ACTIONS)}"
    if action not in ACTIONS or not member:
        raise UsageError(f"--at {text} is not understood", fix=fix)
    if when.endswith("%"):
        try:
            share = float(when[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise UsageError(f"--at {text}: {when} is no share of the requests", fix=fix)
        return Planned(action=action, target=member, at_share=share)
    try:
        return Planned(action=action, target=member, at_ms=float(parse_duration_ms(when)))
    except ParseError as error:
        raise UsageError(f"--at {text}: {error.what}", fix=fix) from None


def read_requests(said: Said) -> tuple[list[Request], str]:
    """The requests, and what to call them."""
    from kvops.inference.synth import WORKLOADS, generate
    from kvops.inference.trace import read_trace

    if said.trace is not None and said.workload is None:
        name = "standard input" if said.trace == "-" else Path(said.trace).name
        return read_trace(said.trace, requests=said.requests), name
    if said.trace is not None or said.workload is None:
        what = "both a trace and a workload are named" if said.trace else "nothing to replay is named"
        raise UsageError(what, fix="name a trace file, or --workload synth or agentic")
    workload = WORKLOADS[said.workload]
    made = generate(workload, requests=said.requests or REQUESTS_DEFAULT, seed=said.seed)
    return list(made), f"{said.workload}, seed {said.seed}"


def make_config(target: Target, requests: Sequence[Request], said: Said) -> ReplayConfig:
    """
    How to replay on a group.

    Raises:
        UsageError: A value is out of range, or an event names no member of a local group.
        Unreachable: The group does not run.
    """
    from kvops.cli.units import split_list
    from kvops.inference.replay import ReplayConfig, check
    from kvops.inference.tier import PrefetchPolicy

    planned = tuple(parse_planned(text) for text in said.at)
    for one in planned:
        target.require_local().require().member(one.target)
    pool_options: dict[str, str | int | list[str] | None] = {
        "masters": target.require_masters(),
        "secret_file": None if target.secret_file is None else str(target.secret_file),
        "group": target.name,
        "deadline_ms": said.deadline,
    }
    if said.transports:
        pool_options["transports_between_hosts"] = split_list(said.transports)
    config = ReplayConfig(
        pool_factory="kvops.inference.engine:connect_pool",
        pool_options=pool_options,
        hosts=tuple(f"host-{number}" for number in range(said.nodes)),
        key_prefix=key_prefix(requests, page_bytes=said.page_size, warm=said.warm),
        speed=said.speed,
        page_bytes=said.page_size,
        l2_bytes=said.l2_size,
        prefetch=PrefetchPolicy(said.prefetch),
        deadline_ms=said.deadline,
        prefetch_ms_max=max(1_000, said.deadline),
        model=said.model,
        events=planned,
    )
    check(requests, config)
    return config


def run(
    target: Target,
    requests: Sequence[Request],
    config: ReplayConfig,
    *,
    bar: Progress,
    tell: Callable[[ReplayEvent], None],
    metrics: str | None = None,
) -> ReplayResult:
    """Replay, and add what the group itself says happened meanwhile; ``metrics``: where to serve /metrics."""
    from kvops.inference.metrics import ReplayMetrics
    from kvops.inference.replay import replay

    launcher = target.require_local().act if config.events else None
    counts = ReplayMetrics()
    with ExitStack() as stack:
        if metrics is not None:
            server = stack.enter_context(counts.serve(metrics))
            bar.say(f"  metrics at http://{server.address}/metrics")
        result = replay(
            requests,
            config,
            launcher=launcher,
            on_progress=_Bar(bar),
            on_event=tell,
            on_answer=counts.answered if metrics is not None else None,
        )
    result.events.extend(_group_events(target, result))
    result.events.sort(key=lambda event: event.at_s)
    return result


def key_prefix(requests: Sequence[Request], *, page_bytes: int, warm: bool) -> str:
    """
    What a replay's keys begin with.

    Two traces must not meet in the pool, as block 7 of one is not block 7 of the other; nor two runs, or the
    second one finds everything, unless ``warm`` asks for that.
    """
    import xxhash

    digest = xxhash.xxh3_64()
    for request in requests[:64]:
        digest.update(repr((request.input_tokens, request.hash_ids)).encode())
    run = "warm" if warm else secrets.token_hex(4)
    return f"replay/{digest.hexdigest()[:12]}-{page_bytes}-{run}/"


class _Bar:
    """Feeds a progress bar, which wants to know how many more, with how many there are."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._told = 0

    def __call__(self, reached: Reached) -> None:
        text = f"hit {reached.hit_ratio:.1%}  TTFT p99 {reached.ttft_p99_ms:,.0f} ms"
        self._bar.advance(reached.requests - self._told, text)
        self._told = reached.requests


def event_text(event: ReplayEvent) -> str:
    """An event on one line."""
    on_purpose = ", on purpose" if event.fault else ""
    detail = f"  ({event.detail})" if event.detail else ""
    return f"  {event.at_s:6.1f} s  {event.subject} {event.event}{on_purpose}{detail}"


def detail_text(detail: Mapping[str, object]) -> str:
    """What an event says beside its name, for people: the reason first, in its own words."""
    first = [str(detail["reason"])] if "reason" in detail else []
    return ", ".join([*first, *(f"{name} {value}" for name, value in detail.items() if name != "reason")])


def _group_events(target: Target, result: ReplayResult) -> list[ReplayEvent]:
    """What the group itself says happened meanwhile; nothing when its master does not answer."""
    import numpy as np

    from kvops.cli.clients import control_client
    from kvops.inference.results import ReplayEvent

    began = datetime.fromisoformat(result.started_at)
    found = []
    for address in target.control:
        try:
            with closing(
                control_client(address, target.secret(), timeout_s=GROUP_EVENTS_TIMEOUT_S)
            ) as client:
                events = list(client.events(result.started_at))
        except KvopsError:
            continue  # the replay's own figures are whole without them
        for event in events:
            at_s = (datetime.fromisoformat(event.time) - began).total_seconds()
            if not 0 <= at_s <= result.wall_s or event.event.startswith(QUIET_SUBJECTS):
                continue
            sent = int(np.searchsorted(result.rows["sent_s"], at_s))
            found.append(
                ReplayEvent(
                    at_s=at_s,
                    trace_s=float(result.arrival_ms[min(sent, len(result.rows) - 1)]) / 1000,
                    event=event.event,
                    subject=event.subject,
                    detail=detail_text(event.detail),
                )
            )
    return found


def show(out: Output, result: ReplayResult, figures: dict[str, Any]) -> None:
    """Print a replay's figures in the format asked for."""
    import numpy as np

    from kvops.inference.report import WHY, fault_name, phase_rows, recovery
    from kvops.inference.results import impact, phase

    if out.structured:
        out.raw_json(figures)
        return
    hit = impact(result)
    if hit is None:
        rows = phase_rows(phase(result, np.ones(len(result.rows), dtype=bool)), None)
        columns: tuple[Column, ...] = (Column("figure"), Column("value"))
        out.table(columns, [{"figure": name, "value": value} for name, value, _ in rows])
    else:
        columns = (Column("figure"), Column("before"), Column("after"))
        rows = phase_rows(hit.before, hit.after)
        out.table(columns, [{"figure": name, "before": one, "after": two} for name, one, two in rows])
    if not out.human:
        return
    tiers = figures["hit_ratio"]["by_tier"]
    possible = figures["hit_ratio"]["possible"]
    out.line(f"hits      L2 {tiers['L2']:.1%}, L3 {tiers['L3']:.1%}; possible {possible:.1%}")
    if hit is not None:
        out.line(f"fault     {fault_name(hit.event)} after {hit.event.at_s:.1f} s: {recovery(hit)}")
    for reason, tokens in figures["losses"].items():
        out.line(f"lost      {tokens:,} tokens  {reason}: {WHY.get(reason, 'the pool refused')}")
    busiest = max(figures["nodes"], key=lambda node: float(node["gpu_busy_share"]))
    if busiest["gpu_busy_share"] > OVERLOADED_SHARE:
        share = f"{busiest['gpu_busy_share']:.0%}"
        out.line(f"note      {busiest['node']}: GPU busy {share}, so TTFT is mostly queue; add --nodes")
    if figures["lag_s"] > 1:
        out.line(
            f"note      up to {figures['lag_s']:.1f} s behind the pace: this machine is too slow for --speed"
        )
    if "report" in figures:
        out.line(f"report    {figures['report']}")
