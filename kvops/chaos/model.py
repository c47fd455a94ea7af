"""
What a fault is: the protocol every fault keeps, the proof it gives, and the states of its life.

::

    planned → capable → pictured → journalled → guarded → injecting → injected → active ─┐
                                                                                          │ hold
                            clean ← undone ← undoing ←────────────────────────────────────┘
                              │
                            dirty (from any state in which something could not be proved undone)

A fault is a frozen dataclass with all its parameters in it. What takes it back is plain data
(:mod:`kvops.chaos.steps`), known before it is injected and carried out without the fault's code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from kvops.chaos.steps import UndoStep
    from kvops.chaos.targets import Target
    from kvops.host import Host

EXPIRES_S_DEFAULT: Final = 120.0  # what the kernel or a helper process ends by itself, unless told otherwise


class State(StrEnum):
    """How far an injection has come. Each is on disk before what follows it is done."""

    PLANNED = "planned"
    CAPABLE = "capable"  # every fault can be done on this machine
    PICTURED = "pictured"  # what is there was noted, to compare with afterwards
    JOURNALLED = "journalled"  # what takes everything back is on disk
    GUARDED = "guarded"  # the guardian has it too, and said so
    INJECTING = "injecting"
    INJECTED = "injected"  # done, not yet proved
    ACTIVE = "active"  # proved
    UNDOING = "undoing"
    UNDONE = "undone"  # every step was carried out
    CLEAN = "clean"  # proved: before = after
    DIRTY = "dirty"  # not proved; a person is needed


ENDED: Final = frozenset({State.CLEAN})
"""Nothing of the experiment is left. Every other state in a ledger refuses the next experiment."""


class Layer(StrEnum):
    """Where a fault acts: what lies below it is not exercised."""

    PROCESS = "process"
    NETWORK = "network"  # the kernel's IP path
    STREAM = "stream"  # a proxy in the byte stream
    COORDINATION = "coordination"
    DISK = "disk"
    MEMORY = "memory"
    CLOCK = "clock"
    CONFIG = "config"
    LOAD = "load"
    DATA = "data"


class Transport(StrEnum):
    """Data paths that a fault reaches."""

    SHM = "shm"
    TCP = "tcp"
    VERBS = "verbs"
    SSD = "ssd"
    CONTROL = "control"  # gRPC and HTTP


ALL_TRANSPORTS: Final = frozenset(Transport)
OVER_IP: Final = frozenset({Transport.TCP, Transport.CONTROL})


@dataclass(frozen=True, slots=True)
class Signal:
    """One observation: where it was made, and what was seen."""

    source: str
    observed: str

    def __str__(self) -> str:
        return f"{self.source}: {self.observed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """
    That a fault is there: at least two signals from outside the injector, and something that must stay well
    and did.
    """

    signals: tuple[Signal, ...]
    control: Signal

    def __post_init__(self) -> None:
        """Two of the same source are one."""
        assert len({signal.source for signal in self.signals}) >= 2, "evidence needs two independent signals"

    def __str__(self) -> str:
        return "; ".join(map(str, self.signals)) + f"; control {self.control}"


@dataclass(frozen=True, slots=True)
class Here:
    """How this machine would do a fault, or why it cannot."""

    backend: str
    missing: str | None = None


@runtime_checkable
class Fault(Protocol):
    """
    One fault, ready to be injected.

    ``verify`` raises FaultNotApplied whenever the fault is not proved to be there; a fault that leaves
    nothing to be seen after its undo has that asked of it (``lasting``).
    """

    name: ClassVar[str]
    layer: ClassVar[Layer]
    transports: ClassVar[frozenset[Transport]]
    certifies: ClassVar[str]
    does_not_certify: ClassVar[str]
    conflicts: ClassVar[frozenset[str]]  # names or prefixes ("net.") that may not share its target
    lasting: ClassVar[bool]  # False: it happens and is over, such as a reset

    @property
    def target(self) -> Target: ...

    @property
    def control(self) -> Target: ...

    @classmethod
    def here(cls) -> Here:
        """What this machine offers, whatever the target: asked of the kernel, not of PATH alone."""

    def unavailable(self, host: Host) -> str | None:
        """Why it cannot be done to its target; None when it can."""

    def undo(self) -> list[UndoStep]:
        """What takes it back, in order. The same whenever it is asked."""

    def inject(self, host: Host) -> None: ...

    def verify(self, host: Host) -> Evidence:
        """
        Prove that it is there, by other means than those that injected it.

        Raises:
            FaultNotApplied: It is not, or it cannot be told.
        """


FaultClass = TypeVar("FaultClass", bound=type)
_FAULTS: dict[str, type] = {}


def fault(name: str) -> Callable[[FaultClass], FaultClass]:
    """Enter a class into the catalogue under ``area.what``."""

    def enter(cls: FaultClass) -> FaultClass:
        assert name not in _FAULTS, f"two faults are called {name}"
        cls.name = name  # type: ignore[attr-defined]
        _FAULTS[name] = cls
        return cls

    return enter


def entered() -> dict[str, type]:
    """Every class entered so far; ``kvops.chaos.faults.catalogue`` loads all of them first."""
    return dict(_FAULTS)


def in_conflict(faults: Iterable[Fault]) -> str | None:
    """Why these faults cannot be in force together; None when they can."""
    faults = list(faults)
    for index, one in enumerate(faults):
        for other in faults[index + 1 :]:
            if one.target.name != other.target.name:
                continue
            if any(other.name.startswith(name) for name in one.conflicts) or any(
                one.name.startswith(name) for name in other.conflicts
            ):
                return f"{one.name} and {other.name} on {one.target.name} would hide one another"
    return None
