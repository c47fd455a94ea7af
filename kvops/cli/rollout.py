"""``kvops rollout``: changes to a whole group, one node at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from kvops.cli import holds, options
from kvops.cli.clients import leader, leader_status, look, look_until
from kvops.cli.context import Target, resolve
from kvops.cli.options import DURATION_MS, Settings
from kvops.cli.output import Column, Output
from kvops.cli.start import ready_timeout_s
from kvops.errors import Refused, StartFailed, Unreachable
from kvops.files import load_yaml, write_yaml
from kvops.fleet.group_state import Member
from kvops.fleet.health import Judgement, not_back
from kvops.fleet.local import LocalGroup
from kvops.fleet.preflight import human_objects
from kvops.fleet.rollout import (
    NodeProgress,
    Pace,
    Rollout,
    RolloutState,
    Seen,
    batches,
)
from kvops.timestamps import utc_now

if TYPE_CHECKING:
    from kvops.store.model import MasterStatus

REASON: Final = "kvops rollout restart"  # of our holds: they are told from an operator's by it
CALL_TIMEOUT_S: Final = 5.0
NODE_S: Final = (
    4.0  # about, of one node: its leases end, it ends, starts and joins; small pages are freed meanwhile
)
SERVING: Final = ("ready", "announcing")
COLUMNS: Final = (
    Column("name"),
    Column("role"),
    Column("step"),
    Column("objects", "count"),
    Column("took_s"),
)


@options.group("rollout")
def command() -> None:
    r"""
    Change a whole group, one node at a time.

    \b
    Example:
      kvops rollout restart --migrate
    """


@command.command("restart")
@click.argument("members", nargs=-1, metavar="[MEMBER…]", shell_complete=options.offer("members"))
@click.option("--migrate", is_flag=True, help="Copy each store's objects to others first.")
@click.option(
    "--max-unavailable",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Stores that may be away at once, those that are away already included.",
)
@click.option(
    "--window",
    "window_ms",
    type=DURATION_MS,
    default="5s",
    show_default=True,
    help="The hit ratio is taken over this; 0s: not.",
)
@click.option(
    "--settle",
    "settle_ms",
    type=DURATION_MS,
    default="5m",
    show_default=True,
    help="How long it may take to come back.",
)
@click.option("--force", multiple=True, metavar="CHECK", help="Go on although this check of a drain says no.")
@click.option("--fresh", is_flag=True, help="Begin anew instead of going on where a former one stopped.")
@click.option("--dry-run", is_flag=True, help="Print the exact steps and do nothing.")
@click.pass_obj
def restart(
    settings: Settings,
    members: tuple[str, ...],
    migrate: bool,
    max_unavailable: int,
    window_ms: int,
    settle_ms: int,
    force: tuple[str, ...],
    fresh: bool,
    dry_run: bool,
) -> int:
    r"""
    Restart a local group one node at a time: stores first, then masters, who leads last.

    Each store is drained, stopped and started; the next one waits until it has joined again and the hit ratio is
    within 5 % of what it was (with --migrate and no traffic: the objects). A store's contents are lost unless
    --migrate moves them first. An operator's hold stays as it is. A leader steps down before. Members of etcd are
    restarted only when they are named. --timeout bounds each wait for a node.

    The first trouble ends it (exit code 1): the nodes behind it are untouched. The same command again goes on where
    it stopped, as after Ctrl-C.

    \b
    Examples:
      kvops rollout restart --dry-run
      kvops rollout restart --migrate --settle 10m
    """
    from kvops.cli.units import split_list

    out = Output(settings)
    target = resolve(settings)
    local = target.require_local()
    state = local.require()
    chosen = [state.member(name) for name in split_list(members)]
    chosen = chosen or [member for member in state.members if member.role in ("store", "master")]

    def begin() -> RolloutState:
        return _progress(
            local, state.started, chosen, named=bool(members), fresh=fresh, migrate=migrate, out=out
        )

    if dry_run:
        return _show_steps(out, target, local, begin(), max_unavailable=max_unavailable)
    pace = Pace(unavailable_max=max_unavailable, window_s=window_ms / 1_000, settle_s=settle_ms / 1_000)
    with local.lock(timeout_s=0.0, name="rollout.lock"):
        progress = begin()
        price = _price(target, progress)
        _say_price(out, target, progress, price)
        operations = _Operations(settings, out, local, force=force)
        rollout = Rollout(
            progress,
            operations,
            pace=pace,
            save=lambda now: write_yaml(_file(local), now),
            tell=lambda name, text: out.note(f"{name:<10} {text}"),
            pause=threading.Event().wait,
        )
        began = time.monotonic()
        done = rollout.run()
        done = msgspec.structs.replace(done, ended=utc_now())
        write_yaml(_file(local), done)
        after = operations.look()
    return _receipt(out, target, done, after, price, took_s=time.monotonic() - began)


@command.command("status")
@click.pass_obj
def status(settings: Settings) -> int:
    r"""
    How far the last rollout of a local group has come. Exit code 1: it stopped before its end.

    \b
    Example:
      kvops rollout status
    """
    out = Output(settings)
    target = resolve(settings)
    local = target.require_local()
    local.require()
    if not _file(local).is_file():
        if out.structured:
            out.document({"group": target.name, "nodes": []})
        else:
            out.header(target.label, "no rollout")
        return 0
    state = load_yaml(_file(local), RolloutState)
    _show(out, target, state)
    return 1 if state.unfinished else 0


def _file(local: LocalGroup) -> Path:
    return local.folder / "rollout.yaml"


def _progress(
    local: LocalGroup,
    group_started: str,
    chosen: Sequence[Member],
    *,
    named: bool,
    fresh: bool,
    migrate: bool,
    out: Output,
) -> RolloutState:
    """A new rollout, or the one that did not come to its end."""
    begun = RolloutState(
        migrate=migrate,
        group_started=group_started,
        started=utc_now(),
        nodes=[NodeProgress(name=member.name, role=member.role) for member in chosen],
    )
    if fresh or not _file(local).is_file():
        return begun
    former = load_yaml(_file(local), RolloutState)
    if not former.unfinished or former.group_started != group_started:
        return begun
    if named and [node.name for node in former.nodes] != [node.name for node in begun.nodes]:
        raise Refused(
            f"a rollout of {len(former.nodes)} members that began {former.started} is not done",
            fix="go on with it by kvops rollout restart without names, or drop it with --fresh",
        )
    done = len(former.nodes) - len(former.unfinished)
    why = f"; it stopped at {former.stopped}" if former.stopped else ""
    out.note(f"going on with the rollout of {former.started}, {done} of {len(former.nodes)} done{why}")
    return msgspec.structs.replace(former, migrate=migrate or former.migrate)


def _show_steps(
    out: Output, target: Target, local: LocalGroup, progress: RolloutState, *, max_unavailable: int
) -> int:
    state = local.require()
    steps = []
    status = _leader_status(target)
    leads = status.name if status is not None else ""
    several = sum(member.role == "master" for member in state.members) > 1
    for batch in batches(progress.unfinished, unavailable_max=max_unavailable, leader=leads):
        members = [state.member(node.name) for node in batch]
        stores = " ".join(member.name for member in members if member.role == "store")
        if stores:
            steps.append(
                f"kvops drain {stores}{' --migrate' if progress.migrate else ''}, and wait for its end"
            )
        if several and any(member.name == leads for member in members):
            steps.append("kvops master step-down")
        steps += local.restart_steps(members)
        if stores:
            steps.append(f"kvops undrain {stores}")
        steps.append(
            f"wait until {' '.join(member.name for member in members)} joined and the hit ratio is back"
        )
    if out.structured:
        out.document({"group": target.name, "dry_run": True, "steps": steps})
        return 0
    out.steps(target.label, steps)
    return 0


def _leader_status(target: Target) -> MasterStatus | None:
    """What the leader knows; None without one, which a rollout that goes on may be about to mend."""
    try:
        return leader_status(target, timeout_s=CALL_TIMEOUT_S)
    except Unreachable:
        return None


def _price(target: Target, progress: RolloutState) -> dict[str, Any]:
    """What it will cost, before anything is done; of the hit ratio an estimate: all objects are equally hot."""
    status = _leader_status(target)
    names = {node.name for node in progress.unfinished}
    if status is None:
        unknown = dict.fromkeys(("capacity_share", "hit_ratio", "hit_ratio_after"))
        return {**unknown, "objects": 0, "seconds": NODE_S * len(names)}
    serving = [store for store in status.stores if store.state in SERVING]
    chosen = [store for store in serving if store.name in names]
    objects = sum(store.objects for store in chosen)
    ratio = status.hits_total / status.lookups_total if status.lookups_total else None
    lost = max((store.objects for store in chosen), default=0) / max(1, status.objects)
    after = ratio if progress.migrate or ratio is None else ratio * (1 - min(1.0, lost))
    return {
        "capacity_share": max((store.capacity_bytes for store in chosen), default=0)
        / max(1, sum(store.capacity_bytes for store in serving)),
        "objects": objects,
        "hit_ratio": ratio,
        "hit_ratio_after": after,
        "seconds": NODE_S * len(names) + objects / holds.SWEPT_PER_S,
    }


def _say_price(out: Output, target: Target, progress: RolloutState, price: dict[str, Any]) -> None:
    if out.structured or out.settings.quiet:
        return
    out.header(target.label, f"rolling restart of {holds.count_of(len(progress.unfinished), 'member')}")
    if price["capacity_share"] is None:
        out.line("  costs   not known: no master leads")
        return
    fate = (
        "move to other stores first, as far as they fit" if progress.migrate else "are lost, store by store"
    )
    ratio = "nobody has looked anything up yet"
    if price["hit_ratio"] is not None:
        ratio = f"hit ratio {price['hit_ratio']:.1%} → about {price['hit_ratio_after']:.1%} after each"
    if price["objects"]:
        out.line(f"  holds   {human_objects(price['objects'])}; they {fate}")
    out.line(
        f"  costs   {price['capacity_share']:.0%} of the pool at a time; {ratio}; "
        f"about {price['seconds']:.0f} s and what the hit ratio takes to come back"
    )


def _document(state: RolloutState) -> dict[str, Any]:
    return {
        "what": state.what,
        "migrate": state.migrate,
        "started": state.started,
        "ended": state.ended or None,
        "stopped": state.stopped or None,
        "hit_ratio_before": None if state.ratio_before is None else round(state.ratio_before, 4),
        "objects_before": state.objects_before,
        "nodes": [
            {"name": n.name, "role": n.role, "step": str(n.step), "objects": n.objects, "took_s": n.took_s}
            for n in state.nodes
        ],
    }


def _show(out: Output, target: Target, state: RolloutState, **more: Any) -> None:
    document = _document(state) | more
    if out.structured:
        out.document({"group": target.name, **document})
        return
    done = len(state.nodes) - len(state.unfinished)
    out.header(target.label, f"{done} of {len(state.nodes)} restarted since {state.started}")
    out.table(COLUMNS, document["nodes"])
    if state.stopped:
        out.line(f"stopped at {state.stopped}")
        out.line(f"next: {target.kvops} rollout restart")


def _receipt(
    out: Output,
    target: Target,
    state: RolloutState,
    after: Seen,
    price: dict[str, Any],
    *,
    took_s: float,
) -> int:
    predicted = {name: None if value is None else round(value, 4) for name, value in price.items()}
    _show(out, target, state, objects_after=after.objects, took_s=round(took_s, 3), predicted=predicted)
    if not out.structured:
        ratio = "no traffic to take a hit ratio of" if state.ratio_before is None else "the hit ratio is back"
        took = f"{took_s:.1f} s, predicted {price['seconds']:.0f}"
        out.line(f"objects {state.objects_before:,} → {after.objects:,}; {ratio}; {took}")
    return 0


class _Operations:
    """What a rollout does to a local group: the commands of an operator, without their words."""

    def __init__(self, settings: Settings, out: Output, local: LocalGroup, *, force: Sequence[str]) -> None:
        self._settings, self._out, self._local, self._force = settings, out, local, force

    def look(self) -> Seen:
        """See the group now."""
        target = resolve(self._settings)
        judgement = look(target, timeout_s=CALL_TIMEOUT_S)
        status = _leader_status(target)
        members = self._local.require().members
        found = status.holds if status is not None else []
        held = {name for hold in found if hold.reason != REASON for name in [hold.target, *hold.stores]}
        return Seen(
            serving=frozenset(row["name"] for row in judgement.stores if row["state"] in SERVING),
            masters=frozenset(member.name for member in members if member.role == "master"),
            leader=status.name if status is not None else "",
            away={row["name"]: row["state"] for row in judgement.stores if row["state"] not in SERVING},
            held=frozenset(held),
            processes={
                member.name: f"{member.pid}.{member.started_ticks}.{member.boot_id}"
                for member in members
                if member.running
            },
            objects=judgement.objects,
            objects_by_store={row["name"]: row["objects"] for row in judgement.stores},
            lookups=status.lookups_total if status is not None else 0,
            hits=status.hits_total if status is not None else 0,
        )

    def drain(self, names: Sequence[str], *, migrate: bool) -> None:
        """Hidden, leases ended, swept, counted."""
        target = resolve(self._settings)
        deadline = time.monotonic() + self._timeout_s(names)
        with leader(target, timeout_s=CALL_TIMEOUT_S) as (client, _):
            reply = client.drain(
                names, owner=holds.owner(), reason=REASON, migrate=migrate, force=list(self._force)
            )
        holds.Watch(self._out, target, [hold.target for hold in reply.holds]).run(
            reply.holds, deadline=deadline
        )

    def restart(self, names: Sequence[str]) -> None:
        """Asked to end, started again as it was."""
        try:
            self._local.restart(
                names,
                timeout_s=self._timeout_s(names),
                tell=lambda name, text: self._out.note(f"{name:<10} {text}"),
            )
        except StartFailed as error:
            for line in error.log_lines:
                self._out.note(f"  | {line}")
            raise

    def undrain(self, names: Sequence[str]) -> None:
        """Lift our own holds."""
        if not names:
            return
        with leader(resolve(self._settings), timeout_s=CALL_TIMEOUT_S) as (client, status):
            ours = [hold.target for hold in status.holds if hold.reason == REASON and hold.target in names]
            if ours:
                client.undrain(ours, owner=holds.owner())

    def step_down(self) -> None:
        """As master step-down: refused when nobody could follow."""
        with leader(resolve(self._settings), timeout_s=CALL_TIMEOUT_S) as (client, _):
            client.step_down(owner=holds.owner())

    def wait_joined(self, names: Sequence[str]) -> Sequence[str]:
        """As restart waits; a master of several has to have everything that was acknowledged, too."""
        members = self._local.require().members
        masters = [member.name for member in members if member.role == "master"]
        restarted = [name for name in names if name in masters]
        behind = set(restarted if len(masters) > 1 else ())
        only = None if restarted else names  # a new master knows none of the stores

        def done(seen: Judgement) -> bool:
            if not_back(seen, only):
                return False
            if behind:
                status = _leader_status(resolve(self._settings))
                behind.difference_update(status.members if status is not None else ())
            return not behind

        _, judgement = look_until(self._settings, done, timeout_s=self._timeout_s(names))
        return sorted({*not_back(judgement, only), *behind})

    def _timeout_s(self, names: Sequence[str]) -> float:
        return ready_timeout_s(self._settings, len(names) * self._local.require().segment_size_bytes)
