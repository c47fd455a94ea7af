"""Faults of the masters' leadership."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from kvops.chaos import holder, outside
from kvops.chaos.faults.common import control_is_well, must, new_token, not_here
from kvops.chaos.model import EXPIRES_S_DEFAULT, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.procs import with_word
from kvops.chaos.steps import KillHolder, RestartRole, SignalProcess, UndoStep
from kvops.chaos.targets import Target, fellows
from kvops.host import Host


@fault("master.leader_flap")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderFlap:
    """Stop whichever master leads for longer than its lease, let it go on, and again: elections without end."""

    target: Target
    control: Target
    members: tuple[Target, ...] = ()
    pause_s: float = 3.0
    between_s: float = 2.0
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT
    seen: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    name: ClassVar[str]
    layer: ClassVar = Layer.COORDINATION
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL})
    certifies: ClassVar[str] = "repeated elections: a former leader that wakes up acknowledges nothing"
    does_not_certify: ClassVar[str] = "a leader that is cut off from etcd alone"
    conflicts: ClassVar[frozenset[str]] = frozenset({"master.", "process.", "net.", "etcd."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.5 <= self.pause_s <= 30 or not 0 <= self.between_s <= 60:
            raise ValueError("pause_s must be 0.5 to 30, between_s 0 to 60")
        if not self.members:
            object.__setattr__(self, "members", tuple(fellows(self.target, "master")))
        if "term" not in self.seen:
            self.seen["term"] = self._term()[0]

    def _term(self) -> tuple[int, str]:
        """The highest term and who leads, as ``kvops status`` says."""
        if not isinstance(self.target.restart, RestartRole):
            return 0, ""
        said = outside.kvops_json(self.target.restart.state_dir, self.target.restart.group, "status") or {}
        masters = said.get("masters", [])
        terms = [int(one.get("term") or 0) for one in masters]
        return max(terms, default=0), next(
            (one["name"] for one in masters if one.get("role") == "leader"), ""
        )

    @classmethod
    def here(cls) -> Here:
        return Here("signals by pidfd")

    def unavailable(self, host: Host) -> str | None:
        if self.target.role != "master" or not isinstance(self.target.restart, RestartRole):
            return f"{self.target.name} is no master of a local group"
        if len(self.members) < 2:
            return "one master alone has nobody to lose its leadership to"
        return not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return [
            KillHolder(token=self.token),
            *(
                SignalProcess(
                    pid=one.pid, started_ticks=one.started_ticks, boot_id=one.boot_id, signal="CONT"
                )
                for member in self.members
                for one in member.processes
            ),
        ]

    def inject(self, host: Host) -> None:
        assert isinstance(self.target.restart, RestartRole)
        masters = [{"name": one.name, "process": dataclasses.asdict(one.leader)} for one in self.members]
        settings = {
            "masters": masters,
            "state_dir": self.target.restart.state_dir,
            "group": self.target.restart.group,
            "pause_s": self.pause_s,
            "between_s": self.between_s,
        }
        holder.spawn("flap", settings, token=self.token, expires_s=self.expires_s)

    def verify(self, host: Host) -> Evidence:
        must(list(with_word(self.token)), "nobody stops the leaders any more")
        term, leader = self._term()
        before = self.seen["term"]
        must(term > before, f"the term is still {term}")
        # How often a process lost the CPU to a stop is not kept: what its election left in etcd is.
        etcd = next((one for one in fellows(self.target, "etcd")), None)
        revision = -1
        if etcd is not None:
            said = outside.etcd(etcd.addresses["client"], "maintenance/status", {})
            revision = int(said.body.get("header", {}).get("revision", -1))
        must(revision > 0, "etcd does not say what was written to it")
        return Evidence(
            signals=(
                Signal("kvops status", f"term {before} → {term}, {leader or 'nobody'} leads"),
                Signal("etcd", f"revision {revision}"),
            ),
            control=control_is_well(self.control),
        )
