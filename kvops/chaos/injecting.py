"""
What a runner needs of whoever injects for it, whether that is here or on another machine.

:class:`kvops.chaos.lifecycle.Injection` is the one here, :class:`kvops.chaos.remote.RemoteFaults` the one on hosts that
are reached by SSH. Both guard, prove, write down and undo where the fault is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol, Self

from kvops.chaos.model import State

OnState = Callable[[State, str], None]
"""Told of every state that is entered, and of more about it."""
FORBIDDEN_ENVIRONMENTS: Final = ("production", "prod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How the faults of one block are held."""

    name: str  # the experiment's id in every ledger
    lease_s: float
    deadline_s: float
    verify_timeout_s: float
    on_state: OnState
    compose: bool = False  # faults that hide one another are meant so


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """One fault on one member, as the history names it."""

    fault: str
    target: str
    group: str
    host: str  # logical
    lost_share: float  # of the time that the target is gone
    undo: tuple[str, ...]  # commands


class Undone(Protocol):
    """That nothing is left."""

    @property
    def undo_s(self) -> float:
        """How long it took."""
        ...

    @property
    def by(self) -> str:
        """Who undid it: runner, guardian, nobody."""
        ...

    @property
    def commands(self) -> Sequence[str]:
        """What was done."""
        ...


class Injecting(Protocol):
    """
    The faults of one block, from the first look to the proof that they are gone. Leaving its block undoes.

    Not thread-safe, but for ``recheck`` beside ``beat``.
    """

    @property
    def in_force(self) -> Sequence[InForce]:
        """Every fault."""
        ...

    def check(self) -> None:
        """Raise what would refuse them; nothing is touched."""

    def inject(self) -> Sequence[object]:
        """Inject and prove; the evidence, one for each fault."""
        ...

    def beat(self) -> None:
        """Renew the lease."""

    def recheck(self) -> Sequence[object]:
        """Prove again."""
        ...

    def undo(self) -> Undone:
        """Take everything back and prove that nothing is left; ``Dirty`` when it cannot be proved."""
        ...

    def ask_abort(self, reason: str) -> None:
        """Have the guardians undo at once; safe in a signal handler."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def lost_share(fault: type, arguments: Mapping[str, Any]) -> float:
    """The share of the time that a target is gone under a fault: a starved one for what it is not given."""
    from kvops.chaos.targets import parameters

    given = arguments.get("cpu_share", parameters(fault).get("cpu_share", 0.0))
    return 1.0 - float(given)
