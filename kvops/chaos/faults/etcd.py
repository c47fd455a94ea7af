"""Faults of etcd: one member, its leader, its quorum, its disk."""

from __future__ import annotations

import dataclasses
import signal
from dataclasses import dataclass
from typing import ClassVar, Final

from kvops.chaos import outside, tracing
from kvops.chaos.faults.common import control_is_well, expect, must, not_here, thread_states
from kvops.chaos.model import Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import Ending, ask_target
from kvops.chaos.steps import SignalProcess, UndoStep
from kvops.chaos.targets import Target, fellows
from kvops.errors import FaultNotApplied
from kvops.fleet.process import send_signal
from kvops.host import Host

CALL_TIMEOUT_S: Final = 0.8
CONTROL_ONLY: Final = frozenset({Transport.CONTROL})


def _leader_of(members: tuple[Target, ...]) -> Target | None:
    """The member that says of itself that it leads."""
    for member in members:
        said = outside.etcd_leader(member.addresses.get("client", ""), timeout_s=CALL_TIMEOUT_S)
        if said is not None and said[0] == said[1]:
            return member
    return None


def _stopped(target: Target) -> Signal:
    states = {one.pid: thread_states(one) for one in target.processes}
    for pid, letters in states.items():
        must(letters, f"pid {pid} has ended")
        must(set(letters) == {"T"}, f"threads of pid {pid} are in states {letters}, not all T")
    return Signal("/proc/<pid>/task/*/stat", f"state T of pid {', '.join(map(str, states))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paused:
    """What faults that stop members share."""

    target: Target
    control: Target
    members: tuple[Target, ...] = ()  # all of this etcd, as they were when it was chosen

    layer: ClassVar = Layer.COORDINATION
    transports: ClassVar[frozenset[Transport]] = CONTROL_ONLY
    conflicts: ClassVar[frozenset[str]] = frozenset({"etcd.", "process.", "net."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", tuple(fellows(self.target, "etcd")))

    @classmethod
    def here(cls) -> Here:
        return Here("signals by pidfd")

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "etcd":
            return f"{self.target.name} is no member of etcd"
        if len(self.members) < 3:
            return f"an etcd of {len(self.members)} has no majority to lose one from"
        return not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return [
            SignalProcess(pid=one.pid, started_ticks=one.started_ticks, boot_id=one.boot_id, signal="CONT")
            for one in self.target.processes
        ]

    def inject(self, host: Host) -> None:
        for identity in self.target.processes:
            send_signal(identity, signal.SIGSTOP)

    def _others(self) -> list[Target]:
        return [one for one in self.members if one.leader not in self.target.processes]

    def _put_by_others(self, *, ok: bool) -> Signal:
        answers = [
            outside.etcd_put(one.addresses["client"], timeout_s=CALL_TIMEOUT_S) for one in self._others()
        ]
        must(answers, "no member is left to ask")
        good = [answer for answer in answers if answer.ok]
        if ok:
            must(good, f"no other member takes a write: {answers[0].error}")
            return Signal("a write by the others", f"done in {min(one.ms for one in good):.0f} ms")
        must(not good, "a write by the others was done")
        return Signal("a write by the others", f"not done: {answers[0].error}")


@fault("etcd.member")
@dataclass(frozen=True, slots=True, kw_only=True)
class Member(_Paused):
    """Stop one member: the others go on, and a client that only knows this one hangs."""

    name: ClassVar[str]
    certifies: ClassVar[str] = "one of three members hangs: every call has a deadline and another endpoint"
    does_not_certify: ClassVar[str] = "the loss of the leader, unless it happens to be it (etcd.leader)"

    def verify(self, host: Host) -> Evidence:
        stopped = _stopped(self.target)
        seen = ask_target(self.target, from_netns=self.control.netns)
        expect(seen, Ending.CONNECTED, Ending.NO_CONNECTION, target=self.target)
        self._put_by_others(ok=True)
        return Evidence(
            signals=(stopped, Signal(f"request to {self.target.name}", str(seen))),
            control=control_is_well(self.control),
        )


@fault("etcd.leader")
@dataclass(frozen=True, slots=True, kw_only=True)
class Leader(_Paused):
    """Stop the member that leads, whichever that is: the others elect another."""

    name: ClassVar[str]
    certifies: ClassVar[str] = "a hung leader: an election, and clients that turn to the survivors"
    does_not_certify: ClassVar[str] = "a leader that is cut off from some members alone"

    def __post_init__(self) -> None:
        _Paused.__post_init__(self)
        found = _leader_of(self.members)
        if found is not None:
            object.__setattr__(self, "target", found)
            if self.control.name == found.name:
                others = [one for one in self.members if one.name != found.name]
                object.__setattr__(self, "control", others[0])

    def verify(self, host: Host) -> Evidence:
        stopped = _stopped(self.target)
        leader = _leader_of(tuple(self._others()))
        must(leader is not None, "the others have not elected a leader yet")
        assert leader is not None
        self._put_by_others(ok=True)
        return Evidence(
            signals=(stopped, Signal("etcd's status", f"{leader.name} leads instead of {self.target.name}")),
            control=control_is_well(self.control),
        )


@fault("etcd.quorum")
@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum(_Paused):
    """Stop a majority: nothing is written or elected any more, and what is left answers stale reads."""

    name: ClassVar[str]
    certifies: ClassVar[str] = (
        "the loss of all coordination: engines go on with what they know, then without the pool"
    )
    does_not_certify: ClassVar[str] = "lost data: the members come back with what they had"

    def __post_init__(self) -> None:
        _Paused.__post_init__(self)
        majority = len(self.members) // 2 + 1
        chosen = [
            self.target,
            *(one for one in self.members if one.name not in (self.target.name, self.control.name)),
        ]
        chosen += [one for one in self.members if one.name == self.control.name]
        names = [one.name for one in chosen[:majority]]
        processes = tuple(process for one in chosen[:majority] for process in one.processes)
        object.__setattr__(
            self, "target", dataclasses.replace(self.target, name="+".join(names), processes=processes)
        )

    def verify(self, host: Host) -> Evidence:
        stopped = _stopped(self.target)
        refused = self._put_by_others(ok=False)
        left = self._others()[0]
        stale = outside.etcd(
            left.addresses["client"],
            "kv/range",
            {"key": "a3Y=", "serializable": True},
            timeout_s=CALL_TIMEOUT_S,
        )
        if not stale.ok:
            raise FaultNotApplied(f"{left.name} does not even answer a stale read: {stale.error}", fix="")
        return Evidence(
            signals=(stopped, refused),
            control=Signal(f"a serializable read of {left.name}", f"answered in {stale.ms:.0f} ms"),
        )


@fault("etcd.slow_fsync")
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFsync(tracing.Traced):
    """Delay every fdatasync of the member that leads: heartbeats arrive, writes crawl."""

    members: tuple[Target, ...] = ()
    delay_ms: float = 200.0

    name: ClassVar[str]
    layer: ClassVar = Layer.COORDINATION
    transports: ClassVar[frozenset[Transport]] = CONTROL_ONLY
    certifies: ClassVar[str] = "a leader on a slow disk that keeps its leadership and its leases"
    does_not_certify: ClassVar[str] = (
        "a disk that fails (disk.eio); the tracer slows other calls a little, too"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.delay_ms <= 5_000:
            raise ValueError("delay_ms must be 1 to 5000")
        if not self.members:
            object.__setattr__(self, "members", tuple(fellows(self.target, "etcd")))
        found = _leader_of(self.members)
        if found is not None:
            object.__setattr__(self, "target", found)
            if self.control.name == found.name:
                others = [one for one in self.members if one.name != found.name]
                object.__setattr__(self, "control", (others or [self.control])[0])

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "etcd":
            return f"{self.target.name} is no member of etcd"
        return self.here().missing or not_here(host, self.target)

    def expression(self) -> str:
        return f"fdatasync,fsync:delay_enter={round(self.delay_ms * 1000)}"

    def verify(self, host: Host) -> Evidence:
        traced = self.traced()
        put = outside.etcd_put(self.target.addresses["client"], timeout_s=self.delay_ms / 1000 * 4 + 1)
        must(put.ok, f"a write by {self.target.name} was not done: {put.error}")
        # The leader may commit by its followers' disks: its own write is waited for, or theirs is too early.
        must(put.ms >= 0.3 * self.delay_ms, f"a write took {put.ms:.0f} ms")
        return Evidence(
            signals=(traced, Signal("a write by the leader", f"done in {put.ms:.0f} ms")),
            control=control_is_well(self.control),
        )
