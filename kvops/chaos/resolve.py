"""Which members an experiment's faults hit: chosen from names alone, so that a plan and a run choose the same."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from kvops.chaos.experiment import Experiment, FaultCall, Scope
from kvops.chaos.pool import Part
from kvops.errors import Refused, UsageError

ROLES_WITH_QUORUM = ("master", "etcd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One fault on one member."""

    call: FaultCall
    part: Part
    control: Part | None  # must stay well; None when the target is alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Everything that will be hit, and what that costs."""

    hits: tuple[Hit, ...]
    capacity_share: float  # of the groups that are hit: lost while the faults are in force
    groups: tuple[str, ...]
    domains: tuple[str, ...]  # failure domains (group/host) that may be degraded
    quorum_lost: tuple[str, ...]  # "g1 etcd 2 of 3"


def choose(experiment: Experiment, parts: Sequence[Part], *, seed: int) -> Chosen:
    """
    Choose the targets of every fault of an experiment.

    Args:
        experiment: With at least one fault of ours.
        parts: The members of the pool, running or planned.
        seed: Decides which of several; the same parts and seed give the same choice.

    Raises:
        UsageError: There is no fault, or a target matches nothing.
        Refused: More would be lost than the scope allows, or a quorum that is not meant to be.
    """
    calls = experiment.faults
    if not calls:
        raise UsageError(
            "the experiment injects nothing", fix="give its method an action of kvops.chaos.faults"
        )
    scope = experiment.ours.scope
    rng = random.Random(seed)
    chosen: list[tuple[FaultCall, list[Part]]] = []
    scoped: list[Part] | None = None  # several faults without a target of their own hit the same members
    for call in calls:
        if call.target:
            chosen.append((call, _named(call.target, scope, parts, rng)))
            continue
        if scoped is None:
            scoped = _of_scope(scope, _matching(scope, parts), rng)
        chosen.append((call, scoped))
    hit = {part.name: part for _, some in chosen for part in some}
    _check_protected(scope, hit.values())
    share = _capacity_share(hit.values(), parts)
    if share > scope.max_capacity_fraction + 1e-9:
        raise Refused(
            f"{', '.join(hit)} {'is' if len(hit) == 1 else 'are'} {share:.0%} of the capacity of its group; "
            f"scope.max_capacity_fraction allows {scope.max_capacity_fraction:.0%}",
            fix="choose fewer targets, or raise the limit in the file if that much is meant",
        )
    lost = _quorum_lost(hit.values(), parts)
    if lost and not experiment.ours.expect.quorum_lost:
        raise Refused(
            f"the experiment would lose a quorum: {', '.join(lost)}",
            fix="choose fewer targets, or say expect.quorum_lost: true",
        )
    # Masters last: faults are undone in reverse, and a store cannot come back before its master is there.
    hits = tuple(
        sorted(
            (
                Hit(call=call, part=part, control=_control(part, hit, parts))
                for call, some in chosen
                for part in some
            ),
            key=lambda one: (
                ("store", "master", "etcd").index(one.part.role)
                if one.part.role in ("store", "master", "etcd")
                else -1
            ),
        )
    )
    return Chosen(
        hits=hits,
        capacity_share=share,
        groups=tuple(sorted({part.group for part in hit.values()})),
        domains=_domains(scope, hit.values(), parts),
        quorum_lost=tuple(lost),
    )


def _named(target: str, scope: Scope, parts: Sequence[Part], rng: random.Random) -> list[Part]:
    exact = [part for part in parts if target in (part.name, part.member)]
    if scope.select.group:
        exact = [part for part in exact if part.group == scope.select.group]
    if exact:
        return exact[:1]
    of_role = [part for part in parts if part.role == target]
    if of_role:
        return _of_scope(scope, of_role, rng)
    names = [part.member for part in parts] + sorted({part.role for part in parts})
    near = get_close_matches(target, names, n=1)
    raise UsageError(
        f"no member is called {target!r}",
        fix=f"did you mean {near[0]}?" if near else f"there are: {', '.join(dict.fromkeys(names))}",
    )


def _matching(scope: Scope, parts: Sequence[Part]) -> list[Part]:
    wanted = scope.select
    found = [
        part
        for part in parts
        if wanted.role in ("", part.role)
        and wanted.group in ("", part.group)
        and wanted.name in ("", part.member, part.name)
        and wanted.host in ("", part.host, part.host.partition("/")[2])
        and wanted.leads in (None, part.leads)
    ]
    if found:
        return found
    said = ", ".join(
        f"{key} {value}"
        for key, value in (
            ("role", wanted.role),
            ("group", wanted.group),
            ("name", wanted.name),
            ("host", wanted.host),
            ("leads", "" if wanted.leads is None else str(wanted.leads).lower()),
        )
        if value
    )
    known = [*dict.fromkeys(part.role for part in parts), *(part.member for part in parts)]
    near = [
        match
        for word in (wanted.role, wanted.name)
        if word and word not in known
        for match in get_close_matches(word, known, n=1)
    ]
    hint = f"did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"scope.select matches nothing: {said or 'everything'}",
        fix=f"{hint}there are: {', '.join(part.name for part in parts) or 'no members'}",
    )


def _of_scope(scope: Scope, found: Sequence[Part], rng: random.Random) -> list[Part]:
    some = sorted(found, key=lambda part: part.name)
    match scope.mode:
        case "all":
            return some
        case "one":
            return [rng.choice(some)]
        case "count":
            count = round(scope.value)
        case "percent":
            count = math.ceil(len(some) * scope.value / 100)
    if not 1 <= count <= len(some):
        raise UsageError(
            f"scope.value {scope.value:g} ({scope.mode}) of {len(some)} members is {count}",
            fix=f"choose 1 to {len(some)}",
        )
    return sorted(rng.sample(some, count), key=lambda part: part.name)


def _check_protected(scope: Scope, hit: Iterable[Part]) -> None:
    for part in hit:
        if part.role in scope.protect or part.member in scope.protect or part.name in scope.protect:
            raise Refused(f"{part.name} is protected by scope.protect", fix="choose another target")


def _capacity_share(hit: Iterable[Part], parts: Sequence[Part]) -> float:
    """
    The largest share of any hit group that is lost: stores count by their number; a group with all its masters
    gone serves nothing. A member of etcd serves no reads.
    """
    hit = list(hit)
    worst = 0.0
    for group in {part.group for part in hit}:
        for role in ("store", "master"):
            total = sum(part.group == group and part.role == role for part in parts)
            gone = sum(part.group == group and part.role == role for part in hit)
            if not total or not gone:
                continue
            share = gone / total
            # One master of several leads: losing it costs nothing for good, and everything for a moment.
            worst = max(worst, share if role == "store" or gone == total else 1.0 / total)
    return worst


def _quorum_lost(hit: Iterable[Part], parts: Sequence[Part]) -> list[str]:
    hit = list(hit)
    lost = []
    for group in sorted({part.group for part in hit}):
        for role in ROLES_WITH_QUORUM:
            total = sum(part.group == group and part.role == role for part in parts)
            gone = sum(part.group == group and part.role == role for part in hit)
            if total > 1 and gone > (total - 1) // 2:
                lost.append(f"{group} {role} {gone} of {total}")
    return lost


def _control(part: Part, hit: dict[str, Part], parts: Sequence[Part]) -> Part | None:
    others = [one for one in parts if one.name not in hit and one.member != part.member]
    others.sort(
        key=lambda one: (one.role != part.role, one.group != part.group, one.host == part.host, one.name)
    )
    return others[0] if others else None


def _domains(scope: Scope, hit: Iterable[Part], parts: Sequence[Part]) -> tuple[str, ...]:
    """What may be degraded: the targets' hosts; all of a group whose service as a whole is the target."""
    hosts: set[str] = set()
    for part in hit:
        if scope.domain in ("group", "master", "etcd"):
            hosts |= {one.host for one in parts if one.group == part.group}
        else:
            hosts.add(part.host)
    return tuple(sorted(hosts))
