"""Runs without a fault, judged as if there had been one: what they are blamed for is the machine's noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from kvops.chaos.experiment import Experiment, seconds
from kvops.chaos.history import Arm
from kvops.chaos.runner import INJECT_AFTER_S, Options, Say
from kvops.chaos.suite import run_judged
from kvops.chaos.verdict import RunVerdict
from kvops.errors import UsageError

WINDOW_S_MIN: Final = 2.0
AFTER_S: Final = 1.0  # of a window is left behind the fault that is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run without a fault."""

    seed: int
    verdict: RunVerdict  # as if there had been a fault; that it was not proven is left out
    blamed: tuple[str, ...]  # what each checker that found something says
    noise: float | None  # share of requests on which two arms without a fault disagree
    seconds: float
    folder: Path

    @property
    def false_alarm(self) -> bool:
        """Whether the run would have been called a failure."""
        return self.verdict is RunVerdict.FAIL


def without_fault(experiment: Experiment, *, windows: str, warmup: str) -> Experiment:
    """
    The experiment as a run without a fault has it: the two arms of a baseline, and one that only pretends.

    Raises:
        UsageError: Windows that are too short to hold anything.
    """
    ours = experiment.ours
    workload = msgspec.structs.replace(
        ours.workload, windows=windows, warmup=warmup, arms=[Arm.BASELINE, Arm.CONTROL, Arm.FAULT]
    )
    if workload.window_s < WINDOW_S_MIN:
        raise UsageError(
            f"windows of {workload.window_s:g} s", fix=f"take {WINDOW_S_MIN:g} s at least, such as 5x4s"
        )
    hold_s = min(workload.window_s - INJECT_AFTER_S - AFTER_S, seconds(ours.deadlines.fault))
    return msgspec.structs.replace(
        experiment,
        kvops=msgspec.structs.replace(
            ours, workload=workload, deadlines=msgspec.structs.replace(ours.deadlines, fault=hold_s)
        ),
    )


def trials(experiment: Experiment, options: Options, *, runs: int, seed: int, say: Say) -> Iterator[Trial]:
    """
    Run it that many times, each with a seed of its own.

    Args:
        experiment: As ``without_fault`` has it.
        options: Of each run.
        runs: How many.
        seed: Of the first; the next ones count up.
        say: Told of each step.

    Raises:
        UsageError, Refused: Nothing was touched.
    """
    for number in range(seed, seed + runs):
        ran, _, judged = run_judged(experiment, replace(options, seed=number, sham=True), say=say)
        applies = [
            one
            for one in (judged.verdict, *judged.also)
            if one is not RunVerdict.NOT_INJECTED  # on purpose
        ]
        yield Trial(
            seed=number,
            verdict=RunVerdict.FAIL
            if RunVerdict.FAIL in applies
            else (applies[0] if applies else RunVerdict.PASS),
            blamed=tuple(
                f"{one.checker.id} {one.checker.name}: {one.result.summary}"
                for one in judged.checkers
                if one.counts and one.result.verdict == "invalid"
            ),
            noise=judged.containment.noise,
            seconds=ran.seconds,
            folder=ran.folder,
        )
        if judged.verdict in (RunVerdict.DIRTY, RunVerdict.INTERRUPTED):
            return  # a person wants an end, or has something to clear up first
