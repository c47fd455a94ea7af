"""Many seeds, one after the other or on several cores, and what they found."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from kvops.chaos.sim.mutate import mutation
from kvops.chaos.sim.plan import Config, Plan, draw
from kvops.chaos.sim.shrink import shrink
from kvops.chaos.sim.world import Result, run


@dataclass(slots=True)
class Failure:
    """One seed that broke a rule."""

    seed: int
    first: Result
    plan: Plan  # as small as it became
    smallest: Result  # … with its timeline
    shrink_runs: int


@dataclass(slots=True)
class Tally:
    """Sums over seeds."""

    seeds: int = 0
    messages: int = 0
    cpu_s: float = 0.0  # processor time that the seeds took, of all processes together
    simulated_us: int = 0
    calls: int = 0
    evicted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)

    def add(self, seed: int, result: Result) -> None:
        """Count one seed."""
        self.seeds += 1
        self.messages += result.messages
        self.cpu_s += result.cpu_s
        self.simulated_us += result.simulated_us
        self.calls += result.calls
        self.evicted += result.evicted
        self.outcomes.update(result.outcomes)
        self.faults.update(result.faults)
        if result.violation is not None:
            self.failed.append(seed)

    @property
    def messages_per_s(self) -> int:
        """Messages delivered in a second of one core."""
        return int(self.messages / self.cpu_s) if self.cpu_s else 0


def mutated(name: str | None) -> AbstractContextManager[object]:
    """The code with a mutation, or as it is."""
    return nullcontext() if name is None else mutation(name)()


def run_seeds(
    seeds: Sequence[int], config: Config, *, mutate: str | None = None, jobs: int = 1
) -> Iterator[tuple[int, Result]]:
    """Each seed's result, in their order; ``jobs`` processes run them side by side."""
    jobs = min(jobs, len(seeds))
    if jobs <= 1:
        _spare_the_collector()
        try:
            with mutated(mutate):
                for seed in seeds:
                    yield seed, _timed(seed, config)
        finally:
            gc.unfreeze()
        return
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_spare_the_collector) as pool:
        yield from pool.imap(_one, ((seed, config, mutate) for seed in seeds))


def _spare_the_collector() -> None:
    """What is there before the first run stays: only what runs leave needs to be looked at."""
    gc.collect()
    gc.freeze()


def _one(work: tuple[int, Config, str | None]) -> tuple[int, Result]:
    seed, config, mutate = work
    with mutated(mutate):
        return seed, _timed(seed, config)


def _timed(seed: int, config: Config) -> Result:
    began_s = time.process_time()
    result = run(draw(seed, config))
    result.cpu_s = time.process_time() - began_s
    return result


def explain(
    seed: int, result: Result, config: Config, *, mutate: str | None = None, shrinks: bool = True
) -> Failure:
    """Reduce a failing seed to what it takes, and record its timeline."""
    plan = draw(seed, config)
    with mutated(mutate):
        if not shrinks:
            return Failure(seed, result, plan, run(plan, recording=True), 0)
        return Failure(seed, result, *shrink(plan, result))
