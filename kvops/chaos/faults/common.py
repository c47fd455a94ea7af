"""What faults share: tokens, looks at processes, and the half of a proof that a neighbour sees."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from kvops.chaos.model import Signal
from kvops.chaos.probe import Ending, Probe, address_of, ask_target
from kvops.chaos.targets import Target
from kvops.errors import FaultNotApplied
from kvops.fleet.process import ProcessIdentity, is_running, parse_stat
from kvops.host import Host, LocalHost

DOCTOR = "see kvops chaos doctor"


def new_token() -> str:
    """A name for what one fault makes: nothing else on the machine has it."""
    return f"kvops_{secrets.token_hex(6)}"


def not_here(host: Host, target: Target, *, askable: bool = True) -> str | None:
    """Why no fault at all could be put on this target from here."""
    if not isinstance(host, LocalHost):
        return f"{host.name} is another machine: faults are injected where the target runs"
    for identity in target.processes:
        if not is_running(identity):
            return f"pid {identity.pid} is not the process that was chosen, or has ended"
    if not target.processes:
        return f"{target.name} has no process"
    if askable and address_of(target) is None:
        return f"{target.name} has no http address to ask: the fault could not be proved"
    return None


def not_root(what: str) -> str | None:
    """Why something that only root may do cannot be done."""
    return None if os.geteuid() == 0 else f"{what} needs root"


def thread_states(identity: ProcessIdentity) -> str:
    """The state letter of every thread of a process; "" when it has ended."""
    if not is_running(identity):
        return ""
    states = []
    try:
        tasks = list(Path(f"/proc/{identity.pid}/task").iterdir())
    except OSError:
        return ""  # it ended while we looked
    for task in tasks:
        try:
            states.append(parse_stat((task / "stat").read_text(errors="replace"))[0])
        except OSError:
            continue  # the thread ended
    return "".join(sorted(states))


def control_is_well(control: Target) -> Signal:
    """
    The negative control: a neighbour answers as always.

    Raises:
        FaultNotApplied: It does not: what was seen at the target proves nothing then.
    """
    probe = ask_target(control, timeout_s=2.0, from_netns=control.netns)
    if probe.ending is not Ending.ANSWERED:
        raise FaultNotApplied(
            f"the control {control.name} is not well either: {probe}", fix="wait until the group is healthy"
        )
    return Signal(f"request to {control.name}", str(probe))


def expect(seen: Probe, *endings: Ending, target: Target) -> Signal:
    """
    A neighbour's request ended as it should under the fault.

    Raises:
        FaultNotApplied: It ended otherwise.
    """
    if seen.ending not in endings:
        wanted = " or ".join(endings)
        raise FaultNotApplied(f"a request to {target.name} was {seen}, not {wanted}", fix=DOCTOR)
    return Signal(f"request to {target.name}", str(seen))


def must(condition: object, what: str, *, fix: str = DOCTOR) -> None:
    """
    One piece of a proof.

    Raises:
        FaultNotApplied: It is missing.
    """
    if not condition:
        raise FaultNotApplied(what, fix=fix)
