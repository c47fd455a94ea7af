"""
What is wrong with an experiment before anything is touched: pure rules over its text and the catalogue.

An *error* refuses it, a *warning* says what it cannot show, *info* what is different from what its author may think.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal

from kvops.chaos.experiment import Experiment, differences, is_probe, seconds
from kvops.chaos.history import Arm
from kvops.chaos.pool import Part, planned_parts
from kvops.chaos.probes import PROBES
from kvops.chaos.resolve import Hit, choose
from kvops.errors import KvopsError, Refused, UsageError

SAMPLES_FOR_P99: Final = 1_000  # of a cell: field/chaos.md's rule for a p99 that means something
BLOCKS_FOR_STATISTICS: Final = 5
CLEAN_FOR_TENTH_PERCENT: Final = (
    3_000  # rule of three: an error rate below 0.1 % needs so many clean requests
)
DETECTION_S: Final = 2.0  # a silent store is unmounted after this long: kvops.limits.STORE_TTL_MS

NOT_BUILT: Final = frozenset({"rdma.link_down", "rdma.qp_error"})
"""Names that experiments may use although this version does not have the fault: UNSUPPORTED then, not a mistake."""

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing to know about an experiment."""

    severity: Severity
    rule: str  # fidelity, scope, conflict, baseline, deadlines, statistics, foreign, hypothesis, fault
    text: str
    fix: str = ""
    guard: bool = False  # of an error: no mistake in the file, but more than may be


Rule = Callable[[Experiment, Mapping[str, type]], Iterator[Remark]]


def lint(
    experiment: Experiment,
    catalogue: Mapping[str, type],
    *,
    seed: int | None = None,
    parts: Sequence[Part] | None = None,
) -> list[Remark]:
    """
    Everything there is to say, errors first.

    Args:
        experiment: As read.
        catalogue: Name → class of the faults that this version has.
        seed: For the choice of targets; the file's own by default.
        parts: The members of a group that runs already; those of the pool that will be started by default.
    """
    remarks: list[Remark] = []
    for rule in (
        _faults,
        _hypothesis,
        _fidelity,
        _arms,
        _deadlines,
        _statistics,
        _checkers,
        _foreign,
    ):
        remarks += rule(experiment, catalogue)
    remarks += _scope(experiment, catalogue, seed, parts)
    order = ("error", "warning", "info")
    return sorted(remarks, key=lambda remark: order.index(remark.severity))


def unsupported(experiment: Experiment) -> list[str]:
    """Names of faults that are designed and that this version does not have."""
    return [call.name for call in experiment.faults if call.name in NOT_BUILT]


def _faults(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    if not experiment.faults:
        yield Remark(
            severity="info" if experiment.foreign else "error",
            rule="fault",
            text="the method injects nothing that kvops could prove",
            fix="add an action with provider {type: python, module: kvops.chaos.faults, func: process_pause}",
        )
    for call in experiment.faults:
        if call.name in catalogue:
            yield from _arguments(call.name, call.arguments, catalogue[call.name])
        elif call.name in NOT_BUILT:
            yield Remark(
                severity="warning",
                rule="fault",
                text=f"this version has no {call.name}: a run is UNSUPPORTED",
            )
        else:
            near = get_close_matches(call.name, [*catalogue, *NOT_BUILT], n=1)
            yield Remark(
                severity="error",
                rule="fault",
                text=f"there is no fault {call.name}",
                fix=f"did you mean {near[0]}?" if near else "see kvops chaos catalog",
            )


def _hypothesis(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    """Probes that nobody asks, and waits that nobody keeps, must not look as if they were."""
    hypothesis = experiment.steady_state_hypothesis
    for probe in hypothesis.probes if hypothesis is not None else []:
        provider = probe.provider
        if provider is None or not is_probe(probe):
            continue
        if provider.func not in PROBES:
            near = get_close_matches(provider.func, PROBES, n=1)
            yield Remark(
                severity="error",
                rule="hypothesis",
                text=f"there is no probe {provider.func!r}",
                fix=f"did you mean {near[0]}?" if near else f"known: {', '.join(PROBES)}",
            )
        elif probe.tolerance is None:
            yield Remark(
                severity="error",
                rule="hypothesis",
                text=f"{provider.func} has no tolerance",
                fix="add tolerance: [0.99, 1.0]",
            )
    for call in experiment.faults:
        if call.delay_s:
            yield Remark(
                severity="warning",
                rule="hypothesis",
                text=f"{call.name}: the pause before it is not kept: all faults are injected at one moment",
            )


def _arguments(name: str, given: Mapping[str, Any], fault: type) -> Iterator[Remark]:
    from kvops.chaos.targets import parameters

    known = parameters(fault)
    for argument in given:
        if argument not in known:
            near = get_close_matches(argument, known, n=1)
            takes = f"{name} takes {', '.join(known)}" if known else f"{name} takes no arguments"
            yield Remark(
                severity="error",
                rule="fault",
                text=f"{name} has no argument {argument!r}",
                fix=f"did you mean {near[0]}?" if near else takes,
            )


def _fidelity(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    """A fault must reach the layer whose failure it is meant to stand for."""
    pool = experiment.ours.pool
    data_path = set(pool.transports)
    for call in experiment.faults:
        fault = catalogue.get(call.name)
        if fault is None:
            continue
        reached = {str(one) for one in getattr(fault, "transports", ())}
        if "verbs" in data_path and "verbs" not in reached and call.name.startswith("net."):
            yield Remark(
                severity="error",
                rule="fidelity",
                text=f"{call.name} shapes the kernel's path; hardware RDMA goes past it, so nothing would be hit",
                fix="aim it at the control path (master, etcd), or use a fault of the RDMA layer",
            )
        if call.name.startswith("net.") and "shm" in data_path:
            yield Remark(
                severity="info",
                rule="fidelity",
                text=f"{call.name} does not reach engines on the target's own host: they read mapped memory",
            )
        if call.name.startswith("clock.") and (call.target or experiment.ours.scope.select.role).startswith(
            "etcd"
        ):
            yield Remark(
                severity="error",
                rule="fidelity",
                text="a preloaded clock does not reach etcd: Go programs do not call libc for the time",
                fix="aim it at a master or a store",
            )


_MISSED_ARMS: Final[tuple[tuple[Arm, Severity, str], ...]] = (
    (Arm.FAULT, "error", "no fault arm: nothing would be injected"),
    (
        Arm.BASELINE,
        "error",
        "no baseline arm: nothing to compare with, so a run could only end BASELINE_NOT_STEADY",
    ),
    (Arm.CONTROL, "warning", "no control arm (A'): what two equal runs disagree on cannot be subtracted"),
    (Arm.CACHE_OFF, "warning", "no cache-off arm: 'never worse than no cache' (C4) is not concluded"),
)


def _arms(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    arms = experiment.ours.workload.arms
    for arm, severity, text in _MISSED_ARMS:
        if arm not in arms:
            fix = "add it" if arm is Arm.FAULT else f"add {arm} to workload.arms"
            yield Remark(severity=severity, rule="baseline", text=text, fix=fix)


def _deadlines(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    limits, workload = experiment.ours.deadlines, experiment.ours.workload
    fault_s, total_s, lease_s = seconds(limits.fault), seconds(limits.total), seconds(limits.lease)
    need_s = fault_s + seconds(limits.undo) + seconds(limits.recover)
    if need_s > total_s:
        yield Remark(
            severity="error",
            rule="deadlines",
            text=f"fault, undo and recover take up to {need_s:g} s, deadlines.total is {total_s:g} s",
            fix="raise total",
        )
    if fault_s + 1.0 >= workload.window_s:
        yield Remark(
            severity="error",
            rule="deadlines",
            text=f"a fault of {fault_s:g} s does not fit into a window of {workload.window_s:g} s with its recovery",
            fix="lengthen workload.windows, or shorten deadlines.fault",
        )
    if not 0.5 <= lease_s < max(fault_s, 1.0) + seconds(limits.undo) + 30:
        yield Remark(
            severity="error", rule="deadlines", text=f"a lease of {lease_s:g} s", fix="use 1s to 10s"
        )
    if 0 < fault_s < DETECTION_S:
        yield Remark(
            severity="warning",
            rule="deadlines",
            text=f"{fault_s:g} s is shorter than the {DETECTION_S:g} s after which a silent store is given up",
        )
    if not experiment.ours.guards:
        yield Remark(
            severity="warning",
            rule="deadlines",
            text="no guards: only deadlines, and the loss of telemetry, end it early",
            fix="add guards",
        )


def _statistics(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    workload = experiment.ours.workload
    window = workload.rps * workload.window_s
    if workload.blocks < BLOCKS_FOR_STATISTICS:
        yield Remark(
            severity="info",
            rule="statistics",
            text=f"{workload.blocks} blocks: latency is not judged below {BLOCKS_FOR_STATISTICS} pairs",
        )
    if window < SAMPLES_FOR_P99:
        yield Remark(
            severity="info",
            rule="statistics",
            text=f"{window:.0f} requests a window: no p99 of a single window below {SAMPLES_FOR_P99:,}",
        )
    if window * workload.blocks < CLEAN_FOR_TENTH_PERCENT:
        yield Remark(
            severity="info",
            rule="statistics",
            text=f"{window * workload.blocks:,.0f} requests an arm: "
            f"an error rate below 0.1 % needs {CLEAN_FOR_TENTH_PERCENT:,} clean ones",
        )
    under_fault = workload.rps * seconds(experiment.ours.deadlines.fault) * workload.blocks
    if under_fault < SAMPLES_FOR_P99:
        yield Remark(
            severity="info",
            rule="statistics",
            text=f"{under_fault:,.0f} requests while the fault is active: C4 needs {SAMPLES_FOR_P99:,} for a p99",
            fix="hold the fault for longer, or send more",
        )


def _checkers(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    from kvops.chaos.checkers import registry

    for name in experiment.ours.checkers:
        try:
            registry.find([name])
        except UsageError as error:
            yield Remark(severity="error", rule="checkers", text=error.what, fix=error.fix)


def _foreign(experiment: Experiment, catalogue: Mapping[str, type]) -> Iterator[Remark]:
    for text in differences(experiment):
        yield Remark(severity="info", rule="foreign", text=text)


def _scope(
    experiment: Experiment, catalogue: Mapping[str, type], seed: int | None, parts: Sequence[Part] | None
) -> Iterator[Remark]:
    if not experiment.faults:
        return
    try:
        chosen = choose(
            experiment,
            planned_parts(experiment.ours.pool) if parts is None else parts,
            seed=experiment.ours.workload.seed if seed is None else seed,
        )
    except KvopsError as error:
        yield Remark(
            severity="error",
            rule="scope",
            text=error.what,
            fix=error.fix,
            guard=isinstance(error, Refused),
        )
        return
    if not experiment.ours.compose:
        yield from _conflicts(chosen.hits, catalogue)


def _conflicts(hits: Sequence[Hit], catalogue: Mapping[str, type]) -> Iterator[Remark]:
    """Faults that end up on one member, whatever each of them calls it."""
    for index, one in enumerate(hits):
        for other in hits[index + 1 :]:
            if one.part.name != other.part.name:
                continue
            first, second = sorted((one.call, other.call), key=lambda call: call.index)
            clash = first.name == second.name or any(
                other_name.startswith(prefix)
                for name, other_name in ((first.name, second.name), (second.name, first.name))
                for prefix in getattr(catalogue.get(name), "conflicts", ())
            )
            if clash:
                yield Remark(
                    severity="error",
                    rule="conflict",
                    text=f"{first.name} and {second.name} on one target ({one.part.name}) hide each other",
                    fix="use two experiments, or say compose: true if this order is meant",
                )
