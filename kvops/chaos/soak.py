"""
Faults drawn at random, round after round, on one pool that is never restarted as a whole.

Bounds keep it a test of the pool rather than of nothing at all: so many stores stay up, one fault is in force at a
time, and the pool has time to come back in between. The same seed draws the same rounds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvops.chaos.experiment import (
    FAULT_MODULE,
    Activity,
    Deadlines,
    Expect,
    Experiment,
    Guard,
    Kvops,
    PoolSpec,
    Provider,
    Scope,
    Select,
    Workload,
)
from kvops.chaos.history import Arm
from kvops.errors import UsageError

FAULTS_DEFAULT: Final = ("process.pause", "process.kill", "process.slow")
ROUND_TAIL_S: Final = 8.0  # after the longest fault
ROUNDS_MAX: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """
    What is drawn from.

    Raises:
        UsageError: Bounds that leave nothing to do.
    """

    rounds: int
    seed: int
    faults: tuple[str, ...] = FAULTS_DEFAULT
    stores: int = 4
    min_up: int = 3  # stores that no fault is on, at any moment
    hold_s_min: float = 3.0
    hold_s_max: float = 8.0
    masters: bool = False  # whether a master may be hit

    def __post_init__(self) -> None:
        """Check how they relate."""
        if not 1 <= self.rounds <= ROUNDS_MAX:
            raise UsageError(f"{self.rounds} rounds", fix=f"choose 1 to {ROUNDS_MAX}")
        if not 1 <= self.min_up < self.stores:
            raise UsageError(
                f"{self.min_up} of {self.stores} stores must stay up: no fault is possible",
                fix="choose --min-up below --stores, and at least 1",
            )
        if not self.faults:
            raise UsageError("no fault to draw from", fix="name some with --faults")
        if not 0 < self.hold_s_min <= self.hold_s_max:
            raise UsageError(f"holds of {self.hold_s_min:g} to {self.hold_s_max:g} s", fix="shortest first")

    def draw(self, number: int) -> Experiment:
        """The experiment of one round, from 0."""
        rng = random.Random(f"{self.seed}/soak/{number}")
        fault = rng.choice(self.faults)
        on_master = self.masters and rng.random() < 0.2
        count = 1 if on_master else rng.randint(1, self.stores - self.min_up)
        hold_s = round(rng.uniform(self.hold_s_min, self.hold_s_max), 1)
        return experiment(
            fault=fault,
            role="master" if on_master else "store",
            count=count,
            hold_s=hold_s,
            soak=self,
            title=f"round {number}: {fault} on {count} of role {'master' if on_master else 'store'} for {hold_s:g} s",
        )

    def whole(self) -> Experiment:
        """What stands for all rounds: the frame that they share."""
        first = self.draw(0)
        ours = first.ours
        everything = msgspec.structs.replace(
            ours,
            scope=msgspec.structs.replace(ours.scope, mode="count", value=self.stores - self.min_up),
            deadlines=msgspec.structs.replace(ours.deadlines, fault=self.hold_s_max),
        )
        return msgspec.structs.replace(first, title=f"soak of {self.rounds} rounds", kvops=everything)


def experiment(*, fault: str, role: str, count: int, hold_s: float, soak: Soak, title: str) -> Experiment:
    """One round as an experiment."""
    action = Activity(
        type="action",
        name=fault,
        provider=Provider(type="python", module=FAULT_MODULE, func=fault.replace(".", "_", 1), arguments={}),
    )
    window_s = soak.hold_s_max + ROUND_TAIL_S
    return Experiment(
        title=title,
        description="Drawn at random within the bounds of kvops chaos soak.",
        method=[action],
        kvops=Kvops(
            pool=PoolSpec(stores=soak.stores, engines=soak.stores),
            scope=Scope(
                domain="group" if role == "master" else "store",
                select=Select(role=role),
                mode="count",
                value=count,
                max_capacity_fraction=1.0,
            ),
            workload=Workload(
                arms=[Arm.BASELINE, Arm.FAULT], windows=f"{soak.rounds}x{window_s:g}s", seed=soak.seed
            ),
            deadlines=Deadlines(fault=hold_s),
            guards=[Guard(probe="success_rate", below=0.2), Guard(probe="telemetry_age", above="5s")],
            expect=Expect(),
        ),
    )


def rounds_for(duration_s: float, soak_round_s: float) -> int:
    """How many rounds fit into a time; at least one."""
    return max(1, min(ROUNDS_MAX, int(duration_s // soak_round_s)))


def describe(soak: Soak) -> Sequence[str]:
    """Every round's title, in order."""
    return [soak.draw(number).title for number in range(soak.rounds)]
