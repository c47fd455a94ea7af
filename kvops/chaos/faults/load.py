"""Faults of load: more of it, all at once, on one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from kvops.chaos import holder, nft
from kvops.chaos.faults.common import control_is_well, must, new_token, not_here
from kvops.chaos.load import CONNECTIONS_MAX
from kvops.chaos.model import EXPIRES_S_DEFAULT, Evidence, Here, Layer, Signal, Transport, fault
from kvops.chaos.probe import address_of
from kvops.chaos.procs import with_word
from kvops.chaos.steps import KillHolder, UndoStep
from kvops.chaos.targets import Target
from kvops.host import Host

LOOK_S: Final = 1.0
BUSY_RATIO: Final = 1.5  # of the target's CPU time over the control's, while it is flooded


@fault("load.incast")
@dataclass(frozen=True, slots=True, kw_only=True)
class Incast:
    """Let many connections ask one role at once, at a bounded rate and for a bounded time."""

    target: Target
    control: Target
    connections: int = 64
    rate: float = 400.0  # requests a second over all of them
    token: str = field(default_factory=new_token)
    expires_s: float = EXPIRES_S_DEFAULT

    name: ClassVar[str]
    layer: ClassVar = Layer.LOAD
    transports: ClassVar[frozenset[Transport]] = frozenset({Transport.TCP, Transport.CONTROL})
    certifies: ClassVar[str] = "a hot spot: all turn to the one that came back empty"
    does_not_certify: ClassVar[str] = "incast of payload in a switch: these are small requests to its HTTP"
    conflicts: ClassVar[frozenset[str]] = frozenset({"load."})
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= CONNECTIONS_MAX or not 1 <= self.rate <= 20_000:
            raise ValueError(f"connections must be 1 to {CONNECTIONS_MAX}, rate 1 to 20000")

    @classmethod
    def here(cls) -> Here:
        return Here("a generator of our own")

    def unavailable(self, host: Host) -> str | None:
        return not_here(host, self.target)

    def undo(self) -> list[UndoStep]:
        return [KillHolder(token=self.token)]

    def inject(self, host: Host) -> None:
        address = address_of(self.target)
        assert address is not None  # unavailable() said so
        settings = {
            "host": address[0],
            "port": address[1],
            "connections": self.connections,
            "rate": self.rate,
        }
        holder.spawn("incast", settings, token=self.token, expires_s=self.expires_s, enter=self.control.netns)

    def verify(self, host: Host) -> Evidence:
        must(list(with_word(self.token)), "nobody asks any more")
        address = address_of(self.target)
        assert address is not None
        before, control_before = _cpu_ticks(self.target), _cpu_ticks(self.control)
        known = nft.connections_of(self.target, address[1])
        threading.Event().wait(LOOK_S)
        fresh = len(nft.connections_of(self.target, address[1]) - known)
        used, by_control = _cpu_ticks(self.target) - before, _cpu_ticks(self.control) - control_before
        must(
            fresh >= min(self.connections, self.rate * LOOK_S) / 4,
            f"only {fresh} connections came in {LOOK_S:g} s",
        )
        must(used >= 2 and used >= BUSY_RATIO * by_control, f"it used {used} ticks, the control {by_control}")
        return Evidence(
            signals=(
                Signal("/proc/net/tcp", f"{fresh} new connections in {LOOK_S:g} s"),
                Signal("/proc/<pid>/stat", f"{used} ticks of CPU, the control {by_control}"),
            ),
            control=control_is_well(self.control),
        )


def _cpu_ticks(target: Target) -> int:
    total = 0
    for one in target.processes:
        try:
            words = Path(f"/proc/{one.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended
        total += int(words[11]) + int(words[12])  # utime, stime: fields 14 and 15
    return total
