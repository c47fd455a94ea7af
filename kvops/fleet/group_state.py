"""
What ``group.yaml`` says of a group on this machine.

A member's process is named by pid, start time and boot id. What is written down of a former boot, or of a pid
that somebody else has by now, counts as ended and is never signalled.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvops.errors import UsageError
from kvops.fleet.process import ProcessIdentity, is_running, is_stopped
from kvops.limits import GIB

STATE_SCHEMA: Final = 1
RELEASE_S_PER_GIB: Final = 1.0  # the kernel takes 0.3 s of an ending process to free a GiB of 4 KiB pages

Role = Literal["etcd", "master", "store"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One master or store of a local group, as group.yaml keeps it."""

    name: str
    role: Role
    host: str  # logical
    numa_node: int = 0
    pid: int = 0  # 0: not started, or stopped on purpose
    started_ticks: int = 0
    boot_id: str = ""
    started: str = ""  # RFC 3339, UTC
    ready: bool = False
    addresses: dict[str, str] = {}  # listen, unix, control, http: as it said when it was ready

    @property
    def identity(self) -> ProcessIdentity | None:
        """Its process; None when it has none."""
        if self.pid <= 0:
            return None
        return ProcessIdentity(pid=self.pid, started_ticks=self.started_ticks, boot_id=self.boot_id)

    @property
    def running(self) -> bool:
        """Whether its process runs now."""
        identity = self.identity
        return identity is not None and is_running(identity)

    @property
    def stopped(self) -> bool:
        """Whether its process is held by SIGSTOP or a debugger."""
        identity = self.identity
        return identity is not None and is_stopped(identity)


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """group.yaml. Unknown keys are passed over: an older kvops can still stop what a newer one started."""

    schema: int = STATE_SCHEMA
    group: str
    environment: str = "local"
    placement: str = "local-first"
    transports: list[str] = []
    segment_size_bytes: int = 0
    huge_page_bytes: int = 0
    started: str = ""
    members: list[Member] = []

    def member(self, name: str) -> Member:
        """
        The member of that name.

        Raises:
            UsageError: There is none.
        """
        for member in self.members:
            if member.name == name:
                return member
        names = ", ".join(member.name for member in self.members) or "none"
        raise UsageError(f"group {self.group} has no member {name}", fix=f"its members: {names}")

    def named(self, role: Role) -> list[str]:
        """The names of a role's members."""
        return [member.name for member in self.members if member.role == role]

    @property
    def release_s(self) -> float:
        """How long the kernel may take to free one store's segment; all stores' are freed at once."""
        return 0.0 if self.huge_page_bytes else RELEASE_S_PER_GIB * self.segment_size_bytes / GIB

    def with_member(self, changed: Member) -> GroupState:
        """The same group with one member replaced."""
        members = [changed if member.name == changed.name else member for member in self.members]
        return msgspec.structs.replace(self, members=members)
