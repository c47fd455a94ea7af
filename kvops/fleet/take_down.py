"""How members of a group on this machine are ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from kvops.errors import LeftBehind
from kvops.fleet.bring_up import Tell
from kvops.fleet.group_folder import GroupFolder
from kvops.fleet.group_state import GroupState, Member, Role
from kvops.fleet.process import ProcessIdentity, is_exiting, send_signal, wait_ended

TERM_GRACE_S: Final = 10.0  # from SIGTERM to SIGKILL
KILL_GRACE_S: Final = 5.0  # from SIGKILL to giving up: only the kernel can hold a process longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What ``kvops stop`` did to one member."""

    name: str
    role: Role
    pid: int
    how: Literal["terminated", "killed", "had ended"]


def take_down(
    folder: GroupFolder,
    state: GroupState,
    members: Sequence[Member],
    *,
    tell: Tell,
    now: bool = False,
    grace_s: float = TERM_GRACE_S,
) -> list[Stopped]:
    """
    End members: stores first, each asked (SIGTERM) and after ``grace_s`` made to (SIGKILL).

    The group's lock is held meanwhile. What is known of those that ended is written down.

    Args:
        folder: The group's.
        state: What is written down.
        members: Whom to end.
        tell: Told of each step.
        now: Kill them at once.
        grace_s: From SIGTERM to SIGKILL.

    Raises:
        LeftBehind: A process did not end even when killed.
    """
    stopped: list[Stopped] = []
    left: list[Member] = []
    # Stores first: a master that is still there can tell their clients.
    waves = (
        [members] if now else [[m for m in members if m.role == role] for role in ("store", "master", "etcd")]
    )
    for wave in waves:
        asked: dict[ProcessIdentity, Member] = {}
        for member in wave:
            identity = member.identity
            if identity is None:
                continue
            # Our own etcd is made anew at every start, and takes seconds to hand over its leadership.
            at_once = now or member.role == "etcd"
            if send_signal(identity, signal.SIGKILL if at_once else signal.SIGTERM):
                send_signal(identity, signal.SIGCONT)  # a stopped process would not see SIGTERM
                asked[identity] = member
            else:
                wait_ended([identity], timeout_s=0)  # collects it, when it was a child of ours
                stopped.append(Stopped(name=member.name, role=member.role, pid=member.pid, how="had ended"))
        killed = set(asked) if now else set()
        remaining = wait_ended(asked, timeout_s=KILL_GRACE_S if now else grace_s)
        for identity in remaining if not now else ():
            if is_exiting(identity):
                tell(asked[identity].name, "has ended; the kernel frees its memory")
            else:
                tell(asked[identity].name, f"did not end within {grace_s:g} s: killed")
                send_signal(identity, signal.SIGKILL)
                killed.add(identity)
        if remaining:
            remaining = wait_ended(remaining, timeout_s=(0 if now else KILL_GRACE_S) + state.release_s)
        for identity, member in asked.items():
            if identity in remaining:
                left.append(member)
                continue
            how: Literal["terminated", "killed"] = "killed" if identity in killed else "terminated"
            stopped.append(Stopped(name=member.name, role=member.role, pid=member.pid, how=how))
            tell(member.name, how)
    gone = {one.name for one in stopped}
    for member in members:
        if member.name in gone:
            state = state.with_member(
                msgspec.structs.replace(member, pid=0, started_ticks=0, ready=False, addresses={})
            )
    folder.write(state)
    if left:
        names = ", ".join(f"{member.name} (pid {member.pid})" for member in left)
        raise LeftBehind(
            f"{names} did not end, even when killed",
            fix="the kernel holds it: see cat /proc/PID/stack and dmesg",
        )
    return stopped
