"""``kvops start``: a group on this machine, ready for use."""

from __future__ import annotations

from typing import Final

import click

from kvops.addresses import split_address
from kvops.cli import options
from kvops.cli.clients import look
from kvops.cli.context import Target, resolve
from kvops.cli.interrupt import Terminated
from kvops.cli.options import ADDRESS, SIZE_BYTES, Settings
from kvops.cli.output import Column, Output
from kvops.cli.status import look_settled, show
from kvops.errors import AlreadyRunning, Refused, UsageError
from kvops.fleet.etcd import MEMBERS as ETCD_MEMBERS
from kvops.fleet.local import LocalGroup
from kvops.fleet.preflight import human_bytes
from kvops.fleet.start_plan import StartPlan
from kvops.limits import GIB, MIB
from kvops.signals import signals_held
from kvops.store.topology import read_topology

_FILE: Final = click.Path(exists=True, dir_okay=False, resolve_path=True)
READY_TIMEOUT_S: Final = 30.0
READY_TIMEOUT_S_PER_GIB: Final = 2.0  # populating memory on a busy machine
HUGE_PAGES: Final = {"off": 0, "2MiB": 2 * MIB, "1GiB": GIB}
ONE_NUMA_NODE: Final = "this machine has one NUMA node: there is nothing to bind stores to"
PREFLIGHT_COLUMNS: Final = (
    Column("check"),
    Column("outcome"),
    Column("observed"),
    Column("needed"),
    Column("fix"),
)


@options.command("start")
@click.option(
    "--masters", type=click.IntRange(1), default=1, show_default=True, help="Masters; several need --etcd."
)
@click.option(
    "--etcd",
    multiple=True,
    metavar="HOST:PORT,…|auto",
    help="Elects the leading master; auto: start one of three members here.",
)
@click.option("--etcd-ca", type=_FILE, metavar="FILE", help="Who vouches for that etcd; makes it TLS.")
@click.option("--etcd-cert", type=_FILE, metavar="FILE", help="Our certificate for it …")
@click.option("--etcd-key", type=_FILE, metavar="FILE", help="… and its key.")
@click.option("--etcd-user", metavar="NAME", help="Who we are to it; with --etcd-password-file.")
@click.option("--etcd-password-file", type=_FILE, metavar="FILE", help="Its first line is the password.")
@click.option(
    "--stores",
    type=click.IntRange(0, 64),
    show_default="one a NUMA node",
    help="Store nodes, each its own logical host.",
)
@click.option(
    "--segment-size", type=SIZE_BYTES, default="1GiB", show_default=True, help="Memory of each store."
)
@click.option(
    "--hugepages",
    type=click.Choice(["2MiB", "1GiB", "off"]),
    default="off",
    show_default=True,
    help="Pages of the stores' memory; they must be reserved.",
)
@click.option(
    "--numa",
    type=click.Choice(["bind", "off"]),
    default="bind",
    show_default=True,
    help="Bind each store's CPUs and memory to one NUMA node.",
)
@click.option(
    "--placement",
    type=click.Choice(["local-first", "random"]),
    default="local-first",
    show_default=True,
    help="Which stores a put goes to.",
)
@click.option(
    "--transports",
    multiple=True,
    metavar="LIST",
    default=["shm,tcp"],
    show_default=True,
    help="What stores offer.",
)
@click.option(
    "--listen", type=ADDRESS, default="127.0.0.1:0", show_default=True, help="The master's wire; port 0: any."
)
@click.option("--control", type=ADDRESS, default="127.0.0.1:0", show_default=True, help="The master's gRPC.")
@click.option(
    "--http", type=ADDRESS, default="127.0.0.1:0", show_default=True, help="The master's /metrics and /ready."
)
@click.option(
    "--backend", type=click.Choice(["native"]), default="native", show_default=True, help="What to run."
)
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def command(
    settings: Settings,
    masters: int,
    etcd: tuple[str, ...],
    etcd_ca: str | None,
    etcd_cert: str | None,
    etcd_key: str | None,
    etcd_user: str | None,
    etcd_password_file: str | None,
    stores: int | None,
    segment_size: int,
    hugepages: str,
    numa: str,
    placement: str,
    transports: tuple[str, ...],
    listen: str,
    control: str,
    http: str,
    backend: str,
    dry_run: bool,
) -> int:
    r"""
    Start a group on this machine; returns when it is ready, and shows it as status does.

    Without --stores there is one for each NUMA node, all on one logical host. A store serves as soon as the first
    piece of its memory is prepared; status shows how far the rest is.

    When a member does not come up, or on Ctrl-C, everything that was started is stopped again.
    A group that runs already is shown and left alone (exit code 5).

    \b
    Examples:
      kvops start
      kvops start --stores 3 --segment-size 4GiB --listen 127.0.0.1:7800
      kvops start --masters 3 --etcd auto --stores 3
      kvops start --segment-size 512GiB --hugepages 1GiB --dry-run
      kvops -g other start --stores 2
    """
    from kvops.cli.units import split_list
    from kvops.store.config import SEGMENT_ALIGN_BYTES, SEGMENT_SIZE_BYTES_MIN, TRANSPORTS

    if segment_size < SEGMENT_SIZE_BYTES_MIN or segment_size % SEGMENT_ALIGN_BYTES:
        raise UsageError(
            f"a segment cannot have {segment_size:,} B",
            fix=f"use a multiple of {SEGMENT_ALIGN_BYTES} B, at least {human_bytes(SEGMENT_SIZE_BYTES_MIN)}",
        )
    wanted = split_list(transports)
    unknown = [name for name in wanted if name not in TRANSPORTS]
    if unknown or not wanted:
        raise UsageError(
            f"unknown transport {', '.join(unknown) or '(none)'}", fix=f"use some of {', '.join(TRANSPORTS)}"
        )
    secure = [text for text in split_list(etcd) if text.startswith("https://")]
    if secure and not etcd_ca:
        raise UsageError(f"{secure[0]} is TLS", fix="say who vouches for it: --etcd-ca FILE")
    endpoints = [
        text.removeprefix("http://").removeprefix("https://").rstrip("/") for text in split_list(etcd)
    ]
    auto = endpoints == ["auto"]
    if (auto or not endpoints) and (etcd_ca or etcd_user):
        raise UsageError(
            "--etcd-ca and --etcd-user are for an etcd that runs", fix="name it: --etcd HOST:PORT"
        )
    if bool(etcd_user) != bool(etcd_password_file):
        raise UsageError(
            "a user and its password go together", fix="--etcd-user NAME --etcd-password-file FILE"
        )
    if not auto:
        for endpoint in endpoints:
            split_address(endpoint)
    page_bytes = HUGE_PAGES[hugepages]
    if page_bytes and segment_size % page_bytes:
        raise UsageError(
            f"a segment of {segment_size:,} B is not whole pages of {hugepages}",
            fix=f"use a --segment-size that is a multiple of {hugepages}",
        )
    nodes = [node.index for node in read_topology().store_nodes]
    plan = StartPlan(
        stores=max(1, len(nodes)) if stores is None else stores,
        one_host=stores is None,
        numa_nodes=tuple(nodes) if numa == "bind" and len(nodes) > 1 else (),
        huge_page_bytes=page_bytes,
        segment_size_bytes=segment_size,
        placement=placement,
        transports=tuple(wanted),
        listen=listen,
        control=control,
        http=http,
        masters=masters,
        etcd=() if auto else tuple(endpoints),
        etcd_members=ETCD_MEMBERS if auto else 0,
        etcd_ca=etcd_ca or "",
        etcd_cert=etcd_cert or "",
        etcd_key=etcd_key or "",
        etcd_user=etcd_user or "",
        etcd_password_file=etcd_password_file or "",
    )
    out = Output(settings)
    target = resolve(settings, starting=True)
    local = target.require_local()
    if dry_run:
        return _show_steps(out, target, local, plan)
    if stores is None and numa == "bind" and len(nodes) == 1:
        out.note(f"note: {ONE_NUMA_NODE}")
    if settings.verbose:
        for finding in plan.findings():
            if finding.note:
                out.note(f"note: {finding.note}")
    timeout_s = ready_timeout_s(settings, plan.stores * segment_size)
    try:
        local.start(plan, timeout_s=timeout_s, tell=lambda name, text: out.note(f"{name:<10} {text}"))
    except AlreadyRunning as error:
        target = resolve(settings)
        problem = {
            "kind": "AlreadyRunning",
            "what": error.what,
            "fix": error.fix,
            "exit_code": error.exit_code,
        }
        show(out, target, look(target, timeout_s=2.0), error=problem)
        if out.structured:
            return error.exit_code  # the one document holds both
        raise
    try:
        return _show_started(out, settings)
    except (KeyboardInterrupt, Terminated):
        with signals_held():  # start has not returned yet, and an interrupted one leaves nothing running
            local.stop()
        raise


def ready_timeout_s(settings: Settings, memory_bytes: int) -> float:
    """How long members with so much memory between them may take to be ready: --timeout, or by their size."""
    return settings.timeout_s(READY_TIMEOUT_S + READY_TIMEOUT_S_PER_GIB * memory_bytes / GIB)


def _show_steps(out: Output, target: Target, local: LocalGroup, plan: StartPlan) -> int:
    """What start would do, and what it would be refused for: exit code 5 then."""
    steps, findings = local.steps(plan), plan.findings()
    rows = [finding.row() for finding in findings]
    nodes = read_topology().store_nodes
    note = ONE_NUMA_NODE if len(nodes) == 1 else ""
    code = Refused.exit_code if any(finding.error for finding in findings) else 0
    if out.structured:
        out.document(
            {"group": target.name, "dry_run": True, "steps": steps, "preflight": rows, "numa_note": note}
        )
        return code
    out.steps(target.label, steps)
    if out.human:
        out.line("this machine:")
        out.table(PREFLIGHT_COLUMNS, rows)
        if note:
            out.line(f"note: {note}")
    for finding in findings if not out.human else ():
        if finding.error:
            out.note(f"would be refused: {finding.error}")
    return code


def _show_started(out: Output, settings: Settings) -> int:
    return show(out, *look_settled(settings))
