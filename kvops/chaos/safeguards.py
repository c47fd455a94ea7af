"""
Safeguards that an experiment can do without, to see what each is worth: only in the experiment's own pool and clients.

``kvops chaos run --without breaker,deadline`` runs an experiment twice, as it is and without these, and prints both
containments side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, cast

import msgspec

from kvops.chaos.experiment import PoolSpec, Workload
from kvops.errors import UsageError
from kvops.inference.tier import PoolLike

NAMES: Final = {
    "breaker": "clients go on asking a store that does not answer",
    "deadline": "calls to the pool may take ten seconds",
    "local-first": "each object on a random store",
    "retry-budget": "retries without a limit in proportion to requests",
    "retries": "no second replica is tried",
    "shared-memory": "reads of the own host's store go over its socket too",
}
LONG_DEADLINE: Final = "10s"
FACTORY: Final = "kvops.chaos.safeguards:connect_without"
_IN_CLIENT: Final = ("breaker", "retry-budget", "retries")


@dataclass(frozen=True, slots=True)
class Safeguards:
    """
    Those that are switched off.

    Raises:
        UsageError: There is none of that name.
    """

    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the names."""
        for name in self.without:
            if name not in NAMES:
                near = get_close_matches(name, NAMES, n=1)
                raise UsageError(
                    f"there is no safeguard {name!r} to switch off",
                    fix=f"did you mean {near[0]}?" if near else f"known: {', '.join(NAMES)}",
                )

    def pool(self, spec: PoolSpec) -> PoolSpec:
        """
        The pool without them.

        Raises:
            UsageError: It runs already, with the placement that it was started with.
        """
        if "local-first" in self.without:
            if spec.running and spec.placement != "random":
                raise UsageError(
                    f"group {spec.running} runs with placement {spec.placement}: it cannot be run without local-first",
                    fix="run it without --lab: the experiment then has a pool of its own",
                )
            spec = msgspec.structs.replace(spec, placement="random")
        return spec

    def workload(self, workload: Workload) -> Workload:
        """The load without them."""
        if "deadline" in self.without:
            workload = msgspec.structs.replace(workload, deadline=LONG_DEADLINE)
        return workload

    def client_options(self) -> dict[str, Any]:
        """More options of every pool client."""
        options: dict[str, Any] = {}
        if "shared-memory" in self.without:
            options["transports"] = ["tcp"]
        inside = [name for name in self.without if name in _IN_CLIENT]
        if inside:
            options["without"] = inside
        return options

    @property
    def pool_factory(self) -> str:
        """What makes a pool client; empty for the usual one."""
        return FACTORY if any(name in _IN_CLIENT for name in self.without) else ""


def connect_without(**options: object) -> PoolLike:
    """
    A pool client without some of its safeguards, for this process alone: every client in it is changed.

    The option ``without`` lists them; the others are those of ``kvops.connect``.
    """
    from kvops.inference.engine import connect_pool

    for name in cast("list[str]", options.pop("without")):
        _SWITCHES[name]()
    return connect_pool(**options)


def _no_breaker() -> None:
    from kvops.store.breaker import Breaker

    setattr(Breaker, "record", lambda self, failure, *, now_ms: None)  # noqa: B010 - never opens
    setattr(Breaker, "trip", lambda self, *, now_ms: None)  # noqa: B010


def _no_retry_budget() -> None:
    from kvops.store.breaker import RetryBudget

    setattr(RetryBudget, "take", lambda self: True)  # noqa: B010


def _no_retries() -> None:
    from kvops.store.breaker import RetryBudget

    setattr(RetryBudget, "take", lambda self: False)  # noqa: B010


_SWITCHES: Final[dict[str, Callable[[], None]]] = {
    "breaker": _no_breaker,
    "retry-budget": _no_retry_budget,
    "retries": _no_retries,
}
