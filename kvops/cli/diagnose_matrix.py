"""``kvops diagnose matrix``: probes between all pairs of hosts, with the odd ones out named."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvops.cli import options
from kvops.cli.hosts import SshSaid, find_logins, ssh_options
from kvops.cli.options import DURATION_MS, RATE_BPS, Settings
from kvops.cli.output import Column, Output

if TYPE_CHECKING:
    from kvops.diag.matrix import Matrix
    from kvops.diag.probes import Plan
    from kvops.host import SshLogin

FORMATS: Final = (*options.FORMATS, "html")
HOST_TIMEOUT_S_DEFAULT: Final = 30.0  # of one host, the window not counted

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSaid:
    """What the command line says about how hard to probe."""

    yes: bool = False
    rate_bps: int | None = None
    stream_ms: int = 1_000
    port: int | None = None
    gid_index: int | None = None


def probe_options(function: Function) -> Function:
    """The options of every command that probes between hosts; they arrive as one :class:`ProbeSaid`, ``how``."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        kwargs["how"] = ProbeSaid(
            yes=kwargs.pop("yes"),
            rate_bps=kwargs.pop("rate_bps"),
            stream_ms=kwargs.pop("stream_ms"),
            port=kwargs.pop("probe_port"),
            gid_index=kwargs.pop("gid_index"),
        )
        return function(*args, **kwargs)

    wrapped: Any = gathered
    for option in (
        click.option("--yes", is_flag=True, help="Fill links, too, that carry traffic already."),
        click.option(
            "--rate", "rate_bps", type=RATE_BPS, help="Limit of one bandwidth stream (none by default)."
        ),
        click.option(
            "--seconds", "stream_ms", type=DURATION_MS, default=1_000, help="Length of one bandwidth stream."
        ),
        click.option(
            "--gid-index",
            type=click.IntRange(0, 65535),
            help="GID index of verbs probes on both sides (every pair of GIDs that fit, by default).",
        ),
        click.option(
            "--probe-port",
            type=click.IntRange(1, 65535),
            help="Port that probes use on every host (any free one).",
        ),
    ):
        wrapped = option(wrapped)
    found: Function = wrapped
    return found


def make_plan(names: Sequence[str], *, hosts: int, how: ProbeSaid) -> Plan:
    """The plan of these options. Raises UsageError."""
    from kvops.diag.probes import Plan, checked
    from kvops.errors import UsageError

    if not 200 <= how.stream_ms <= 30_000:
        raise UsageError("--seconds is the length of a stream", fix="give 200ms to 30s")
    return Plan(
        probes=checked([n for name in names for n in name.split(",") if n], hosts=hosts),
        seconds=how.stream_ms / 1000,
        rate_gbps=how.rate_bps / 1e9 if how.rate_bps else None,
        port=how.port or 0,
        gid_index=how.gid_index,
        force=how.yes,
    )


@options.command("matrix", formats=FORMATS)
@click.option(
    "--host", "hosts", multiple=True, metavar="HOST", help="Two or more: gpu-[001-008], a group, role=store."
)
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="NAME",
    help="tcp, udp, icmp, mtu, latency (these by default), bandwidth, incast, verbs, memory, register.",
)
@ssh_options
@probe_options
@click.pass_obj
def command(
    settings: Settings,
    hosts: Sequence[str],
    probes: Sequence[str],
    ssh: SshSaid,
    how: ProbeSaid,
) -> int:
    r"""
    Probe between all pairs of interfaces of hosts; without hosts, memory and registration of this one.

    Sends little, unless bandwidth or incast is named: these fill links, and are refused while a link carries
    more than a tenth of its rate. TCP speed from Python finds who is slower than the others, not what a fast
    NIC can do; verbs with bandwidth does. Exit code 1: somebody stands out. 3: somebody could not be asked.

    \b
    Examples:
      kvops diagnose matrix --host gpu-[041-048]
      kvops diagnose matrix --host prefill --probe tcp,latency,bandwidth --rate 5Gbit/s -o html > matrix.html
      kvops diagnose matrix --probe memory,register
    """
    out = Output(settings)
    logins: list[SshLogin] = []
    if hosts or ssh.inventory is not None:
        logins = find_logins(settings, hosts, ssh)
    plan = make_plan(probes, hosts=len(logins), how=how)
    from kvops.diag.probes import run_matrix

    matrix = run_matrix(logins, plan, timeout_s=settings.timeout_s(HOST_TIMEOUT_S_DEFAULT), note=out.note)
    show(out, matrix)
    return exit_code(matrix)


def exit_code(matrix: Matrix) -> int:
    """1 if somebody stands out, 3 if something could not be seen, else 0."""
    from kvops.diag.matrix import odd_ones

    if odd_ones(matrix):
        return 1
    return 3 if matrix.unreached or any(cell.unseen for cell in matrix.cells) else 0


def show(out: Output, matrix: Matrix) -> None:
    """In whatever format."""
    from kvops.diag import matrix as pure
    from kvops.diag import render_matrix
    from kvops.diag.render import safe

    if out.format == "json":
        out.document({**pure.document(matrix), "exit_code": exit_code(matrix)})
    elif out.format == "jsonl":
        for cell in matrix.cells:
            out.raw_json({"schema": 1, **cell.as_json()})
    elif out.format == "html":
        click.echo(render_matrix.page(matrix), nl=False)
    elif out.format == "name":
        for odd in pure.odd_ones(matrix):
            click.echo(odd.name)
    else:
        for line in render_matrix.lines(
            matrix,
            wide=out.format == "wide",
            style=lambda text, color: out.style(text, fg=color, bold=True),
        ):
            out.line(line)
        for name, reason in matrix.unreached:
            out.line(out.style(f"UNREACHED  {name}: {safe(reason)}", fg="yellow"))
        if out.format == "tsv" and matrix.cells:
            rows = [{**cell.as_json(), "rtt_p50_us": (cell.rtt_us or {}).get("p50")} for cell in matrix.cells]
            keys = (
                "source",
                "source_netdev",
                "target",
                "target_netdev",
                "tcp",
                "udp",
                "icmp",
                "verbs",
                "rtt_p50_us",
                "jitter_us",
                "loss_percent",
                "path_mtu",
                "gbps",
                "verbs_gbps",
                "unseen",
            )
            out.table([Column(key) for key in keys], rows)
