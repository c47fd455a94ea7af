"""
Rolling restart: which node is next, when to go on, when to stop, where to resume.

Drains, restarts and looks are handed in (``Operations``), as are clock and pause; the progress is written down after
every step, so that a rollout that was stopped, killed or interrupted goes on where it was.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from kvops.errors import KvopsError, Refused

STATE_SCHEMA: Final = 1
LOOK_PAUSE_S: Final = 0.5  # between looks at the hit ratio
TELL_S: Final = 5.0  # between words about it
LOOKUPS_MIN: Final = 200  # fewer in a window are no traffic to judge by
RATIO_BACK: Final = 0.95  # of the hit ratio before: caches differ by as much from minute to minute
OBJECTS_BACK: Final = 0.95  # of the objects before, where they were migrated


class Step(StrEnum):
    """How far a node is."""

    PENDING = "pending"
    DRAINING = "draining"
    RESTARTING = "restarting"
    JOINING = "joining"
    SETTLING = "settling"
    DONE = "done"


class RolloutStopped(KvopsError):
    """A rollout met trouble: what is done stays done, the rest is as it was."""


class NodeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One member on its way."""

    name: str
    role: str
    step: Step = Step.PENDING
    process: str = ""  # whom the restart shall replace: pid, start time and boot id
    objects: int = 0  # in it before
    held: bool = False  # an operator's hold lies on it: it is neither drained nor undrained
    took_s: float = 0.0


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """rollout.yaml."""

    schema: int = STATE_SCHEMA
    what: str = "restart"
    migrate: bool = False
    group_started: str = ""  # of which life of the group
    started: str = ""  # RFC 3339, UTC
    ended: str = ""
    stopped: str = ""  # why it stopped; "" while it goes on or after it ended
    ratio_before: float | None = None  # token hits of lookups; None: there was no traffic to judge by
    objects_before: int = 0
    nodes: list[NodeProgress] = []

    @property
    def unfinished(self) -> list[NodeProgress]:
        """Nodes that are not done."""
        return [node for node in self.nodes if node.step is not Step.DONE]

    def with_nodes(self, names: Sequence[str], **change: object) -> RolloutState:
        """The same rollout with some nodes changed."""
        nodes = [
            msgspec.structs.replace(node, **change) if node.name in names else node for node in self.nodes
        ]
        return msgspec.structs.replace(self, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A group at one moment."""

    serving: frozenset[str]  # stores
    masters: frozenset[str] = frozenset()
    leader: str = ""  # "" when none is seen
    away: Mapping[str, str] = field(default_factory=dict)  # stores that do not serve, and their state
    held: frozenset[str] = frozenset()  # stores under a hold that is not this rollout's
    processes: Mapping[str, str] = field(default_factory=dict)  # of the members that run
    objects: int = 0
    objects_by_store: Mapping[str, int] = field(default_factory=dict)
    lookups: int = 0  # since the master started
    hits: int = 0


class Operations(Protocol):
    """What a rollout does to a group."""

    def look(self) -> Seen:
        """See the group now."""

    def drain(self, names: Sequence[str], *, migrate: bool) -> None:
        """Let nobody be sent to these stores any more, and wait for their last readers."""

    def step_down(self) -> None:
        """Let another master lead, one that has everything."""

    def restart(self, names: Sequence[str]) -> None:
        """Stop these members, start them again, return when they are ready."""

    def undrain(self, names: Sequence[str]) -> None:
        """Let these stores serve."""

    def wait_joined(self, names: Sequence[str]) -> Sequence[str]:
        """Wait, bounded, until these members have joined the group; those that have not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How careful a rollout is."""

    unavailable_max: int = 1
    window_s: float = 5.0  # over which the hit ratio is taken; 0: it is not looked at
    settle_s: float = 300.0  # how long it may take to come back


def hit_ratio(before: Seen, now: Seen) -> float | None:
    """Hits of the lookups between two looks; None when there were too few, or the master has restarted."""
    lookups, hits = now.lookups - before.lookups, now.hits - before.hits
    if lookups < LOOKUPS_MIN or not 0 <= hits <= lookups:
        return None
    return hits / lookups


def batches(
    nodes: Sequence[NodeProgress], *, unavailable_max: int, leader: str = ""
) -> list[list[NodeProgress]]:
    """
    Stores first, so many at a time; then masters one by one, who leads last; then what is neither, one by one.

    Args:
        nodes: What is left to do.
        unavailable_max: How many stores may be away at once.
        leader: The master that leads now.
    """
    stores = [node for node in nodes if node.role == "store"]
    others = sorted(
        (node for node in nodes if node.role != "store"),
        key=lambda node: (node.role != "master", node.name == leader),  # stable: else they keep their order
    )
    return [
        *(stores[at : at + unavailable_max] for at in range(0, len(stores), unavailable_max)),
        *([node] for node in others),
    ]


def why_not(names: Sequence[str], seen: Seen, *, unavailable_max: int) -> Refused | None:
    """Why these stores may not be taken away now; None when they may."""
    away = {name: state for name, state in seen.away.items() if name not in names}
    taken = [name for name in names if name in seen.serving]
    if away and len(away) + len(taken) > unavailable_max:
        what = ", ".join(f"{name} is {state}" for name, state in sorted(away.items()))
        return Refused(
            f"{what}: with {', '.join(names)} {len(away) + len(taken)} stores would not serve, more than "
            f"--max-unavailable {unavailable_max}",
            fix=f"bring it back first: kvops restart {' '.join(sorted(away))}",
        )
    return None


class Rollout:
    """Walks through a rollout's nodes; every change of its state goes to ``save`` first."""

    def __init__(
        self,
        state: RolloutState,
        operations: Operations,
        *,
        pace: Pace,
        save: Callable[[RolloutState], None],
        tell: Callable[[str, str], None] = lambda name, text: None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.state = state
        self._do = operations
        self._pace = pace
        self._save = save
        self._tell = tell
        self._clock = clock
        self._pause = pause

    def run(self) -> RolloutState:
        """
        Do all that is left to do.

        Raises:
            RolloutStopped: At the first trouble; the nodes behind it are untouched.
        """
        if self.state.stopped:
            self._put(msgspec.structs.replace(self.state, stopped=""))
        names: list[str] = []
        try:
            self._baseline()
            while left := self.state.unfinished:
                seen = self._do.look()
                batch = batches(left, unavailable_max=self._pace.unavailable_max, leader=seen.leader)[0]
                names = [node.name for node in batch]
                self._walk(batch, seen)
        except KvopsError as error:
            raise self._stopped(names, error) from error
        except BaseException as error:
            self._put(msgspec.structs.replace(self.state, stopped=f"interrupted: {type(error).__name__}"))
            raise
        return self.state

    def _put(self, state: RolloutState) -> None:
        self._save(state)
        self.state = state

    def _step(self, names: Sequence[str], step: Step) -> None:
        self._put(self.state.with_nodes(names, step=step))

    def _stopped(self, names: Sequence[str], error: KvopsError) -> RolloutStopped:
        where = ", ".join(names) or "the beginning"
        self._put(msgspec.structs.replace(self.state, stopped=f"{where}: {error.what}"))
        done = len(self.state.nodes) - len(self.state.unfinished)
        return RolloutStopped(
            f"stopped at {where}, {done} of {len(self.state.nodes)} done: {error.what}",
            fix=f"{error.fix}; then the same command again goes on there",
        )

    def _baseline(self) -> None:
        """How the group does before anything is touched; a rollout that goes on keeps what it began with."""
        if any(node.step is not Step.PENDING for node in self.state.nodes):
            return
        before = self._do.look()
        ratio = None
        if self._pace.window_s > 0:
            self._tell("", f"taking the hit ratio over {self._pace.window_s:g} s")
            self._pause(self._pace.window_s)
            ratio = hit_ratio(before, self._do.look())
        self._put(msgspec.structs.replace(self.state, ratio_before=ratio, objects_before=before.objects))

    def _walk(self, batch: Sequence[NodeProgress], seen: Seen) -> None:
        began = self._clock()
        names = [node.name for node in batch]
        # Restarted already, when the one it was to replace is gone and another runs.
        behind = [
            node.name
            for node in batch
            if node.step in (Step.RESTARTING, Step.JOINING, Step.SETTLING)
            and seen.processes.get(node.name, node.process) != node.process
        ]
        ahead = [node.name for node in batch if node.name not in behind]
        stores = [node.name for node in batch if node.role == "store"]
        if ahead:
            self._replace(ahead, stores, seen)
        self._step(names, Step.JOINING)
        held = [node.name for node in self.state.nodes if node.held]
        self._do.undrain([name for name in stores if name not in held])
        away = self._do.wait_joined(names)
        if away:
            raise Refused(
                f"{', '.join(away)} started and did not join the group in time",
                fix=f"see kvops logs {away[0]}, or allow more with --timeout",
            )
        self._step(names, Step.SETTLING)
        self._settle(names)
        took_s = round(self._clock() - began, 3)
        self._put(self.state.with_nodes(names, step=Step.DONE, took_s=took_s))
        for name in names:
            self._tell(name, f"done in {took_s:.1f} s")

    def _replace(self, names: Sequence[str], stores: Sequence[str], seen: Seen) -> None:
        """Drain, stop and start them."""
        if stores and not seen.leader:
            raise Refused(
                f"no master leads: {', '.join(stores)} cannot be drained",
                fix="see kvops status, mend a master first",
            )
        refused = why_not([n for n in names if n in stores], seen, unavailable_max=self._pace.unavailable_max)
        if refused is not None:
            raise refused
        for name in names:
            objects = seen.objects_by_store.get(name, 0)
            change = {
                "process": seen.processes.get(name, ""),
                "objects": objects,
                "held": name in seen.held,
            }
            self._put(self.state.with_nodes([name], step=Step.DRAINING, **change))
        serving = [
            name for name in names if name in stores and name in seen.serving and name not in seen.held
        ]
        if serving:
            for name in serving:
                count = seen.objects_by_store.get(name, 0)
                self._tell(name, f"draining, {count:,} object{'s' * (count != 1)}")
            self._do.drain(serving, migrate=self.state.migrate)
        if seen.leader in names and len(seen.masters) > 1:
            self._tell(seen.leader, "leads: another master takes over first")
            self._do.step_down()
        self._step(names, Step.RESTARTING)
        self._do.restart(names)

    def _settle(self, names: Sequence[str]) -> None:
        """Wait until the group does as well as before."""
        if self._pace.window_s <= 0 or self._pace.settle_s <= 0:
            return
        deadline = self._clock() + self._pace.window_s + self._pace.settle_s
        tell_at = 0.0
        looks: deque[tuple[float, Seen]] = deque()
        while True:
            now, seen = self._clock(), self._do.look()
            looks.append((now, seen))
            while len(looks) > 1 and looks[1][0] <= now - self._pace.window_s:
                looks.popleft()
            missing = self._missing(looks[0][1], seen, whole=looks[0][0] <= now - self._pace.window_s)
            if not missing:
                return
            if now >= deadline:
                raise Refused(
                    f"after {self._pace.settle_s:g} s {missing}",
                    fix="see kvops events; allow more with --settle, or go on without with --settle 0s",
                )
            if now >= tell_at:
                self._tell(names[0], missing)
                tell_at = now + TELL_S
            self._pause(min(LOOK_PAUSE_S, self._pace.window_s))

    def _missing(self, before: Seen, now: Seen, *, whole: bool) -> str:
        """What is not as it was, over a window; "" when all is, or when there is nothing to judge by."""
        was = self.state.ratio_before
        if was is not None:
            if not whole:
                return "waiting for a whole window of lookups"
            ratio = hit_ratio(before, now)
            if ratio is not None:
                missing = ratio < RATIO_BACK * was
                return f"the hit ratio is {ratio:.1%}, before it was {was:.1%}" if missing else ""
        if self.state.migrate and now.objects < OBJECTS_BACK * self.state.objects_before:
            return f"{now.objects:,} objects are readable, before there were {self.state.objects_before:,}"
        return ""
