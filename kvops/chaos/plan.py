"""What a run would do, worked out without doing any of it: targets, undo, cost, deadlines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvops.chaos.experiment import Experiment, seconds
from kvops.chaos.guards import with_sight
from kvops.chaos.lint import Remark, lint
from kvops.chaos.pool import check_supported, planned_parts
from kvops.chaos.resolve import Chosen, Hit, choose
from kvops.chaos.runner import INJECT_AFTER_S, duration_s, windows
from kvops.chaos.steps import RestartRole
from kvops.chaos.targets import Target, build
from kvops.errors import KvopsError
from kvops.fleet.process import identify

NOT_YET: Final = "POOL"  # stands for the folder that the pool will have


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault, as it would be injected."""

    fault: str
    target: str
    control: str  # must stay well, or the proof does not count
    arguments: dict[str, object]
    what: str  # what it does to the target
    certifies: str
    does_not_certify: str
    undo: tuple[str, ...]  # commands; a process that does not run yet is named instead of its pid
    supported: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole run."""

    title: str
    seed: int
    faults: tuple[PlannedFault, ...]
    capacity_share: float
    groups: tuple[str, ...]
    domains: tuple[str, ...]
    quorum_lost: tuple[str, ...]
    timeline: tuple[str, ...]
    duration_s: float  # about
    unsupported: str  # why a run would end UNSUPPORTED; empty: nothing speaks against it
    remarks: tuple[Remark, ...]

    @property
    def refused(self) -> bool:
        """Whether a run would not begin."""
        return any(one.severity == "error" for one in self.remarks)


def make(experiment: Experiment, *, seed: int | None = None, quick: bool = False) -> Plan:
    """
    Plan a run; nothing is started, written or touched.

    Args:
        experiment: What to plan.
        seed: Instead of the file's.
        quick: As for a run.
    """
    from kvops.chaos.faults import catalogue

    known = catalogue()
    used = experiment.ours.workload.seed if seed is None else seed
    remarks = tuple(lint(experiment, known, seed=used))
    chosen = None
    try:
        chosen = choose(experiment, planned_parts(experiment.ours.pool), seed=used)
    except KvopsError:
        pass  # among the remarks
    faults = tuple(_fault(hit, known) for hit in chosen.hits) if chosen is not None else ()
    unsupported = "; ".join(f"{one.fault}: {one.why_not}" for one in faults if not one.supported)
    try:
        check_supported(experiment.ours.pool)
    except KvopsError as error:
        unsupported = "; ".join(filter(None, [unsupported, error.what]))
    return Plan(
        title=experiment.title,
        seed=used,
        faults=faults,
        capacity_share=chosen.capacity_share if chosen is not None else 0.0,
        groups=chosen.groups if chosen is not None else (),
        domains=chosen.domains if chosen is not None else (),
        quorum_lost=chosen.quorum_lost if chosen is not None else (),
        timeline=tuple(_timeline(experiment, chosen, quick=quick)),
        duration_s=duration_s(experiment, quick=quick),
        unsupported=unsupported,
        remarks=remarks,
    )


def _fault(hit: Hit, known: dict[str, type]) -> PlannedFault:
    name, control = hit.call.name, hit.control
    arguments = {key: value for key, value in hit.call.arguments.items() if key != "hold"}
    cls = known.get(name)
    undo: tuple[str, ...] = ()
    why_not = "" if cls is not None else "this version does not have it"
    if cls is not None and control is None:
        why_not = "the target has no neighbour that could stay well"
    if cls is not None and control is not None:
        target = _stand_in(hit.part.member, hit.part.role, hit.part.group, hit.part.host)
        other = _stand_in(control.member, control.role, control.group, control.host)
        try:
            steps = build(name, arguments, target=target, control=other).undo()
            pid = str(os.getpid())
            undo = tuple(step.command().replace(pid, f"<pid of {hit.part.name}>") for step in steps)
        except (KvopsError, OSError, ValueError, KeyError) as error:
            why_not = f"cannot be planned before the pool runs: {error}"
    return PlannedFault(
        fault=name,
        target=hit.part.name,
        control=control.name if control is not None else "",
        arguments=arguments,
        what=" ".join((cls.__doc__ or "").split("\n\n")[0].split()) if cls is not None else "",
        certifies=str(getattr(cls, "certifies", "")),
        does_not_certify=str(getattr(cls, "does_not_certify", "")),
        undo=undo,
        supported=not why_not,
        why_not=why_not,
    )


def _stand_in(member: str, role: str, group: str, host: str) -> Target:
    """A member that does not run yet: our own process stands in for its, so that steps can be written down."""
    me = identify(os.getpid())
    assert me is not None
    return Target(
        name=member,
        role=role,
        host=host.partition("/")[2],
        group=group,
        processes=(me,),
        addresses={"listen": "127.0.0.1:1", "http": "127.0.0.1:1", "control": "127.0.0.1:1"},
        restart=RestartRole(state_dir=NOT_YET, group=group, member=member),
        config_file=f"{NOT_YET}/groups/{group}/configs/{member}.yaml",
        state_dir=f"{NOT_YET}/groups/{group}/{member}",
    )


def _timeline(experiment: Experiment, chosen: Chosen | None, *, quick: bool) -> list[str]:
    plan, limits, verify = windows(experiment, quick=quick), experiment.ours.deadlines, experiment.ours.verify
    spec = experiment.ours.pool
    hit = len(chosen.hits) if chosen is not None else 0
    groups = f"{spec.groups} × " if spec.groups > 1 else ""
    return [
        f"start    {groups}{spec.masters} master, {spec.stores} stores of {spec.segment_size}, "
        f"{spec.engines} engines, {spec.placement}",
        f"load     {experiment.ours.workload.rps:g} requests/s a group, open loop; "
        f"{plan.blocks} × ({', '.join(plan.arms)}), {plan.warmup_s:g} s warm-up and {plan.window_s:g} s judged each",
        f"inject   {INJECT_AFTER_S:g} s into the window: {hit} target{'s' * (hit != 1)}",
        f"prove    within {seconds(verify.timeout):g} s, again every {seconds(verify.recheck):g} s",
        f"hold     {plan.fault_s:g} s; guards: "
        + ", ".join(_guard(one.probe, one.below, one.above) for one in with_sight(experiment.ours.guards)),
        f"undo     by the runner at the end, by the guardian {seconds(limits.lease):g} s after the runner's last word",
        "judge    from the history, whatever happened",
    ]


def _guard(probe: str, below: float | None, above: float | str | None) -> str:
    return f"{probe} below {below:g}" if below is not None else f"{probe} above {above}"
