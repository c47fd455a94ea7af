"""``kvops chaos inject``: one fault on a running group, by hand."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

import click
import yaml

from kvops.cli import options
from kvops.cli.chaos_where import state_dir
from kvops.cli.context import Configuration, load_configuration
from kvops.cli.hosts import SshSaid, find_logins, ssh_options
from kvops.cli.options import DURATION_MS, Settings
from kvops.cli.output import Column, Output
from kvops.errors import Refused, UsageError

if TYPE_CHECKING:
    from kvops.chaos.agent import Order

CONNECT_TIMEOUT_S: Final = 10.0
RECHECK_S: Final = 2.0
UNDO_SLACK_S: Final = 30.0  # the guardian's own deadline lies so far behind the planned end


@options.command("inject")
@click.argument("fault")
@click.argument("target")
@click.option(
    "--for", "hold", type=DURATION_MS, default="10s", show_default=True, help="How long to hold it."
)
@click.option(
    "--set", "said", multiple=True, metavar="NAME=VALUE", help="Argument of the fault, as in a file."
)
@click.option("--control", default="", metavar="MEMBER", help="Must stay well; a neighbour by default.")
@click.option("--control-http", default="", metavar="HOST:PORT", help="… one on another host.")
@click.option(
    "--lease", type=DURATION_MS, default="3s", show_default=True, help="Undone when we are silent so long."
)
@click.option("--host", default="", metavar="HOST", help="Where the target runs, over SSH.")
@click.option("--host-state-dir", default="", metavar="DIR", help="State folder there, if not the usual one.")
@click.option("--dry-run", is_flag=True, help="Print what undoes it and do nothing (on this machine).")
@ssh_options
@click.pass_obj
def command(
    settings: Settings,
    fault: str,
    target: str,
    hold: int,
    said: tuple[str, ...],
    control: str,
    control_http: str,
    lease: int,
    host: str,
    host_state_dir: str,
    dry_run: bool,
    ssh: SshSaid,
) -> int:
    r"""
    Inject one fault into a member of a running group, prove it, hold it, undo it, prove that nothing is left.

    No load, no verdict: for looking at a pool in trouble, by hand. With --host the injector, its ledger and its
    guardian are on that machine, which has kvops on its PATH; the lease is renewed over SSH, and when the
    connection dies, the guardian there undoes. A fault that would cut that connection is refused.

    \b
    Examples:
      kvops chaos inject process.pause store-1 --for 20s
      kvops chaos inject net.loss store-0 --set percent=30 --host gpu-204 --inventory fleet.yaml
    """
    from kvops.chaos.agent import Order, injection_of

    out = Output(settings)
    configuration = load_configuration(settings)
    group = str(configuration.group.value)
    _refuse_label(configuration, group)
    order = Order(
        fault=fault,
        target=target,
        arguments=_arguments(said),
        group=group,
        state_dir=host_state_dir,
        control=control,
        control_http=control_http,
        lease_s=lease / 1000,
        deadline_s=hold / 1000 + UNDO_SLACK_S,
    )
    if host:
        if dry_run:
            raise UsageError("--dry-run plans on this machine alone", fix="run it there, or leave it out")
        (login, *more) = find_logins(settings, [host], ssh)
        if more:
            raise UsageError(f"{host} is {len(more) + 1} hosts", fix="name one: a fault has one target")
        return _there(out, login, order, hold / 1000)
    planned = injection_of(order, state_dir(settings))
    if dry_run:
        rows = [{"step": step.command()} for step in planned.plan()]
        out.rows("steps", (Column("step"),), rows, dry_run=True)
        return 0
    with planned:
        evidence = [str(one) for one in planned.inject()]
        out.note(f"active    ✓ {'; '.join(evidence)}")
        _hold(planned, hold / 1000, order.lease_s)
        proof = planned.undo()
    return _done(out, group, planned.id, evidence, [one.text for one in proof.steps], proof.undo_s, proof.by)


def _refuse_label(configuration: Configuration, group: str) -> None:
    """A label in our own configuration holds for the group's hosts, whatever these say of themselves."""
    from kvops.chaos.injecting import FORBIDDEN_ENVIRONMENTS

    context = configuration.context(group)
    if context is None:
        return
    if context.protect or context.environment.lower() in FORBIDDEN_ENVIRONMENTS:
        label = context.environment if not context.protect else f"{context.environment} protected".strip()
        raise Refused(f"context {group} is labelled {label}: no faults there", fix="use a staging group")


def _there(out: Output, login: Any, order: Order, hold_s: float) -> int:
    from contextlib import closing

    from kvops.chaos.remote import RemoteInjection

    with closing(login.connect(CONNECT_TIMEOUT_S)) as there, RemoteInjection(there, order) as one:
        evidence = one.inject()
        out.note(f"active    ✓ {login.name}: {'; '.join(evidence)}")
        _hold(one, hold_s, order.lease_s)
        undone = one.undo()
        label = f"{order.group} on {login.name}"
        return _done(out, label, one.experiment, evidence, undone.steps, undone.undone_s, undone.by)


def _hold(one: Any, hold_s: float, lease_s: float) -> None:
    pause, end_s = threading.Event(), time.monotonic() + hold_s
    next_check = time.monotonic() + RECHECK_S
    while (left_s := end_s - time.monotonic()) > 0:
        pause.wait(min(lease_s / 4, left_s))
        if time.monotonic() >= next_check and left_s > RECHECK_S:
            one.recheck()
            next_check = time.monotonic() + RECHECK_S
        else:
            one.beat()


def _done(
    out: Output, label: str, experiment: str, evidence: list[str], steps: list[str], undo_s: float, by: str
) -> int:
    if out.structured:
        out.document(
            {"experiment": experiment, "injected": evidence, "undone": steps, "undo_s": undo_s, "by": by}
        )
        return 0
    out.header(label, f"injected, proved, undone in {undo_s:.2f} s by {by}, nothing left")
    for text in steps:
        out.line(f"  {text}")
    return 0


def _arguments(said: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for one in said:
        name, equals, value = one.partition("=")
        if not equals:
            raise UsageError(f"--set {one!r} has no =", fix="write --set percent=30")
        found[name] = yaml.safe_load(value)
    return found
