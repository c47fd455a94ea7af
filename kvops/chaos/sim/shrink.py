"""Makes a failing plan smaller while it goes on failing, so that what is left explains it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from kvops.chaos.sim.plan import Fault, Op, Plan
from kvops.chaos.sim.world import Result, run

RUNS_MAX: Final = 300
TIME_S_MAX: Final = 60.0

Part = TypeVar("Part", Op, Fault)


class _Shrinker:
    def __init__(self, plan: Plan, result: Result, *, runs_max: int, time_s_max: float) -> None:
        self.plan = plan
        self.invariant = result.invariant
        self.runs = 0
        self._runs_max = runs_max
        self._until = time.monotonic() + time_s_max

    @property
    def spent(self) -> bool:
        """Enough was tried."""
        return self.runs >= self._runs_max or time.monotonic() >= self._until

    def attempt(self, plan: Plan) -> bool:
        """Whether a smaller plan breaks the same rule; then it is the plan from now on."""
        self.runs += 1
        result = run(plan)
        if result.violation is None or result.invariant != self.invariant:
            return False
        self.plan = plan
        return True

    def drop(self, parts: tuple[Part, ...], within: Callable[[tuple[Part, ...]], Plan]) -> tuple[Part, ...]:
        """Leave out halves, quarters, … single ones, for as long as that helps."""
        size = len(parts)
        while size and not self.spent:
            at = 0
            while at < len(parts) and not self.spent:
                fewer = parts[:at] + parts[at + size :]
                if self.attempt(within(fewer)):
                    parts = fewer
                else:
                    at += size
            size = size // 2 if size > 1 else 0
        return parts


def shrink(
    plan: Plan, result: Result, *, runs_max: int = RUNS_MAX, time_s_max: float = TIME_S_MAX
) -> tuple[Plan, Result, int]:
    """
    Find a smaller plan that breaks the same rule.

    Args:
        plan: That failed.
        result: How.
        runs_max: Runs to spend at most.
        time_s_max: Seconds to spend at most, about.

    Returns:
        The smallest plan found, its result with a timeline, and the runs spent.
    """
    assert result.violation is not None, "only failures are shrunk"
    shrinker = _Shrinker(plan, result, runs_max=runs_max, time_s_max=time_s_max)
    until_us = result.at_us
    early = replace(
        plan,
        ops=tuple(op for op in plan.ops if op.at_us <= until_us),
        faults=tuple(fault for fault in plan.faults if fault.at_us <= until_us),
    )
    if early != plan:
        shrinker.attempt(early)
    if shrinker.plan.lost_for_good:
        shrinker.attempt(replace(shrinker.plan, lost_for_good=()))
    shrinker.drop(shrinker.plan.faults, lambda faults: replace(shrinker.plan, faults=faults))
    shrinker.drop(shrinker.plan.ops, lambda ops: replace(shrinker.plan, ops=ops))
    shrinker.drop(shrinker.plan.faults, lambda faults: replace(shrinker.plan, faults=faults))
    return shrinker.plan, run(shrinker.plan, recording=True), shrinker.runs
