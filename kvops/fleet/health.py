"""
Is a group healthy? A pure judgement of what its processes and its masters say.

Healthy: a leader answers, there are stores and every one serves. Degraded: clients are served, but something
that should be there is not. Down: no leader answers, or no store serves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvops.fleet.preflight import human_bytes

if TYPE_CHECKING:
    from kvops.store.model import Event, MasterStatus, StoreInfo


class Health(StrEnum):
    """The answer of ``kvops status``."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    DOWN = "down"


class Life(StrEnum):
    """What is known of a process from outside."""

    RUNNING = "running"
    STOPPED = "stopped"  # by SIGSTOP or a debugger: alive, answers nothing
    ENDED = "ended"
    UNKNOWN = "unknown"  # on another machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A process that the group should have."""

    name: str
    role: str
    host: str = ""
    numa_node: int = 0
    pid: int = 0
    life: Life = Life.UNKNOWN
    since: str | None = None  # when its process was first seen ended or stopped, RFC 3339
    address: str = ""
    control: str = ""
    http: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a group is not healthy."""

    code: str
    subject: str
    text: str
    since: str | None = None  # RFC 3339, UTC
    next: str = ""  # the command to run


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What ``kvops status`` shows."""

    group: str
    environment: str
    health: Health
    reasons: list[Reason]
    masters: list[dict[str, Any]]
    stores: list[dict[str, Any]]
    etcd: list[dict[str, Any]] = field(
        default_factory=list
    )  # members that kvops started; others are not known
    clients: list[dict[str, Any]] = field(default_factory=list)
    holds: list[dict[str, Any]] = field(default_factory=list)
    objects: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0  # of the segments of the stores that serve
    populated_bytes: int = 0  # of it, what is ready for objects: after a start the rest is still being filled
    evicted_total: int = 0
    unseen: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As JSON gives it."""
        return {
            "group": self.group,
            "environment": self.environment,
            "backend": "native",
            "health": str(self.health),
            "reasons": [
                {"code": one.code, "subject": one.subject, "since": one.since, "text": one.text}
                for one in self.reasons
            ],
            "masters": self.masters,
            "stores": self.stores,
            "etcd": self.etcd,
            "clients": self.clients,
            "holds": self.holds,
            "objects": self.objects,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "populated_bytes": self.populated_bytes,
            "evicted_total": self.evicted_total,
            "unseen": self.unseen,
        }


# The worst first: how much of the pool an operator loses by it.
_STATE_RANK: Final = {
    "down": 0,
    "stopped": 1,
    "gone": 2,
    "unmounted": 3,
    "suspected": 4,
    "unseen": 5,
    "draining": 6,
    "announcing": 7,
}
# Of StoreState, by their text: judging must not load the store's numpy. An announcing store serves reads.
_SERVING: Final = ("ready", "announcing")
_STORE_TEXT: Final = {
    "down": "its process ended",
    "stopped": "its process is stopped by a signal",
    "gone": "the master gave it up",
    "unmounted": "it runs, but the master does not know it",
    "suspected": "it is silent, or clients reported it",
    "draining": "it is being drained",
    "announcing": "its slot table is still being read",
}


# Of a store whose process runs: it is not back yet, and waiting may help.
_AWAY: Final = ("gone", "unmounted", "suspected", "unseen", "announcing")


def not_back(judgement: Judgement, names: Collection[str] | None = None) -> list[str]:
    """
    Members that run and have not joined the group (again) yet; a master that does not answer is one.

    Args:
        judgement: Of the group.
        names: Only these stores; None: all of them.
    """
    masters = [row["name"] for row in judgement.masters if row["state"] == "unseen"]
    stores = [row["name"] for row in judgement.stores if row["state"] in _AWAY]
    return masters + [name for name in stores if names is None or name in names]


def last_change(events: Iterable[Event]) -> dict[str, str]:
    """When each subject last changed, from events oldest first."""
    return {event.subject: event.time for event in events}


ETCD_SILENT_MS: Final = 3_000  # one member of etcd that died is found out sooner
_TROUBLE: Final = ("store.suspected", "store.lost")
_BACK: Final = ("store.mounted", "store.ready", "store.recovered")


def trouble_since(events: Iterable[Event]) -> dict[str, str]:
    """
    Since when each store that is in trouble has been, from events oldest first.

    What follows the first sign (given up, forgotten) does not move it; coming back ends it. A former mount
    that is given up because its store is back as another says nothing of the new one.
    """
    found: dict[str, str] = {}
    mounts: dict[str, object] = {}
    for event in events:
        name, mount = event.subject, event.detail.get("id")
        if event.event in _BACK:
            found.pop(name, None)
            mounts[name] = mount if mount is not None else mounts.get(name)
        elif event.event in _TROUBLE and (mount is None or mount == mounts.get(name, mount)):
            found.setdefault(name, event.time)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """When a store came, and with how much of its memory prepared."""

    at: str  # RFC 3339
    populated_bytes: int


def mounted_at(events: Iterable[Event]) -> dict[str, Mounted]:
    """Each store's last mount, from events oldest first."""
    found = {}
    for event in events:
        populated = event.detail.get("populated_bytes")
        if event.event == "store.mounted" and isinstance(populated, int):
            found[event.subject] = Mounted(at=event.time, populated_bytes=populated)
    return found


def populate_eta_s(
    mounted: Mounted | None, *, populated_bytes: int, capacity_bytes: int, now: datetime
) -> float | None:
    """
    How long a store will need for the rest of its memory, at its own pace since it was mounted.

    Returns:
        Seconds; 0 when all of it is there, None while its pace is not known.
    """
    if populated_bytes >= capacity_bytes:
        return 0.0
    if mounted is None:
        return None
    taken_s = (now - datetime.fromisoformat(mounted.at)).total_seconds()
    gained = populated_bytes - mounted.populated_bytes
    if gained <= 0 or taken_s <= 0:
        return None
    return (capacity_bytes - populated_bytes) * taken_s / gained


def judge(
    *,
    group: str,
    environment: str,
    known: Sequence[Known],
    answers: Mapping[str, MasterStatus],
    since: Mapping[str, str],
    trouble: Mapping[str, str] = MappingProxyType({}),
    stopped_since: str | None = None,
    mounts: Mapping[str, Mounted] = MappingProxyType({}),
    now: datetime | None = None,
) -> Judgement:
    """
    Judge a group.

    Args:
        group: Its name.
        environment: Where it runs.
        known: The processes it should have; for a group elsewhere, its masters alone.
        answers: What masters said, by the names in ``known``; those that did not answer are missing.
        since: When each subject last changed.
        trouble: Since when each store that is in trouble has been (``trouble_since``).
        stopped_since: When a group that was stopped on purpose was stopped.
        mounts: When each store came (``mounted_at``): how fast its memory is being prepared.
        now: In UTC; without it no time to go is given.
    """
    reasons: list[Reason] = []
    unseen: list[str] = []
    leaders = [status for status in answers.values() if status.role == "leader"]
    leader = max(leaders, key=lambda status: status.term, default=None)
    masters = []
    for one in (one for one in known if one.role == "master"):
        status = answers.get(one.name)
        masters.append(_master_row(one, status, leader))
        if status is not None:
            if leader is not None and not status.promotable:
                reasons.append(
                    Reason(
                        code="master.behind", subject=one.name, text="could not lead now: it is catching up"
                    )
                )
            if status.etcd_silent_ms >= ETCD_SILENT_MS:
                reasons.append(
                    Reason(
                        code="master.no_etcd",
                        subject=one.name,
                        text=f"etcd has not answered it for {status.etcd_silent_ms / 1_000:.0f} s",
                    )
                )
            reasons += [
                Reason(
                    code=f"master.{one_trouble.code}",
                    subject=one.name,
                    text=one_trouble.text,
                    next=one_trouble.fix,
                )
                for one_trouble in status.troubles
            ]
            continue
        unseen.append(one.name)
        reasons.append(_process_reason(one))
    reasons += [
        _process_reason(one) for one in known if one.role == "etcd" and one.life in (Life.ENDED, Life.STOPPED)
    ]
    if leader is None and answers:
        reasons.append(_no_leader(group, known, answers))

    mounted = _newest_mounts(leader.stores) if leader is not None else {}
    by_name = {one.name: one for one in known if one.role == "store"}
    # A master remembers stores of the group's former life for a while; where the members are known, such a one is
    # of interest only if it serves.
    here = any(one.life is not Life.UNKNOWN for one in known)
    strangers = [name for name, info in mounted.items() if not here or info.state in _SERVING]
    names = dict.fromkeys([*by_name, *strangers])
    stores = [_store_row(name, by_name.get(name), mounted.get(name), leader) for name in names]
    for row in stores:
        state = row["state"]
        row["populate_eta_s"] = _eta(row, mounts.get(row["name"]), now)
        held = _hold_of(row, leader)
        row["hold"] = held["number"] if held is not None else None
        row["since"] = _since(
            state, by_name.get(row["name"]), trouble.get(row["name"]), since.get(row["name"])
        )
        if state == "unseen":
            unseen.append(row["name"])
        elif state in _STORE_TEXT:
            follow = _next(state, row["name"], row["pid"])
            if state == "draining" and held is not None:
                follow = f"kvops undrain {held['target']}"
            reasons.append(
                Reason(
                    code=f"store.{state}",
                    subject=row["name"],
                    text=_held_text(held) if state == "draining" and held else _STORE_TEXT[state],
                    since=row["since"],
                    next=follow if row["name"] in by_name else "",
                )
            )
    reasons += [
        Reason(
            code="store.misplaced",
            subject=row["name"],
            text=f"{human_bytes(row['misplaced_bytes'])} of its memory lie on other NUMA nodes than"
            f" {row['numa_node']}, to which it is bound",
            next=f"kvops restart {row['name']}" if row["name"] in by_name else "",
        )
        for row in stores
        if row["misplaced_bytes"] and row["state"] in _SERVING
    ]
    if leader is not None and leader.breaker_open:
        reasons.append(
            Reason(
                code="breaker.open", subject=group, text="clients work without the pool", next="kvops events"
            )
        )
    if leader is not None and not stores:
        reasons.append(
            Reason(
                code="store.none",
                subject=group,
                text="no store: nothing can be put",
                next="kvops stop && kvops start --stores 1" if here else "",
            )
        )
    serving = [row for row in stores if row["state"] in _SERVING]
    if not known:
        reasons = [Reason(code="group.not_started", subject=group, text="it was never started here")]
    if stopped_since is not None and not any(one.life is Life.RUNNING for one in known):
        reasons = [Reason(code="group.stopped", subject=group, text="it was stopped", since=stopped_since)]
        unseen = []
    health = Health.DEGRADED if reasons else Health.HEALTHY
    if leader is None or (stores and not serving):
        health = Health.DOWN
    stores.sort(key=lambda row: _STATE_RANK.get(row["state"], 99))  # stable: names keep their order otherwise
    return Judgement(
        group=group,
        environment=environment,
        health=health,
        reasons=reasons,
        masters=masters,
        stores=stores,
        etcd=[_etcd_row(one) for one in known if one.role == "etcd"],
        clients=[
            {"name": one.name, "host": one.host, "pid": one.pid, "connections": one.connections}
            for one in (leader.clients if leader is not None else [])
        ],
        holds=_holds(leader),
        objects=leader.objects if leader is not None else 0,
        used_bytes=leader.used_bytes if leader is not None else 0,
        capacity_bytes=sum(row["capacity_bytes"] for row in serving) if leader is not None else 0,
        populated_bytes=leader.capacity_bytes if leader is not None else 0,
        evicted_total=leader.evicted_total if leader is not None else 0,
        unseen=unseen,
    )


def _eta(row: Mapping[str, Any], mounted: Mounted | None, now: datetime | None) -> float | None:
    """Of a store that serves; rounded as an estimate deserves."""
    if now is None or row["state"] not in _SERVING:
        return None
    eta_s = populate_eta_s(
        mounted, populated_bytes=row["populated_bytes"], capacity_bytes=row["capacity_bytes"], now=now
    )
    return None if eta_s is None else round(eta_s, 1)


def _holds(leader: MasterStatus | None) -> list[dict[str, Any]]:
    """Every hold as JSON gives it; what was not counted yet is null."""
    if leader is None:
        return []
    names = (name for name in type(leader.holds[0]).__struct_fields__) if leader.holds else ()
    fields = list(names)
    rows = []
    for hold in leader.holds:
        row: dict[str, Any] = {name: getattr(hold, name) for name in fields}
        row |= {"kind": str(hold.kind), "state": str(hold.state)}
        row["left"] = None if hold.left < 0 else hold.left
        rows.append(row)
    return rows


def _hold_of(row: Mapping[str, Any], leader: MasterStatus | None) -> dict[str, Any] | None:
    """The strictest hold that a store is under, by its name or its host."""
    found = [
        hold for hold in _holds(leader) if hold["target"] == (row["host"] if hold["host"] else row["name"])
    ]
    return max(found, key=lambda hold: str(hold["kind"]), default=None)  # "drain" is above "cordon"


def _held_text(hold: Mapping[str, Any]) -> str:
    done = {"drained": "drained", "lost": "drained; its process died meanwhile"}
    why = f": {hold['reason']}" if hold["reason"] else ""
    return f"{done.get(hold['state'], 'being drained')} by {hold['owner']} (hold #{hold['number']}{why})"


def _newest_mounts(stores: Iterable[StoreInfo]) -> dict[str, StoreInfo]:
    """One mount a store: the newest that is not gone, else the newest."""
    found: dict[str, StoreInfo] = {}
    for store in sorted(stores, key=lambda store: (store.state != "gone", store.id)):
        found[store.name] = store
    return found


def _since(state: str, one: Known | None, trouble: str | None, change: str | None) -> str | None:
    """Since when a store is in its state: an end or a stop is dated by its first sign, and keeps that date."""
    if state not in ("down", "stopped", "gone", "suspected"):
        return change
    seen = one.since if one is not None else None
    return min(filter(None, (trouble, seen)), default=None)


def _next(state: str, name: str, pid: int | None) -> str:
    """What to do about a member in this state."""
    if state == "stopped":
        return f"kill -CONT {pid}, or kvops restart {name}"
    return f"kvops restart {name}" if state == "down" else f"kvops logs {name}"


def _process_reason(one: Known) -> Reason:
    state = {Life.ENDED: "down", Life.STOPPED: "stopped"}.get(one.life, "unseen")
    return Reason(
        code=f"{one.role}.{state}",
        subject=one.name,
        text=_STORE_TEXT.get(state, "it did not answer in time"),
        since=one.since,
        next=_next(state, one.name, one.pid) if one.life is not Life.UNKNOWN else "",
    )


def _etcd_row(one: Known) -> dict[str, Any]:
    """A member of etcd, as its process shows: masters say themselves when it does not answer them."""
    return {
        "name": one.name,
        "address": one.address,
        "pid": one.pid or None,
        "host": one.host,
        "state": {Life.ENDED: "down", Life.UNKNOWN: "unseen"}.get(one.life, str(one.life)),
    }


def _no_leader(group: str, known: Sequence[Known], answers: Mapping[str, MasterStatus]) -> Reason:
    """Why nobody leads: an election that is under way, or an in-sync set of which nobody is left."""
    newest = max(answers.values(), key=lambda status: (status.term, status.sequence))
    able = {status.name for status in answers.values()} & set(newest.members)
    damaged = any(trouble.code == "etcd_damaged" for trouble in newest.troubles)
    if able or not (newest.members or damaged):
        return Reason(code="master.no_leader", subject=group, text="no master leads")
    if not newest.members:
        return Reason(
            code="master.no_leader",
            subject=group,
            text="no master leads: etcd does not say who may",
            next=newest.troubles[0].fix,
        )
    members = ", ".join(newest.members)
    local = [one.name for one in known if one.name in newest.members and one.life is not Life.UNKNOWN]
    way_out = f"kvops master promote {newest.name} --force in-sync"
    return Reason(
        code="master.no_candidate",
        subject=group,
        text=f"no master leads: only {members} may, which had everything that was acknowledged, and did not answer;"
        f" gone for good: {way_out}",
        next=f"kvops restart {' '.join(local)}" if local else way_out,
    )


def _master_row(one: Known, status: MasterStatus | None, leader: MasterStatus | None) -> dict[str, Any]:
    if status is None:
        state = {Life.ENDED: "down", Life.STOPPED: "stopped"}.get(one.life, "unseen")
        role, term, lag = None, None, None
    else:
        state, role, term = status.role, status.role, status.term
        lag = max(0, leader.sequence - status.sequence) if leader is not None else None
    return {
        "name": status.name if status is not None else one.name,
        "address": one.address or (status.address if status is not None else ""),
        "pid": status.pid if status is not None else one.pid or None,
        "host": status.host if status is not None else one.host,
        "role": role,
        "term": term,
        "lag": lag,  # operations
        "applied": status.sequence if status is not None else None,
        "promotable": status.promotable if status is not None else None,
        "state": state,
        "control": one.control,
        "http": one.http,
        "uptime_s": round(status.uptime_s, 1) if status is not None else None,
    }


def _store_row(
    name: str, one: Known | None, info: StoreInfo | None, leader: MasterStatus | None
) -> dict[str, Any]:
    life = one.life if one is not None else Life.UNKNOWN
    if life is Life.ENDED:
        state = "down"
    elif life is Life.STOPPED:
        state = "stopped"
    elif info is not None:
        state = str(info.state)
    else:
        state = "unmounted" if leader is not None else "unseen"
    return {
        "name": name,
        "address": info.address if info is not None else (one.address if one is not None else ""),
        "pid": (one.pid if one is not None else info.pid if info is not None else 0) or None,
        "host": info.host if info is not None else (one.host if one is not None else ""),
        "numa_node": info.numa_node if info is not None else (one.numa_node if one is not None else 0),
        "state": state,
        "capacity_bytes": info.capacity_bytes if info is not None else 0,
        "populated_bytes": info.populated_bytes if info is not None else 0,
        "populated_share": round(info.populated_bytes / info.capacity_bytes, 4)
        if info is not None and info.capacity_bytes
        else 0.0,
        "used_bytes": info.used_bytes if info is not None else 0,
        "objects": info.objects if info is not None else 0,
        "transports": list(info.transports) if info is not None else [],
        "misplaced_bytes": info.misplaced_bytes if info is not None else 0,
        "http": info.http_address if info is not None else (one.http if one is not None else ""),
    }
